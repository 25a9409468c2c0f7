"""A cut through a graph that is there: leaves stand in for its outputs, one traversal follows at the end."""

from collections.abc import Iterable
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from multiback import graph
from multiback.api.accumulate import backward
from multiback.api.answering import freed_graphs_named
from multiback.arguments import Bare, Differentiable, Losses, Named, Wrt
from multiback.cuts.cotangents import (
    cotangents_of,
    filled,
    gradients_of,
    refuse_lost,
    refuse_unreached,
    root_of,
    summed,
)
from multiback.cuts.fingerprints import Fingerprints
from multiback.cuts.naming import name_of
from multiback.cuts.stand_ins import StandIns
from multiback.errors import FreedGraphError, RequestError, StaleForwardError
from multiback.nested import dense, map_tensors, tensors_in
from multiback.request import mirrored, targets_of
from multiback.survey import REENTRANT, has_reentrant

T = TypeVar("T")
_FREED = (
    "cut: must have a graph that is still there; its backward() has freed it. Give that one retain_graph=True, or "
    "run the forward again."
)


class Cut(StandIns, Generic[T]):
    """Leaves that stand in for an output, so that losses on them cost no traversal of the model.

    Attributes
    ----------
    value : the output in its own structure, with a leaf in the place of every tensor that has a
        graph. A leaf shares the output's memory. Slice it, index it, reduce it, back-propagate any
        number of losses on it, each at the cost of what was computed above it.

    Used as a context manager, a clean exit runs `backward()` once if any loss has left a gradient;
    after an exception nothing is run. A cut that dies with gradient still on its value warns.
    """

    value: T

    def __init__(self, output: T) -> None:
        tensors = tensors_in(output)
        outputs = {id(tensor): tensor for tensor in tensors if tensor.requires_grad}
        if not outputs:
            got = "none that requires grad" if tensors else "no tensor"
            raise RequestError(
                f"cut: must be given an output with a graph; got {type(output).__name__} with {got}. Compute it "
                "outside no_grad(), or give the model and its data."
            )
        refuse_inference_mode()
        self._outputs = list(outputs.values())
        self._leaves = [tensor.detach().requires_grad_() for tensor in self._outputs]
        leaves = dict(zip(outputs, self._leaves, strict=True))
        self.value = map_tensors(output, lambda tensor: leaves.get(id(tensor), tensor))
        self._versions = [tensor._version for tensor in self._outputs]
        self._parts = graph.leaves_of(self._outputs)
        self._before = Fingerprints([(lambda part=part: name_of(part), part) for part in self._parts])
        self._freed = False
        self._watch(self._leaves)

    def backward(self, *, retain_graph: bool = False) -> None:
        """One traversal of the model for everything accumulated on `value`, into `.grad` of its leaves.

        The gradient on `value` is used up: losses that follow start afresh.

        Parameters
        ----------
        retain_graph : keep the model's graph, so that further losses on `value` can follow.

        Raises
        ------
        RequestError : no loss has left a gradient on `value`.
        StaleForwardError : a leaf of the graph has changed since the cut was made.
        FreedGraphError : the graph has been freed.

        Notes
        -----
        One traversal, as `mb.backward`, plus one read of all parameters to see that none has changed.
        """
        gradients = self._accumulated()
        self._check()
        self._forgotten.detach()  # whatever comes now, it was not forgotten
        there = [None if gradient is None else dense(gradient.detach()) for gradient in gradients]
        with freed_graphs_named():
            root = root_of(self._outputs, there)
            if root is not None:
                backward(root, retain_graph=retain_graph)
        self._freed = not retain_graph
        self._use_up()

    def __repr__(self) -> str:
        """What it stands for."""
        shapes = ", ".join(str(list(leaf.shape)) for leaf in self._leaves)
        return f"Cut(value {shapes}{', its graph freed' * self._freed})"

    @overload
    def grad_of(self, loss: Tensor, *, wrt: Bare, retain_graph: bool = False) -> Tensor: ...
    @overload
    def grad_of(self, loss: Tensor, *, wrt: Named, retain_graph: bool = False) -> dict[str, Tensor]: ...
    @overload
    def grad_of(
        self, loss: Tensor, *, wrt: Iterable[Differentiable], retain_graph: bool = False
    ) -> tuple[Tensor, ...]: ...
    @overload
    def grad_of(self, loss: Tensor, *, wrt: None = None, retain_graph: bool = False) -> Any: ...
    def grad_of(self, loss: Tensor, *, wrt: Wrt | None = None, retain_graph: bool = False) -> Any:
        """The gradient of one loss on `value`, returned; no `.grad` is touched, and nothing accumulates.

        Parameters
        ----------
        loss : one real scalar computed from `value`.
        wrt : what to differentiate with respect to, as for `mb.grad`. It is required here: a graph
            does not tell which of its leaves are data.
        retain_graph : keep the loss's own graph, down to `value`; the model's graph is always kept.

        Returns
        -------
        Tensor, tuple or dict of tensors : in the structure of `wrt`; zeros where nothing arrives. What
            the loss uses directly, such as a head above the cut, is part of the answer.

        Raises
        ------
        RequestError : an argument breaks its rule; nothing has been changed.
        StaleForwardError, FreedGraphError : as for `backward`.

        Notes
        -----
        One traversal of the loss's graph, one of the model's.
        """
        check_one(loss)
        return self.grads_of([loss], wrt=wrt, retain_graph=retain_graph)[0]

    def grads_of(self, losses: Losses, *, wrt: Wrt | None = None, retain_graph: bool = False) -> list[Any]:
        """The gradients of K losses on `value`, one answer each; as `grad_of`.

        Notes
        -----
        One traversal of each loss's graph; of the model's, what `mb.jac` needs for K losses. Holds
        K gradients, and K cotangents of `value`.
        """
        if wrt is None:
            raise RequestError(
                "wrt: must be given for a cut through an existing output; got None. Name tensors or a module, or give "
                "mb.cut the model and its data."
            )
        targets, structure = targets_of(wrt)
        self._check()
        if has_reentrant(node.name() for node in graph.walk(graph.roots_of(self._outputs))):
            raise RequestError(REENTRANT)
        found = cotangents_of(losses, self._leaves, targets, lambda one: one, retain_graph=retain_graph)
        with freed_graphs_named():
            through = gradients_of([root_of(self._outputs, c.values) for c in found], targets, retain_graph=True)
        answers = [
            [summed(pair) for pair in zip(one.direct, by_model, strict=True)]
            for one, by_model in zip(found, through, strict=True)
        ]
        for answer in answers:
            refuse_lost(losses, self._outputs, self._leaves, targets, answer)
        refuse_unreached(answers)
        return [mirrored(structure, targets, filled(targets, answer)) for answer in answers]

    def _check(self) -> None:
        if self._freed:
            raise FreedGraphError(_FREED)
        if [tensor._version for tensor in self._outputs] != self._versions:
            raise StaleForwardError(
                "cut: must stand in for an output that stays as it is; it has been written to in place since the cut "
                "was made. Cut the result of that operation, or do it out of place."
            )
        changed = self._before.changed()
        if changed is not None:
            raise StaleForwardError(
                f"cut: must be used before the model changes; {changed} has changed since the cut was made, so this "
                "forward's gradient is stale. Back-propagate all losses before the step, or run a forward after it."
            )


def refuse_inference_mode() -> None:
    """RequestError where no tensor can get a gradient."""
    if torch.is_inference_mode_enabled():
        raise RequestError(
            "cut: must be made and used outside torch.inference_mode(), where no tensor can get a gradient; got a call "
            "inside. Leave the block first."
        )


def check_one(loss: object) -> None:
    """RequestError unless it is a tensor of one element."""
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise RequestError(
            f"loss: must be one scalar; got shape {list(loss.shape)}. Reduce it with .sum(), or give cut.grads_of all "
            "of its elements as losses of their own."
        )
    if not isinstance(loss, Tensor):
        raise RequestError(f"loss: must be a tensor; got {type(loss).__name__}. Give a scalar computed from cut.value.")
