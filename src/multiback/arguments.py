"""Checks what callers give: losses, weights and what to differentiate with respect to."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from multiback.errors import RequestError

Losses: TypeAlias = Tensor | Sequence[Tensor]
Differentiable: TypeAlias = Tensor | GradientEdge
Bare: TypeAlias = Differentiable
Named: TypeAlias = nn.Module | Mapping[str, Differentiable]
Wrt: TypeAlias = nn.Module | Differentiable | Mapping[str, Differentiable] | Iterable[Differentiable]
Weights: TypeAlias = Tensor | Sequence[float]
Structure: TypeAlias = Literal["bare", "tuple", "dict"]
Dim0: TypeAlias = Mapping[str | int, Literal["rows", "shared"]]


def listed(wrt: Any) -> list[Any]:
    """What an iterable holds."""
    if not isinstance(wrt, Iterable) or isinstance(wrt, (str, bytes, type)):
        raise RequestError(
            f"wrt: must be a module, a tensor, or a mapping or iterable of tensors; got {type(wrt).__name__}. Give "
            "what to differentiate by, such as model or model.parameters()."
        )
    return list(wrt)


def losses_of(losses: Losses) -> tuple[Tensor, ...]:
    """The loss tensors, checked."""
    tensors = _given("losses", losses)
    elements = 0
    for index, loss in enumerate(tensors):
        if not (isinstance(loss, Tensor) and loss.requires_grad and loss.is_floating_point()):
            _refuse(loss, "losses" if isinstance(losses, Tensor) else f"losses[{index}]")
        elements += loss.numel()
    if not elements:
        raise RequestError("losses: must hold at least one loss; got none. Give a tensor with elements.")
    return tensors


def _given(name: str, values: Any) -> tuple[Any, ...]:
    """A tensor alone, or what an iterable holds; RequestError where it is neither, or its order means nothing."""
    if isinstance(values, Tensor):
        return (values,)
    if isinstance(values, Mapping):
        raise RequestError(f"{name}: must be a tensor or a sequence of tensors; got a mapping. Give its .values().")
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, set, frozenset)):
        raise RequestError(
            f"{name}: must be a tensor or a sequence of tensors; got {type(values).__name__}. Give tensors that have a "
            "graph."
        )
    return tuple(values)


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


def _numbers(weights: Weights) -> Tensor:
    """The weights as one vector."""
    try:
        found = weights.detach() if isinstance(weights, Tensor) else torch.tensor(list(weights), dtype=torch.float64)
        return found.reshape(-1).cpu()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise RequestError(
            f"weights: must be a tensor or a sequence of numbers; got {type(weights).__name__}. Give one number per "
            "loss."
        ) from error


def shaped_weights(weights: Weights, losses: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The K weights, cut and shaped like the losses."""
    count = sum(loss.numel() for loss in losses)
    flat = _numbers(weights)
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
    found = tuple(
        part.reshape(loss.shape).to(loss.device, loss.dtype) for part, loss in zip(parts, losses, strict=True)
    )
    for part in found:
        if not bool(torch.isfinite(part).all()):
            raise RequestError(
                f"weights: must be finite in their loss's dtype; got one too large for {part.dtype}. "
                "Scale the weights down, or give the loss in a wider dtype."
            )
    return found


def named_wrt(wrt: nn.Module | Tensor | Mapping[str, Tensor] | Iterable[Tensor]) -> list[tuple[str, Tensor]]:
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
        items = [(f"wrt[{index}]", tensor) for index, tensor in enumerate(listed(wrt))]
    check_named(items)
    return items


def check_named(items: Sequence[tuple[str, object]]) -> None:
    """Refuse what cannot be differentiated with respect to."""
    for name, given in items:
        if isinstance(given, GradientEdge):
            continue
        if not isinstance(given, Tensor):
            raise RequestError(f"{name}: must be a tensor; got {type(given).__name__}. Give leaves or other tensors.")
        if not given.requires_grad:
            raise RequestError(
                f"{name}: must require grad, or no graph leads to it. Call requires_grad_() before the forward."
            )
    if not items:
        raise RequestError("wrt: must name at least one tensor; got none. Give a module, parameters or tensors.")
