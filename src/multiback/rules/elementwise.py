"""Scale and bias adds: a leaf that is added to, multiplied with or expanded over the units of an output."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from multiback.rules.site import REPEAT, Site, Use, use_of

_LEAF = torch.zeros(1, 1, requires_grad=True)
ADD: Any = type((_LEAF + _LEAF).grad_fn)
MUL: Any = type((_LEAF * _LEAF).grad_fn)
EXPAND: Any = type(_LEAF.expand(2, 1).grad_fn)
KINDS = tuple(kind.__name__ for kind in (ADD, MUL, EXPAND, REPEAT))


class ElementwiseSite(Site):
    """One broadcast leaf; a unit is the leading part of the output over which the leaf is the same."""

    @override
    def _unit_size(self) -> int:
        size = 1
        for extent in self.shape[self._unit_dims() :]:
            size *= extent
        return size

    def _unit_dims(self) -> int:
        return unit_dims(self.shape, self.uses[0].shape)

    @override
    def _rest(self) -> tuple[int, ...]:
        return self.shape[self._unit_dims() :]

    @property
    def _factor(self) -> str:
        return "other" if self.uses[0].number == 0 else "self"

    @property
    @override
    def fresh_bytes(self) -> int:
        return self.nbytes if type(self.node) is MUL else 0

    @property
    @override
    def raw_names(self) -> tuple[str, ...]:
        return (f"_raw_saved_{self._factor}",) if type(self.node) is MUL else ()

    @override
    def saved(self) -> Tensor | None:
        if type(self.node) is not MUL:
            return None
        return getattr(self.node, f"_saved_{self._factor}").expand(self.shape).reshape(self.units, *self._rest())

    @override
    def contract(self, use: Use, cotangent: Tensor, saved: Tensor | None, out: Tensor | None = None) -> Tensor:
        terms = cotangent if saved is None else cotangent * saved
        shape = use.shape
        summed = terms.sum(1)
        rest = summed.shape[1:]
        aligned = (1,) * (len(rest) - len(shape)) + tuple(shape[max(0, len(shape) - len(rest)) :])
        over = tuple(1 + axis for axis, (given, own) in enumerate(zip(rest, aligned, strict=True)) if given != own)
        summed = summed.sum(over) if over else summed
        if type(self.node) is ADD and use.number == 1 and self.node._saved_alpha != 1:
            summed = summed * self.node._saved_alpha
        return summed.reshape(-1, *shape)


class RepeatSite(Site):
    """Whole copies one after the other; a unit is a copy."""

    @override
    def _unit_size(self) -> int:
        return self.uses[0].numel

    @override
    def saved(self) -> Tensor | None:
        return None

    @override
    def contract(self, use: Use, cotangent: Tensor, saved: Tensor | None, out: Tensor | None = None) -> Tensor:
        return cotangent.sum(1).reshape(-1, *use.shape)


def unit_dims(output: tuple[int, ...], parameter: tuple[int, ...]) -> int:
    """How many leading dimensions of the output the parameter is the same over."""
    missing = len(output) - len(parameter)
    if missing < 0:
        return 0
    count = missing
    for extent in parameter:
        if extent != 1:
            break
        count += 1
    return count


def match(node: Any) -> Site | None:
    """The site of a sum, product, expansion or repetition with exactly one broadcast input; None otherwise."""
    if type(node) is REPEAT:
        use = use_of(node, 0, "weight")
        leading = len(node._saved_repeats) - len(use.shape) if use is not None else 0
        # only the first of the input's own dimensions may be repeated: then copies follow one another
        whole = all(times == 1 for times in node._saved_repeats[leading + 1 :])
        return RepeatSite(node, [use]) if use is not None and whole and use.numel else None
    (metadata,) = node._input_metadata
    output = tuple(metadata.shape)
    uses = [use_of(node, number, "weight") for number in range(len(node.next_functions))]
    found = [use for use in uses if use is not None and unit_dims(output, use.shape) and use.dtype == metadata.dtype]
    return ElementwiseSite(node, found) if len(found) == 1 else None
