"""A gradient request: losses as K scalars, weights, wrt; checked once here and trusted afterwards."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from multiback.arguments import (
    Differentiable,
    Dim0,
    Losses,
    Structure,
    Weights,
    Wrt,
    check_named,
    listed,
    losses_of,
    named_wrt,
    shaped_weights,
)
from multiback.errors import RequestError


class SumRequest(msgspec.Struct, frozen=True):  # a third of a frozen dataclass's construction time
    """The weighted sum of K losses, to be added to `.grad` of `wrt` (None: of every leaf of the graph).

    `weights` holds, beside each loss tensor, a tensor of its shape; None stands for ones.
    """

    losses: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] | None
    wrt: tuple[Tensor, ...] | None
    overwrite: bool
    retain_graph: bool

    def roots(self) -> list[Tensor]:
        """Scalars whose gradients add up to the answer: the losses themselves where they are scalars.

        Weights and sums are new nodes above the losses, so that every loss receives exactly its
        weight. (`grad_tensors` would say the same, but its first use in a process imports sympy.)
        """
        with torch.enable_grad():
            if self.weights is not None:
                return [(loss * weight).sum() for loss, weight in zip(self.losses, self.weights, strict=True)]
            return [loss.sum() if loss.ndim else loss for loss in self.losses]


class Target(msgspec.Struct, frozen=True, eq=False):
    """One thing to differentiate with respect to.

    `rows` says that its dimension 0 holds the batch's rows, so that `rows` answers in its own shape.
    """

    name: str
    key: str | int
    given: Differentiable
    parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    hooked: bool
    rows: bool = False

    @property
    def edge(self) -> GradientEdge:
        """Where its gradient arrives; some microseconds for a leaf."""
        return self.given if isinstance(self.given, GradientEdge) else get_gradient_edge(self.given)

    @property
    def data(self) -> bool:
        """Whether dimension 0 may hold rows."""
        return not self.parameter and len(self.shape) > 0 and self.shape[0] > 1

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one gradient."""
        return self.elements * self.dtype.itemsize

    def zeros(self, *leading: int) -> Tensor:
        """Zeros of its shape behind leading dimensions."""
        return torch.zeros((*leading, *self.shape), dtype=self.dtype, device=self.device)


class Request(msgspec.Struct, frozen=True, eq=False):
    """Gradients of K losses, to be returned in the structure of `wrt`.

    `losses` holds every distinct loss once; loss k of the caller is number `repeats[k]` of them,
    and None says that none was repeated.
    """

    losses: tuple[Tensor, ...]
    repeats: tuple[int, ...] | None
    targets: tuple[Target, ...]
    structure: Structure
    retain_graph: bool
    create_graph: bool = False

    @property
    def count(self) -> int:
        """Number of distinct losses."""
        return sum(loss.numel() for loss in self.losses)

    @property
    def asked(self) -> int:
        """K, the number of losses that the caller gave."""
        return self.count if self.repeats is None else len(self.repeats)

    def vector(self) -> Tensor:
        """All distinct losses as one vector, by new nodes above them, whether or not grad mode is on."""
        with torch.enable_grad():
            flat = [loss.reshape(-1) for loss in self.losses]
            return flat[0] if len(flat) == 1 else torch.cat(flat)

    def scalars(self) -> list[Tensor]:
        """Every distinct loss as a scalar of its own."""
        return scalars_of(self.losses)

    def root(self, weights: Tensor | None = None) -> Tensor:
        """A scalar: the sum of the losses, weighted by `weights` [count] where given.

        Every loss receives exactly its weight. (`grad_outputs` would say the same, but its first use
        in a process imports sympy.)
        """
        parts = None if weights is None else weights.split([loss.numel() for loss in self.losses])
        with torch.enable_grad():
            if parts is None:
                sums = [loss.sum() if loss.ndim else loss for loss in self.losses]
            else:
                sums = [
                    (loss * part.reshape(loss.shape).to(loss.device, loss.dtype)).sum()
                    for loss, part in zip(self.losses, parts, strict=True)
                ]
            return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def mirrored(self, answers: Sequence[Any]) -> Any:
        """One answer per target, in the structure of `wrt`."""
        return mirrored(self.structure, self.targets, answers)


def request(
    losses: Losses,
    wrt: Wrt,
    *,
    retain_graph: bool,
    create_graph: bool = False,
    rows: bool = False,
    dim0: Dim0 | None = None,
) -> Request:
    """Check everything; RequestError names the first argument that breaks its rule.

    With `rows`, targets that are no parameters hold the batch's rows, unless `dim0` says otherwise.
    """
    checked = losses_of(losses)
    distinct, repeats = distinct_losses(checked)
    targets, structure = targets_of(wrt)
    if rows:
        targets = _with_rows(targets, repeats, checked, dim0)
    return Request(distinct, repeats, targets, structure, retain_graph, create_graph)


def weights_of(weights: Weights, losses: Losses) -> Tensor:
    """The K weights as one float64 vector, checked as for `backward`."""
    return torch.cat([part.reshape(-1).double() for part in shaped_weights(weights, losses_of(losses))])


def scalars_of(losses: Sequence[Tensor]) -> list[Tensor]:
    """Every element of the losses as a scalar of its own, by new nodes above them where they are larger."""
    found: list[Tensor] = []
    with torch.enable_grad():
        for loss in losses:
            found += [loss] if loss.ndim == 0 else list(loss.reshape(-1).unbind())
    return found


def distinct_losses(losses: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...] | None]:
    """Losses that are the same output of the same node, once, and where each of the caller's is found."""
    starts: dict[Any, int] = {}
    distinct: list[Tensor] = []
    places: list[int] = []
    count = 0
    for loss in losses:
        key = (loss.grad_fn, loss.output_nr) if loss.grad_fn is not None else id(loss)
        if key not in starts:
            starts[key] = count
            distinct.append(loss)
            count += loss.numel()
        places += range(starts[key], starts[key] + loss.numel())
    return tuple(distinct), None if len(distinct) == len(losses) else tuple(places)


def mirrored(structure: Structure, targets: Sequence[Target], answers: Sequence[Any]) -> Any:
    """One answer per target, in the structure of the `wrt` that they came from."""
    if structure == "bare":
        return answers[0]
    if structure == "tuple":
        return tuple(answers)
    return {target.key: answer for target, answer in zip(targets, answers, strict=True)}


def targets_of(wrt: Wrt) -> tuple[tuple[Target, ...], Structure]:
    """What `wrt` names, checked, and its structure."""
    if isinstance(wrt, (Tensor, GradientEdge)):
        return (_target("wrt", 0, wrt),), "bare"
    if isinstance(wrt, nn.Module):
        return tuple(_target(f"wrt[{name!r}]", name, p) for name, p in named_wrt(wrt)), "dict"
    if isinstance(wrt, Mapping):
        items: list[tuple[Any, Any]] = list(wrt.items())
        check_named([(f"wrt[{key!r}]", given) for key, given in items])
        return tuple(_target(f"wrt[{key!r}]", key, given) for key, given in items), "dict"
    given = listed(wrt)
    check_named([(f"wrt[{index}]", one) for index, one in enumerate(given)])
    return tuple(_target(f"wrt[{index}]", index, one) for index, one in enumerate(given)), "tuple"


def _target(name: str, key: str | int, given: Differentiable) -> Target:
    check_named([(name, given)])
    if isinstance(given, GradientEdge):
        metadata = given.node._input_metadata[given.output_nr]
        shape = tuple(int(size) for size in metadata.shape)
        return Target(name, key, given, False, shape, metadata.dtype, metadata.device, hooked=False)
    hooked = bool(given._backward_hooks)
    parameter = isinstance(given, nn.Parameter)
    return Target(name, key, given, parameter, tuple(given.shape), given.dtype, given.device, hooked)


def _with_rows(
    targets: tuple[Target, ...], repeats: tuple[int, ...] | None, losses: tuple[Tensor, ...], dim0: Dim0 | None
) -> tuple[Target, ...]:
    """Mark the targets whose dimension 0 holds rows."""
    count = len(repeats) if repeats is not None else sum(loss.numel() for loss in losses)
    if dim0 is not None and not isinstance(dim0, Mapping):
        raise RequestError(
            f'dim0: must map entries of wrt to "rows" or "shared"; got {type(dim0).__name__}. Give, for instance, '
            '{"tokens": "rows"}.'
        )
    named = dict(dim0 or {})
    unknown = named.keys() - {target.key for target in targets}
    if unknown:
        raise RequestError(f"dim0: must name entries of wrt; got {sorted(unknown, key=str)}. Use wrt's own keys.")
    found = []
    for target in targets:
        said = named.get(target.key, "shared" if target.parameter else "rows")
        if said not in ("rows", "shared"):
            raise RequestError(f'dim0[{target.key!r}]: must be "rows" or "shared"; got {said!r}. Choose one of these.')
        if said == "rows" and (not target.shape or target.shape[0] < count):
            raise RequestError(
                f"{target.name}: must hold at least one row per loss, {count}, in dimension 0; got shape "
                f'{list(target.shape)}. Say dim0={{{target.key!r}: "shared"}} if every row uses all of it.'
            )
        found.append(msgspec.structs.replace(target, rows=said == "rows"))
    return tuple(found)


def sum_request(
    losses: Losses, *, wrt: Wrt | None, weights: Weights | None, overwrite: bool, retain_graph: bool
) -> SumRequest:
    """Check everything; RequestError names the first argument that breaks its rule."""
    checked = losses_of(losses)
    return SumRequest(
        losses=checked,
        weights=None if weights is None else shaped_weights(weights, checked),
        wrt=None if wrt is None else tuple(_tensors(wrt)),
        overwrite=overwrite,
        retain_graph=retain_graph,
    )


def _tensors(wrt: Wrt) -> list[Tensor]:
    """The tensors of `wrt` for `backward`, which has no `.grad` to fill for a bare edge."""
    if isinstance(wrt, GradientEdge):
        raise RequestError("wrt: must hold tensors, since an edge has no .grad; got a GradientEdge. Use mb.grad.")
    return [tensor for _, tensor in named_wrt(wrt)]  # pyrefly: ignore[bad-argument-type]
