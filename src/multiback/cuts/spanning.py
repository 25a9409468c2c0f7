"""A cut whose value holds the rows of all ranks of a process group; each rank runs its own again."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, overload

from torch import Tensor
from typing_extensions import override

from multiback.arguments import Bare, Differentiable, Losses, Named, Wrt
from multiback.cuts.cotangents import Cotangents, cotangents_of, root_of, summed
from multiback.cuts.deferred import DeferredCut
from multiback.cuts.existing import check_one
from multiback.cuts.row_gradient import RowGradient
from multiback.cuts.stand_ins import StandIns
from multiback.distributed import Group
from multiback.errors import RequestError
from multiback.nested import map_tensors, tensors_in
from multiback.request import Target, mirrored, targets_of


class SpanningCut(StandIns):
    """Outputs of the rows of all ranks as leaves; what arrives at a row goes to the rank that owns it.

    Every rank makes the same calls in the same order. The loss that is differentiated is the sum of
    what the ranks compute: each the loss of its own rows against all others, or each the whole one
    divided by the number of ranks. Ranks hold the same parameters; their gradients are summed over
    the ranks, so that every rank has the gradient of that sum.

    Attributes
    ----------
    value : the outputs of all rows, [N, ...], in the order of ranks; leaves.
    rows : which of them are this rank's own, as a range.
    num_rows : N, over all ranks.

    Used as a context manager, a clean exit runs `backward()`, on every rank, if any loss of any rank
    has left a gradient; after an exception on one rank the others raise as well.
    """

    def __init__(self, own: DeferredCut, group: Group) -> None:
        self._own, self._group = own, group
        told = group.told((own.num_rows, [(list(one.shape[1:]), str(one.dtype)) for one in tensors_in(own.value)]))
        counts = [count for count, _ in told]
        if any(shapes != told[0][1] for _, shapes in told):
            raise RequestError(
                f"group: must give outputs of the same shapes and dtypes on every rank; got "
                f"{[shapes for _, shapes in told]}, rows left out. Pad them to one length."
            )
        parameters = group.told(own.described_parameters())
        if any(one != parameters[0] for one in parameters):
            raise RequestError(
                "group: must run the same parameters on every rank, and meet them in the same order where they belong "
                f"to no module; got others on some: {_first_differences(parameters)}. Put them into one module, alike "
                "on every rank."
            )
        group.together(lambda: _refuse_data_with_graph(own))
        start = sum(counts[: group.rank])
        self.rows, self.num_rows = range(start, start + own.num_rows), sum(counts)
        self.value: Any = map_tensors(
            own.value,
            lambda one: group.gathered(one.detach(), counts).requires_grad_(one.requires_grad),
        )
        self._leaves = [one for one in tensors_in(self.value) if one.requires_grad]
        self._broken = False
        self._watch(self._leaves)

    def __repr__(self) -> str:
        """The rows, and how this rank's own are run."""
        return f"SpanningCut({self.num_rows} rows on {self._group.size} ranks, {self.rows} here; {self._own!r})"

    @override
    def _waits(self, *, failed: bool) -> bool:
        """Asked of all ranks: one without gradient must take part, and none goes on where one has failed."""
        said = self._group.told(None if failed else any(leaf.grad is not None for leaf in self._leaves))
        if None in said and not failed:
            raise RequestError(
                f"group: must leave the block on every rank; rank {said.index(None)} has failed inside it."
            )
        return any(said)

    @override
    def backward(self, *, retain_graph: bool = False) -> None:
        """Send everything accumulated on `value`, on all ranks, on to the model: into `.grad` of its parameters.

        Raises
        ------
        RequestError : no loss of any rank has left a gradient; another rank fails; a parameter has a
            post-accumulate hook, which would act on this rank's part.
        StaleForwardError, RecomputationError : as for one process.

        Notes
        -----
        As in one process, for this rank's rows; one sum over the ranks of a cotangent of `value`, and
        one of the gradient of every parameter. After an error `.grad` of the parameters is as before.
        """
        self._group.together(self._check)
        waiting = self._group.sums([leaf.grad for leaf in self._leaves], self._leaves)
        if all(one is None for one in waiting):
            self._accumulated()  # says so
        self._forgotten.detach()
        mine = [leaf for leaf in tensors_in(self._own.value) if leaf.requires_grad]
        parameters = self._own.parameters()
        before = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            for leaf, total in zip(mine, waiting, strict=True):
                leaf.grad = None if total is None else total[self.rows.start : self.rows.stop].clone()
            self._broken = True
            self._group.together(lambda: self._own.backward(retain_graph=retain_graph))
            totals = self._group.sums([parameter.grad for parameter in parameters], parameters)
        except BaseException:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
            for leaf in mine:
                leaf.grad = None
            raise
        for parameter, grad, total in zip(parameters, before, totals, strict=True):
            parameter.grad = total if grad is None else grad if total is None else grad.add_(total)
        self._broken = False
        self._use_up()

    def _check(self) -> None:
        if self._broken:
            raise RequestError(
                "cut.backward(): must not follow one that an error stopped. Set .grad of cut.value to None and "
                "back-propagate the losses again, on every rank."
            )
        name = self._own.acting_on_grad()
        if name is not None:
            raise RequestError(
                "cut.backward(): must find no post-accumulate hook on a parameter, which would act on one rank's part; "
                f"got one on {name}. Remove it."
            )

    @overload
    def grad_of(self, loss: Tensor, *, wrt: None = None, retain_graph: bool = False) -> RowGradient: ...
    @overload
    def grad_of(self, loss: Tensor, *, wrt: Bare, retain_graph: bool = False) -> Tensor: ...
    @overload
    def grad_of(self, loss: Tensor, *, wrt: Named, retain_graph: bool = False) -> dict[str, Tensor]: ...
    @overload
    def grad_of(
        self, loss: Tensor, *, wrt: Iterable[Differentiable], retain_graph: bool = False
    ) -> tuple[Tensor, ...]: ...
    def grad_of(self, loss: Tensor, *, wrt: Wrt | None = None, retain_graph: bool = False) -> Any:
        """The gradient of the sum of the ranks' losses, returned; no `.grad` is touched.

        Returns
        -------
        RowGradient : by default, of this rank's rows of the data, numbered over all ranks.
        Tensor, tuple or dict of tensors : in the structure of `wrt`, summed over the ranks; of this
            rank's own data, as it is.

        Raises
        ------
        RequestError, StaleForwardError, RecomputationError : as for `backward`.
        """
        check_one(loss)
        return self.grads_of([loss], wrt=wrt, retain_graph=retain_graph)[0]

    def grads_of(self, losses: Losses, *, wrt: Wrt | None = None, retain_graph: bool = False) -> list[Any]:
        """The gradients of K losses, of each the sum over the ranks, one answer each; as `grad_of`."""
        targets, structure = targets_of(wrt) if wrt is not None else ((), "tuple")
        found = self._group.together(
            lambda: cotangents_of(losses, self._leaves, targets, lambda one: one, retain_graph=retain_graph)
        )
        if len(set(self._group.told(len(found)))) > 1:
            raise RequestError("losses: must be as many on every rank; got other numbers on some. Give each its part.")
        roots = [self._root(one) for one in found]
        if wrt is None:
            answers = self._group.together(lambda: self._own.grads_of(roots))
            return [replace(one, rows=one.rows + self.rows.start, num_rows=self.num_rows) for one in answers]
        given = [target.given for target in targets]
        through = self._group.together(lambda: self._own.grads_of(roots, wrt=given))
        return [
            mirrored(structure, targets, self._summed(targets, one.direct, by_model))
            for one, by_model in zip(found, through, strict=True)
        ]

    def _root(self, found: Cotangents) -> Tensor:
        """A loss on this rank's own outputs that has the cotangents of all ranks' losses there."""
        mine = [leaf for leaf in tensors_in(self._own.value) if leaf.requires_grad]
        totals = self._group.sums(found.values, self._leaves)
        root = root_of(mine, [None if one is None else one[self.rows.start : self.rows.stop] for one in totals])
        if root is None:
            raise AssertionError("cotangents_of refuses a loss that does not use the value")
        return root

    def _summed(self, targets: tuple[Target, ...], direct: list[Tensor | None], by_model: Any) -> list[Tensor]:
        """Direct use and use by the model; summed over ranks, but for data, of which every rank has its own."""
        own = {id(tensor) for tensor in self._own.data_tensors()}
        both = [summed(pair) for pair in zip(direct, by_model, strict=True)]
        local = [id(target.given) in own for target in targets]
        like = [target.zeros() for target in targets]
        totals = self._group.sums([None if here else one for one, here in zip(both, local, strict=True)], like)
        found = [one if here else total for one, total, here in zip(both, totals, local, strict=True)]
        return [zeros if one is None else one for one, zeros in zip(found, like, strict=True)]


def _refuse_data_with_graph(own: DeferredCut) -> None:
    if any(not tensor.is_leaf and tensor.requires_grad for tensor in own.data_tensors()):
        raise RequestError(
            "data: must have no graph of their own where a group is given, since their part of the gradient would be "
            "this rank's alone; got data that have one. Make what comes before them part of the model, or detach them."
        )


def _first_differences(parameters: list[list[tuple[str, list[int], str, int | None]]]) -> str:
    """What the ranks have at the first place where they differ."""
    for column in itertools.zip_longest(*parameters):
        if any(one != column[0] for one in column):
            return ", ".join("none" if one is None else f"{one[0] or 'a leaf'} {one[1]}" for one in column)
    return ""
