"""The engine's runs that methods are made of: one loss, a batch of losses, and freeing a graph."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from multiback.request import Differentiable
from multiback.survey import Survey


# its stub allows no mixture of tensors and edges, which it takes
_grad: Any = torch.autograd.grad


def plain(
    root: Tensor, edges: Sequence[Differentiable], *, retain_graph: bool, create_graph: bool = False
) -> list[Any]:
    """One traversal from a scalar; None where nothing arrives."""
    if not edges:
        return []
    return list(_grad(root, edges, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True))


def batched(
    losses: Tensor, start: int, stop: int, edges: Sequence[Differentiable], *, retain_graph: bool
) -> list[Tensor | None]:
    """One traversal for losses `start` to `stop` of a vector, by a cotangent per loss."""
    seeds = losses.new_zeros(stop - start, losses.shape[0])
    seeds[torch.arange(stop - start), torch.arange(start, stop)] = 1
    return list(_grad(losses, edges, seeds, is_grads_batched=True, retain_graph=retain_graph, allow_unused=True))


def from_edges(
    starts: Sequence[GradientEdge], seeds: Sequence[Tensor], edges: Sequence[Differentiable]
) -> list[Tensor | None]:
    """Gradients [K, *shape] of `edges` from K gradients each at edges above them; the graph is kept.

    Batched where torch can, else one after the other.
    """
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    try:
        return list(_grad(starts, edges, seeds, is_grads_batched=True, **options))
    except RuntimeError as error:
        if "second time" in str(error) or "inplace" in str(error):
            raise
    pieces = [_grad(starts, edges, [seed[k] for seed in seeds], **options) for k in range(len(seeds[0]))]
    return [None if column[0] is None else torch.stack(column) for column in zip(*pieces, strict=True)]


class _Nothing(torch.autograd.Function):
    """A node above losses whose backward gives no gradient to any of them."""

    @staticmethod
    @override
    def forward(ctx: Any, *losses: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        ctx.count = len(losses)
        return losses[0].new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *_grads: Any) -> tuple[None, ...]:
        return (None,) * ctx.count


def release(survey: Survey) -> None:
    """Free all that the graph keeps, as a `backward()` would, without computing anything.

    The engine frees each node that it runs, and a node that gets no gradient computes none: a few
    microseconds a node. Python nodes would be run on zeros, so where there are any the graph is left
    to go with its losses. Tensor hooks are called with None; one that cannot take it ends the walk.
    """
    if survey.python:
        return
    root = _Nothing.apply(*survey.request.losses)
    leaves = [leaf for leaf, _ in survey.leaves.values()]
    try:
        _grad(root, leaves, allow_unused=True)
    except Exception:  # noqa: S110 - whatever a user's hook raises, the answer stands
        pass
