"""Contract weight gradients inside the traversal, straight into `.grad`.

A linear layer's gradient is a product of what its node saved and the gradient that reaches it.
A prehook on the node computes `W.grad.addmm_(g.T, a)` and the engine is not asked for the weight,
so no temporary of the weight's size is made: on large weights with few rows that temporary's page
faults are most of a backward's time.

Naming the nodes as `inputs` makes the engine execute them and skip their weight. That is not
promised upstream, so the method tries itself on a small net first and refuses where it is wrong.
"""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from multiback import graph
from multiback.methods.summed import Overwriting
from multiback.request import SumRequest
from multiback.rules import linear
from multiback.rules.linear import LinearSite
from multiback.survey import all_uses
from multiback.traversals import Hooked

# Measured: below, the walk and the hooks cost more than the temporary; above, conv and many rows
# are bound by arithmetic. See DESIGN in docs/design.md.
MIN_WEIGHT_ELEMENTS = 1 << 18
MAX_ROWS = 256


@dataclass(frozen=True)
class Prepared:
    """The sites to contract, and the leaves that go the engine's ordinary way."""

    sites: list[LinearSite]
    ordinary: list[Tensor]


def worthwhile(request: SumRequest) -> bool:
    """Whether there is a large linear weight at all: a cheap look before any full walk.

    About 0.5 microseconds a node, and it ends at the first large weight.
    """
    if request.retain_graph:
        return False
    if request.wrt is not None and not any(t.numel() >= MIN_WEIGHT_ELEMENTS for t in request.wrt):
        return False
    return linear.has_weight_of(graph.roots_of(request.losses), MIN_WEIGHT_ELEMENTS)


def prepare(request: SumRequest, *, any_size: bool = False) -> Prepared | str:
    """The sites that qualify, or the reason why none does; `any_size` ignores what pays."""
    if reason := _refused_at_all(request):
        return reason
    roots = graph.roots_of(request.losses)
    nodes = graph.walk(roots)
    into = graph.edges_into(nodes, roots)
    if any("CheckpointFunctionBackward" in node.name() for node in nodes):
        return "the graph holds a reentrantly checkpointed segment, whose own traversals hooks would not see"
    wanted = None if request.wrt is None else {id(tensor) for tensor in request.wrt}
    by_leaf: dict[Any, list[LinearSite]] = {}
    for site in linear.weight_sites(nodes):
        by_leaf.setdefault(site.uses[0].source, []).append(site)
    chosen: list[LinearSite] = []
    for leaf, sites in by_leaf.items():
        if wanted is not None and id(leaf.variable) not in wanted:
            continue
        if all_uses(leaf, [(site, site.uses[0]) for site in sites], into) and all(
            _qualifies(site, any_size=any_size) for site in sites
        ):
            chosen += sites
    leaves = [leaf for leaf in map(graph.leaf_of, nodes) if leaf is not None]
    chosen = _without_shared(chosen, leaves)
    if not chosen:
        return "no large linear weight with few rows, an ordinary .grad and no hook is used in linear layers alone"
    if not agrees_with_autograd():
        return "this build of torch does not execute nodes named as inputs as expected"
    weights = {id(site.weight) for site in chosen}
    others = leaves if request.wrt is None else list(request.wrt)
    return Prepared(chosen, [tensor for tensor in others if id(tensor) not in weights])


def run(request: SumRequest, prepared: Prepared) -> None:
    """One traversal; on an error every hook is removed and `.grad` is as plain backward would leave it."""
    roots = request.roots()
    # a node of our own on top tells this traversal from others of the same graph
    root = roots[0].clone() if len(roots) == 1 else torch.stack([root.reshape(()) for root in roots]).sum()
    inputs: list[Any] = [GradientEdge(site.node, 0) for site in prepared.sites]
    overwriting = Overwriting(prepared.ordinary if request.overwrite else [])
    with overwriting, _Traversal(prepared.sites, root, overwrite=request.overwrite) as traversal:
        torch.autograd.backward(root, inputs=[*inputs, *prepared.ordinary])
    traversal.settle()


class _Traversal(Hooked):
    """The traversal in which sites add to their weights' `.grad`."""

    def __init__(self, sites: Sequence[LinearSite], root: Tensor, *, overwrite: bool) -> None:
        super().__init__()
        self._sites = sites
        self._overwrite = overwrite
        self._written: set[int] = set()
        self.hook(root, [(site.node, functools.partial(self._contract, site)) for site in sites])

    def _contract(self, site: LinearSite, grads: tuple[Tensor | None, ...]) -> None:
        cotangent = grads[0]
        if cotangent is None:
            return
        weight = site.weight
        with torch.no_grad():
            grad = weight.grad
            if grad is None:  # taken away meanwhile, by a hook
                grad = weight.grad = torch.zeros_like(weight)
            first = id(weight) not in self._written
            site.add_to(grad, cotangent, beta=0.0 if self._overwrite and first else 1.0)
        self._written.add(id(weight))

    def settle(self) -> None:
        """With `overwrite`, weights that no gradient reached hold None, as after a reset."""
        if self._overwrite:
            for site in self._sites:
                if id(site.weight) not in self._written:
                    site.weight.grad = None


def _refused_at_all(request: SumRequest) -> str:
    """Why no graph at all can be contracted now; empty where it can."""
    if request.retain_graph:
        return "the graph is to be kept"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is active"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "torch.distributed is initialised, and nothing shows whether a reducer listens on a parameter"
    return ""


def _qualifies(site: LinearSite, *, any_size: bool) -> bool:
    weight, grad = site.weight, site.weight.grad
    if not any_size and (weight.numel() < MIN_WEIGHT_ELEMENTS or site.units > MAX_ROWS):
        return False
    if grad is None or type(grad) is not Tensor or grad.layout != torch.strided or grad.grad_fn is not None:
        return False
    if weight.is_complex() or (grad.dtype, grad.device) != (weight.dtype, weight.device):
        return False
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return False
    return site.readable() and getattr(site.node, site.raw_names[0]).data.dtype == weight.dtype


def _without_shared(sites: list[LinearSite], leaves: list[Tensor]) -> list[LinearSite]:
    """Leave out weights whose `.grad` shares memory with another leaf's, or overlaps itself."""
    owners: dict[int, int] = {}
    for leaf in leaves:
        if leaf.grad is not None and leaf.grad.layout == torch.strided:
            key = leaf.grad.untyped_storage().data_ptr()
            owners[key] = owners.get(key, 0) + 1
    return [
        site
        for site in sites
        if (grad := site.weight.grad) is not None
        and owners[grad.untyped_storage().data_ptr()] == 1
        and grad.untyped_storage().nbytes() >= grad.numel() * grad.element_size()
        and 0 not in grad.stride()
    ]


@functools.cache
def agrees_with_autograd() -> bool:
    """Try the method on a small net against plain backward, once a process; warn where it is wrong."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        layers = [nn.Linear(2, 3), nn.Linear(3, 2, bias=False)]
        data = torch.rand(4, 2)
        parameters: list[Tensor] = [parameter for layer in layers for parameter in layer.parameters()]

        def gradients(contracted: bool) -> list[Tensor]:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            loss = layers[1](layers[0](data).relu()).square().sum()
            found = linear.weight_sites(graph.walk(graph.roots_of([loss])))
            if contracted:
                ordinary = [p for p in parameters if all(p is not site.weight for site in found)]
                run(SumRequest((loss,), None, None, overwrite=False, retain_graph=False), Prepared(found, ordinary))
            else:
                loss.backward()
            return [p.grad for p in parameters if p.grad is not None]

        agrees = all(map(torch.allclose, gradients(contracted=True), gradients(contracted=False)))
    if not agrees:
        warnings.warn(
            f"multiback: contraction disagrees with autograd on torch {torch.__version__} and is switched off; "
            "plain traversals are used instead.",
            RuntimeWarning,
            stacklevel=2,
        )
    return agrees
