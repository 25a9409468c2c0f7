"""One ordinary traversal from all losses: what `torch.autograd.backward(losses)` does."""

import torch
from torch import Tensor

from multiback import graph, traversals
from multiback.request import SumRequest
from multiback.survey import Survey


def run(request: SumRequest) -> None:
    """Accumulate into `.grad`; with `overwrite`, as if `.grad` had been reset to None, into kept buffers."""
    inputs = list(request.wrt) if request.wrt is not None else None
    if not request.overwrite:
        torch.autograd.backward(request.roots(), inputs=inputs, retain_graph=request.retain_graph)
        return
    leaves = inputs if inputs is not None else graph.leaves_of(request.losses)
    with Overwriting(leaves):
        torch.autograd.backward(request.roots(), inputs=inputs, retain_graph=request.retain_graph)


def gradient(survey: Survey, weights: Tensor | None) -> tuple[list[Tensor | None], bool]:
    """The weighted sum's gradient for every target, None where nothing arrives; and whether the graph was kept."""
    request = survey.request
    if weights is not None and request.repeats is not None:
        weights = weights.new_zeros(request.count).index_add_(0, torch.tensor(request.repeats), weights)
    elif request.repeats is not None:
        weights = torch.bincount(torch.tensor(request.repeats), minlength=request.count).double()
    root = request.root(weights)
    edges = [target.given for target in request.targets]
    keep = request.retain_graph or request.create_graph or not (survey.all_leaves or survey.python)
    return traversals.plain(root, edges, retain_graph=keep, create_graph=request.create_graph), keep


class Overwriting:
    """Zeroes the leaves' `.grad` in place at entry; at exit, what no gradient reached holds None.

    Optimisers treat zero and None differently, and a reset to None would have left None.
    """

    def __init__(self, leaves: list[Tensor]) -> None:
        self._reached: set[int] = set()
        self._kept: list[Tensor] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for leaf in leaves:
            self._prepare(leaf)

    def _prepare(self, leaf: Tensor) -> None:
        grad = leaf.grad
        if grad is None:
            return
        if not leaf.is_leaf or grad.layout != torch.strided or grad.grad_fn is not None:
            leaf.grad = None
            return
        with torch.no_grad():
            grad.zero_()
        key = len(self._kept)
        self._kept.append(leaf)

        def mark(grads: tuple[Tensor | None, ...]) -> None:
            if grads and grads[0] is not None:
                self._reached.add(key)

        node = torch.autograd.graph.get_gradient_edge(leaf).node
        self._handles.append(node.register_prehook(mark))

    def __enter__(self) -> "Overwriting":
        return self

    def __exit__(self, *_error: object) -> None:
        for handle in self._handles:
            handle.remove()
        for key, leaf in enumerate(self._kept):
            if key not in self._reached:
                leaf.grad = None
