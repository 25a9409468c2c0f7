"""The engine's runs that methods are made of: one loss, a batch of losses, and freeing a graph."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from typing_extensions import Self, override

from multiback.arguments import Differentiable
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
    seeds = _seeds(losses, start, stop)
    return list(_grad(losses, edges, seeds, is_grads_batched=True, retain_graph=retain_graph, allow_unused=True))


def _seeds(losses: Tensor, start: int, stop: int) -> Tensor:
    seeds = losses.new_zeros(stop - start, losses.shape[0])
    seeds[torch.arange(stop - start), torch.arange(start, stop)] = 1
    return seeds


def reaching(
    root: Tensor, nodes: Sequence[Node], others: Sequence[Differentiable], *, retain_graph: bool
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """One traversal from a scalar: what reaches the nodes, tensor hooks applied, and the gradients of `others`."""
    with torch.enable_grad():
        top = root.view_as(root)  # a node of our own, which tells this traversal from others of the graph
    with _Listening(top, nodes, None) as heard:
        edges = [*(GradientEdge(node, 0) for node in nodes), *others]
        found = plain(top, edges, retain_graph=retain_graph)
    return heard.of(nodes, found), found[len(nodes) :]


def reaching_batched(
    losses: Tensor,
    start: int,
    stop: int,
    nodes: Sequence[Node],
    others: Sequence[Differentiable],
    *,
    retain_graph: bool,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The same for losses `start` to `stop` of a vector, each answer [stop - start, ...]."""
    with torch.enable_grad():
        top = losses.view_as(losses)
    with _Listening(top, nodes, stop - start) as heard:
        edges = [*(GradientEdge(node, 0) for node in nodes), *others]
        found = batched(top, start, stop, edges, retain_graph=retain_graph)
    return heard.of(nodes, found), found[len(nodes) :]


class Hooked:
    """Prehooks on nodes that act in one traversal alone: the one from `top`, whose node is our own.

    Foreign traversals of the same graph, such as in another thread, pass them by.
    """

    def __init__(self) -> None:
        self._task: int | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def hook(self, top: Tensor, hooks: Iterable[tuple[Node, Callable[[tuple[Tensor | None, ...]], None]]]) -> None:
        """Put the prehooks in place; leaving the context takes them away."""
        if top.grad_fn is None:
            raise AssertionError("the top is made by an operation")
        self._handles.append(top.grad_fn.register_prehook(self._begin))
        self._handles += [node.register_prehook(functools.partial(self._call, act)) for node, act in hooks]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, _grads: object) -> None:
        self._task = torch._C._current_graph_task_id()

    def _call(self, act: Callable[[tuple[Tensor | None, ...]], None], grads: tuple[Tensor | None, ...]) -> None:
        if torch._C._current_graph_task_id() == self._task:
            act(grads)


class _Listening(Hooked):
    """What reaches nodes in one traversal.

    The engine captures the gradient of an edge before tensor hooks where it goes on to run the node,
    and after them where it does not. A node's own prehook comes after them, so what it hears counts;
    a node that is not run has no prehook called, and then what was captured is right.
    """

    def __init__(self, top: Tensor, nodes: Sequence[Node], batch: int | None) -> None:
        super().__init__()
        self._batch = batch
        self._heard: dict[Node, Tensor] = {}
        self.hook(top, [(node, functools.partial(self._hear, node)) for node in nodes])

    def _hear(self, node: Node, grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[0]
        if grad is None:
            return
        if self._batch is not None:  # inside torch's batching, whose only level here is the first
            grad = torch._remove_batch_dim(grad, 1, self._batch, 0)
        self._heard[node] = grad.detach()

    def of(self, nodes: Sequence[Node], captured: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What reached each node."""
        return [self._heard.get(node, one) for node, one in zip(nodes, captured, strict=False)]


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
    microseconds a node. Meant for graphs that no last traversal could be trusted to free. Python
    nodes would be run on zeros, so where there are any the graph is left to go with its losses.
    Tensor hooks are called with None; one that cannot take it ends the walk.
    """
    if survey.python:
        return
    leaves = [leaf for leaf, _ in survey.leaves.values()]
    try:
        with torch.enable_grad():
            root = _Nothing.apply(*survey.request.losses)
        _grad(root, leaves, allow_unused=True)
    except Exception:  # noqa: S110 - whatever a user's hook raises, the answer stands
        pass
