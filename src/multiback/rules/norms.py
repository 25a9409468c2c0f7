"""Layer, group, instance and batch norm: scale and shift of a normalised input.

With `xhat` the normalised input, the scale's gradient is the sum of `g * xhat` and the shift's the
sum of `g`. The statistics are those that the forward saved, so nothing is differentiated through them.
"""

from typing import Any

from torch import Tensor
from typing_extensions import override

from multiback.rules.site import REPEAT, Site, Use, use_of

LAYER_NORM, GROUP_NORM, BATCH_NORM = "NativeLayerNormBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0"
KINDS = (LAYER_NORM, GROUP_NORM, BATCH_NORM)


class _NormSite(Site):
    """What the families share: `saved` is the normalised input; uses are a scale and a shift."""

    @override
    def contract(self, use: Use, cotangent: Tensor, saved: Tensor | None, out: Tensor | None = None) -> Tensor:
        terms = cotangent if use.role == "bias" or saved is None else cotangent * saved
        return self._sum(terms).to(use.dtype).reshape(-1, *use.shape)

    def _sum(self, terms: Tensor) -> Tensor:
        """[G, n, *rest] summed over everything that shares an element of the scale."""
        raise NotImplementedError

    @property
    @override
    def fresh_bytes(self) -> int:
        return 2 * self.nbytes if self._scaled() else 0

    def _scaled(self) -> bool:
        return any(use.role == "weight" for use in self.uses)


class LayerNormSite(_NormSite):
    """Scale and shift of the normalised dimensions; a unit is what is normalised together."""

    @override
    def _unit_size(self) -> int:
        size = 1
        for extent in self.node._saved_normalized_shape:
            size *= int(extent)
        return size

    @property
    @override
    def raw_names(self) -> tuple[str, ...]:
        return ("_raw_saved_input", "_raw_saved_result1", "_raw_saved_result2") if self._scaled() else ()

    @override
    def saved(self) -> Tensor | None:
        if not self._scaled():
            return None
        node = self.node
        normalised = (node._saved_input - node._saved_result1) * node._saved_result2
        return normalised.reshape(self.units, self.unit_size)

    @override
    def _sum(self, terms: Tensor) -> Tensor:
        return terms.sum(1)


class _ChannelNormSite(_NormSite):
    """Scale and shift per channel; a unit is a sample [C, *spatial]."""

    channels: int

    @override
    def _unit_size(self) -> int:
        size = self.channels
        for extent in self.shape[2:]:
            size *= extent
        return size

    @override
    def _rest(self) -> tuple[int, ...]:
        return (self.channels, *self.shape[2:])

    @override
    def _sum(self, terms: Tensor) -> Tensor:
        return terms.flatten(3).sum((1, 3)) if terms.ndim > 3 else terms.sum(1)


class GroupNormSite(_ChannelNormSite):
    """Group norm."""

    def __init__(self, node: Any, uses: list[Use]) -> None:
        self.channels = int(node._saved_C)
        super().__init__(node, uses)

    @property
    @override
    def raw_names(self) -> tuple[str, ...]:
        return ("_raw_saved_input", "_raw_saved_result1", "_raw_saved_result2") if self._scaled() else ()

    @override
    def saved(self) -> Tensor | None:
        if not self._scaled():
            return None
        node = self.node
        grouped = node._saved_input.reshape(self.units, int(node._saved_group), -1)
        normalised = (grouped - node._saved_result1.unsqueeze(-1)) * node._saved_result2.unsqueeze(-1)
        return normalised.reshape(self.units, *self._rest())


class BatchNormSite(_ChannelNormSite):
    """Batch norm, and instance norm: a batch norm of [1, N * C, ...] whose scale is repeated N times."""

    def __init__(self, node: Any, uses: list[Use]) -> None:
        self.channels = uses[0].shape[0]
        super().__init__(node, uses)

    @property
    @override
    def raw_names(self) -> tuple[str, ...]:
        if not self._scaled():
            return ()
        return ("_raw_saved_input", *(f"_raw_saved_{name}" for name in self._statistics()))

    def _statistics(self) -> tuple[str, str]:
        return ("result1", "result2") if self.node._saved_training else ("running_mean", "running_var")

    @override
    def saved(self) -> Tensor | None:
        if not self._scaled():
            return None
        node = self.node
        mean, spread = (getattr(node, f"_saved_{name}") for name in self._statistics())
        inverse = spread if node._saved_training else (spread + node._saved_eps).rsqrt()
        shape = (1, -1, *(1 for _ in self.shape[2:]))
        normalised = (node._saved_input - mean.reshape(shape)) * inverse.reshape(shape)
        return normalised.reshape(self.units, *self._rest())


def _repeated_use_of(node: Any, number: int, role: str) -> Use | None:
    """The use of a leaf that enters as one copy per sample."""
    carrier = node.next_functions[number][0]
    if type(carrier) is not REPEAT or len(carrier._saved_repeats) != 1:
        return None
    use = use_of(carrier, 0, role)
    if use is None or not use.is_leaf or len(use.shape) != 1:
        return None
    return Use(role, number, use.source, 0, (carrier, *use.carriers), use.shape, use.dtype)


def match(node: Any) -> Site | None:
    """The site of a norm whose scale or shift is a leaf; None otherwise."""
    kind = type(node).__name__
    numbers = ((1, "weight"), (2, "bias"))
    found = [use for use in (_repeated_use_of(node, *number) for number in numbers) if use is not None]
    if kind != BATCH_NORM or not found:
        found = [use for use in (use_of(node, *number) for number in numbers) if use is not None]
    if not found or any(use.dtype != node._input_metadata[0].dtype for use in found):
        return None
    site = {LAYER_NORM: LayerNormSite, GROUP_NORM: GroupNormSite, BATCH_NORM: BatchNormSite}[kind]
    return site(node, found)
