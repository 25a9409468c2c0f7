"""A gradient request: losses as K scalars, weights, wrt; checked once here and trusted afterwards."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from multiback.errors import RequestError

Losses: TypeAlias = Tensor | Sequence[Tensor]
Wrt: TypeAlias = nn.Module | Tensor | Mapping[str, Tensor] | Iterable[Tensor]
Weights: TypeAlias = Tensor | Sequence[float]


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
        if self.weights is not None:
            return [(loss * weight).sum() for loss, weight in zip(self.losses, self.weights, strict=True)]
        return [loss.sum() if loss.ndim else loss for loss in self.losses]


def sum_request(
    losses: Losses, *, wrt: Wrt | None, weights: Weights | None, overwrite: bool, retain_graph: bool
) -> SumRequest:
    """Check everything; RequestError names the first argument that breaks its rule."""
    checked = _losses(losses)
    return SumRequest(
        losses=checked,
        weights=None if weights is None else _weights(weights, checked),
        wrt=None if wrt is None else tuple(tensor for _, tensor in named_wrt(wrt)),
        overwrite=overwrite,
        retain_graph=retain_graph,
    )


def _losses(losses: Losses) -> tuple[Tensor, ...]:
    tensors = (losses,) if isinstance(losses, Tensor) else tuple(losses)
    elements = 0
    for index, loss in enumerate(tensors):
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.is_floating_point()):
            _refuse(loss, "losses" if isinstance(losses, Tensor) else f"losses[{index}]")
        elements += loss.numel()
    if not elements:
        raise RequestError("losses: must hold at least one loss; got none. Give a tensor with elements.")
    return tensors


def _refuse(loss: object, name: str) -> NoReturn:
    """Say which rule a loss breaks."""
    if not isinstance(loss, Tensor):
        raise RequestError(f"{name}: must be a tensor; got {type(loss).__name__}. Give tensors that have a graph.")
    if loss.is_complex():
        raise RequestError(f"{name}: must be real; got {loss.dtype}. Take .real or .abs() of it.")
    if not loss.is_floating_point():
        raise RequestError(f"{name}: must be floating; got {loss.dtype}. Give the loss before it was rounded.")
    raise RequestError(
        f"{name}: must have a graph; nothing that requires grad leads to it. "
        "Compute it without detach() and outside no_grad()."
    )


def _weights(weights: Weights, losses: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The K weights, cut and shaped like the losses."""
    count = sum(loss.numel() for loss in losses)
    flat = (
        weights.detach() if isinstance(weights, Tensor) else torch.tensor(list(weights), dtype=torch.float64)
    ).reshape(-1)
    if flat.is_complex():
        raise RequestError(f"weights: must be real; got {flat.dtype}. Give one number per loss.")
    if flat.numel() != count:
        raise RequestError(f"weights: must be one number per loss, {count} in all; got {flat.numel()}.")
    for index, value in enumerate(flat.tolist()):
        if not math.isfinite(value):
            raise RequestError(
                f"weights[{index}]: must be finite; got {value}. Leave the loss out if it is not wanted."
            )
    parts = flat.split([loss.numel() for loss in losses])
    return tuple(part.reshape(loss.shape).to(loss.device, loss.dtype) for part, loss in zip(parts, losses, strict=True))


def named_wrt(wrt: Wrt) -> list[tuple[str, Tensor]]:
    """What `wrt` names, in order; frozen parameters of a Module are skipped, named ones refused."""
    if isinstance(wrt, nn.Module):
        found: list[tuple[str, Tensor]] = [(name, p) for name, p in wrt.named_parameters() if p.requires_grad]
        if not found:
            raise RequestError("wrt: the module must have a trainable parameter; it has none. Unfreeze one.")
        return found
    if isinstance(wrt, Tensor):
        items = [("wrt", wrt)]
    elif isinstance(wrt, Mapping):
        items = [(f"wrt[{name!r}]", tensor) for name, tensor in wrt.items()]
    else:
        items = [(f"wrt[{index}]", tensor) for index, tensor in enumerate(wrt)]
    for name, tensor in items:
        if not isinstance(tensor, Tensor):
            raise RequestError(f"{name}: must be a tensor; got {type(tensor).__name__}. Give leaves or other tensors.")
        if not tensor.requires_grad:
            raise RequestError(
                f"{name}: must require grad, or no graph leads to it. Call requires_grad_() before the forward."
            )
    if not items:
        raise RequestError("wrt: must name at least one tensor; got none. Give a module, parameters or tensors.")
    return items
