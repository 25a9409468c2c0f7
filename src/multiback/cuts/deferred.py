"""A cut of a model and its data: everything inferred in batches, gradients of chosen rows afterwards."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.graph import Node
from typing_extensions import Self

from multiback import graph, traversals
from multiback.api.accumulate import backward
from multiback.api.answering import freed_graphs_named
from multiback.arguments import Bare, Differentiable, Losses, Named, Wrt
from multiback.cuts.cotangents import Cotangents, cotangents_of, gradients_of, root_of, summed
from multiback.cuts.existing import check_one, warn_forgotten
from multiback.cuts.inference import Batch, Inferred, can_have_gradient, shown
from multiback.cuts.routing import Routed, disjoint, spread, union
from multiback.cuts.row_gradient import RowGradient, nonzero_rows
from multiback.cuts.running import Run, Runner
from multiback.errors import RequestError
from multiback.nested import dense, map_tensors, tensors_in
from multiback.request import Target, mirrored, targets_of
from multiback.survey import has_reentrant


class DeferredCut:
    """Outputs of all rows as leaves; gradients run the rows that a loss touches again, or use kept graphs.

    Attributes
    ----------
    value : the outputs of all N rows, [N, ...], in the structure of the model's output; leaves. Any
        loss on any slice, any number of times.
    num_rows : N.
    batch_size : rows inferred at once.
    keep : "graph" if the graphs of all batches are kept, else "recompute".
    graph_bytes : predicted bytes of these graphs, by the first batch's.
    coupling : where rows meet in the model, so that whole batches are run again; empty where a row
        can be run by itself.

    Used as a context manager, a clean exit runs `backward()` once if any loss has left a gradient;
    after an exception nothing is run. A cut that dies with gradient still on its value warns.
    """

    def __init__(self, inferred: Inferred, progress: bool | None) -> None:
        self._inferred = inferred
        self._progress = progress
        self._runner = Runner(inferred)
        self._leaves = [value.requires_grad_() for value in inferred.values]
        self.value: Any = inferred.output
        self.num_rows = inferred.source.num_rows
        self.batch_size = len(inferred.batches[0].rows)
        self.keep = "graph" if inferred.keeping else "recompute"
        self.graph_bytes = inferred.graph_bytes
        self._forgotten = weakref.finalize(self, warn_forgotten, self._leaves)

    @property
    def coupling(self) -> str:
        """Where rows meet, or what is not known to keep them apart; empty where rows can be run by themselves."""
        return self._inferred.coupling

    def __repr__(self) -> str:
        """Rows, batches and how gradients are computed."""
        drawn = sum(batch.random is not None for batch in self._inferred.batches)
        whole = f"whole batches, because of {self.coupling}" if self.coupling else "the rows asked for"
        if drawn and not self.coupling:
            whole = f"whole batches, {drawn} of which drew random numbers"
        how = f"graphs kept, about {self.graph_bytes:,} bytes" if self.keep == "graph" else f"recompute {whole}"
        return f"DeferredCut({self.num_rows} rows in {len(self._inferred.batches)} batches; {how})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None or kind is not None:
            self._forgotten.detach()
        elif any(leaf.grad is not None for leaf in self._leaves):
            self.backward()

    # ---- into .grad ------------------------------------------------------------------------

    def backward(self, *, retain_graph: bool = False) -> None:
        """Send everything accumulated on `value` on to the model: into `.grad` of its parameters.

        Data tensors that require grad get theirs as well. The gradient on `value` is used up row by
        row, so that after an error what has not been sent on is still there, and a repeated call
        adds nothing twice.

        Parameters
        ----------
        retain_graph : where graphs are kept, keep them further; otherwise they are freed, and later
            requests run rows again.

        Raises
        ------
        RequestError : no loss has left a gradient on `value`.
        StaleForwardError : a parameter, a buffer or a row of the data has changed since inference.
        RecomputationError : the model gives another output than at inference.

        Notes
        -----
        A forward and a traversal of the touched rows, or, where rows are coupled or random numbers
        were drawn, of the touched batches; a traversal alone where graphs are kept. Holds the graph
        of one batch at a time.
        """
        for leaf in self._leaves:
            leaf.grad = None if leaf.grad is None else dense(leaf.grad.detach())
        waiting = [leaf.grad for leaf in self._leaves]
        if all(gradient is None for gradient in waiting):
            raise RequestError(
                "cut.backward(): must follow a loss on cut.value; no gradient has arrived there since it was made or "
                "last used up. Call loss.backward() on losses computed from cut.value first."
            )
        self._inferred.model.check_unchanged()
        data = _DataGradients(self._inferred.source.tensors)
        try:
            for batch, parts in self._touched([Routed.of(0, waiting)]):
                with self._runner.run(batch, union(parts), data=data.wanted) as run:
                    root = root_of(run.outputs, spread(parts, run.rows))
                    _backward(root, run, data, retain_graph=run.kept and retain_graph)
                if not retain_graph:
                    batch.kept = None
                for gradient in waiting:
                    if gradient is not None:
                        gradient[batch.start : batch.stop] = 0
        finally:
            if any(gradient is not None for gradient in data.found):
                data.root().backward(retain_graph=retain_graph)
        if not (retain_graph or any(batch.kept for batch in self._inferred.batches)):
            self.keep = "recompute"
        for leaf in self._leaves:
            leaf.grad = None

    # ---- returned --------------------------------------------------------------------------

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
        """The gradient of one loss on `value`, returned; no `.grad` is touched, and nothing accumulates.

        Parameters
        ----------
        loss : one real scalar computed from `value`.
        wrt : what to differentiate with respect to, as for `mb.grad`; by default the data.
        retain_graph : keep the loss's own graph, down to `value`.

        Returns
        -------
        RowGradient : `rows` of the data that the loss touches, and their gradients, by default.
        Tensor, tuple or dict of tensors : in the structure of `wrt`, where it is given. What the loss
            uses directly, such as a head above the cut, is part of the answer.

        Raises
        ------
        RequestError : an argument breaks its rule.
        StaleForwardError, RecomputationError : as for `backward`.

        Notes
        -----
        As `backward`: proportional to the rows that the loss touches. Asking for a slice again, or
        for one that overlaps an earlier one, gives that slice's own gradient; in a loop of
        `backward()` calls, `inputs.grad` silently holds the earlier ones as well.
        """
        check_one(loss)
        return self.grads_of([loss], wrt=wrt, retain_graph=retain_graph)[0]

    def grads_of(self, losses: Losses, *, wrt: Wrt | None = None, retain_graph: bool = False) -> list[Any]:
        """The gradients of K losses on `value`, one answer each; as `grad_of`.

        Notes
        -----
        Every touched row is run once. Data gradients of losses that touch different rows share one
        traversal where the model keeps rows apart; parameter gradients take what `mb.jac` takes.
        Holds K answers.
        """
        targets, structure = ((), "tuple") if wrt is None else targets_of(wrt)
        if wrt is None and not any(map(can_have_gradient, self._data_of_first_row())):
            raise RequestError(
                "wrt: must be given where the data hold no floating tensor; got None. Name parameters or a module."
            )
        self._inferred.model.check_unchanged()
        found = list(cotangents_of(losses, self._leaves, targets, retain_graph=retain_graph))
        routed = [Routed.of(number, one.values) for number, one in enumerate(found)]
        if wrt is None:
            return self._rows_of_data(routed)
        answers = self._targets(routed, found, targets)
        return [mirrored(structure, targets, answer) for answer in answers]

    def _data_of_first_row(self) -> list[Tensor]:
        source = self._inferred.source
        return list(source.tensors) or tensors_in(next(iter(source.read([[0]]))))

    def _touched(self, routed: Sequence[Routed]) -> Iterator[tuple[Batch, list[Routed]]]:
        """The batches that hold any of the rows, with what each loss has there."""
        found = [(batch, [part.within(batch.start, batch.stop) for part in routed]) for batch in self._inferred.batches]
        touched = [(batch, [part for part in parts if len(part.rows)]) for batch, parts in found]
        touched = [(batch, parts) for batch, parts in touched if parts]
        for number in shown(self._progress, "back-propagating batch", len(touched)):
            yield touched[number]

    def _rows_of_data(self, routed: Sequence[Routed]) -> list[RowGradient]:
        pieces: list[list[tuple[Tensor, list[Tensor | None]]]] = [[] for _ in routed]
        template: Any = None
        for batch, parts in self._touched(routed):
            with self._runner.run(batch, union(parts), data=True) as run:
                template = run.inputs
                for loss, rows, gradients in _traversed(run, parts):
                    pieces[loss].append((rows, gradients))
        if template is None:
            template = next(iter(self._inferred.source.read([[0]])))
        device = self._leaves[0].device
        return [_joined(found, template, self.num_rows, device) for found in pieces]

    def _targets(
        self, routed: Sequence[Routed], found: Sequence[Cotangents], targets: Sequence[Target]
    ) -> list[list[Tensor]]:
        """By loss, the gradient of every target: direct, by way of the model, and by way of the data's own graph."""
        totals: list[list[Tensor | None]] = [list(one.direct) for one in found]
        data = [_DataGradients(self._inferred.source.tensors) for _ in found]
        wanted = data[0].wanted
        for batch, parts in self._touched(routed):
            with self._runner.run(batch, union(parts), data=wanted) as run:
                roots = [root_of(run.outputs, spread([part], run.rows)) for part in parts]
                given = tensors_in(run.inputs)
                if wanted:
                    for part, root in zip(parts, roots, strict=True):
                        got = traversals.plain(root, data[part.loss].chosen(given), retain_graph=True)
                        data[part.loss].add(got, run.rows)
                with freed_graphs_named():
                    gradients = gradients_of(roots, targets, retain_graph=run.kept)
            for part, row in zip(parts, gradients, strict=True):
                _add(totals[part.loss], row)
        for one, total in zip(data, totals, strict=True):
            if any(gradient is not None for gradient in one.found):
                _add(total, traversals.plain(one.root(), [target.given for target in targets], retain_graph=True))
        return [[summed([one], target.zeros) for one, target in zip(total, targets, strict=True)] for total in totals]


class _DataGradients:
    """Gradients of the data tensors that require grad, gathered row by row over their whole length."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.requires_grad]
        self._places = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        self.found: list[Tensor | None] = [None] * len(self._tensors)

    @property
    def wanted(self) -> bool:
        """Whether any does."""
        return bool(self._tensors)

    def chosen(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Of a run's data, the tensors that stand for them."""
        return [given[place] for place in self._places]

    def add(self, gradients: Sequence[Tensor | None], rows: Tensor) -> None:
        """Add the gradients of some rows."""
        for place, (tensor, gradient) in enumerate(zip(self._tensors, gradients, strict=True)):
            if gradient is not None:
                whole = self.found[place]
                whole = torch.zeros_like(tensor) if whole is None else whole
                self.found[place] = whole.index_add_(0, rows.to(tensor.device), gradient.to(tensor.device))

    def root(self) -> Tensor:
        """A scalar above the data whose gradient at each is what was gathered."""
        return root_of(self._tensors, self.found)


def _backward(root: Tensor, run: Run, data: _DataGradients, *, retain_graph: bool) -> None:
    """One traversal into `.grad` of the parameters, and into what is gathered for the data."""
    given = [tensor for tensor in tensors_in(run.inputs) if tensor.requires_grad]
    restricted = bool(given) and not data.wanted
    nodes = graph.walk(graph.roots_of([root])) if restricted else list[Node]()
    if has_reentrant(node.name() for node in nodes):  # it takes no choice of leaves
        nodes.clear()
    leaves = [leaf for leaf in map(graph.leaf_of, nodes) if leaf is not None and all(leaf is not one for one in given)]
    if nodes and not leaves:
        return
    backward(root, wrt=leaves or None, retain_graph=retain_graph)
    data.add([tensor.grad for tensor in data.chosen(tensors_in(run.inputs))], run.rows)
    for tensor in given:
        tensor.grad = None


def _traversed(run: Run, parts: Sequence[Routed]) -> Iterator[tuple[int, Tensor, list[Tensor | None]]]:
    """By loss: its rows in this run, and the gradients of the data there."""
    leaves = [tensor for tensor in tensors_in(run.inputs) if tensor.requires_grad]
    groups = list(disjoint(parts)) if run.apart else [[part] for part in parts]
    for number, group in enumerate(groups):
        root = root_of(run.outputs, spread(group, run.rows))
        keep = run.kept or number + 1 < len(groups)
        with freed_graphs_named():
            gradients = traversals.plain(root, leaves, retain_graph=keep)
        there = [gradient for gradient in gradients if gradient is not None]
        for part in group:
            # where rows meet, a loss may touch others of its batch than those whose output it uses
            rows = part.rows if run.apart else torch.cat([part.rows, run.rows[nonzero_rows(there)]]).unique()
            index = torch.searchsorted(run.rows, rows)
            yield part.loss, rows, [None if one is None else one[index.to(one.device)] for one in gradients]


def _joined(
    pieces: Sequence[tuple[Tensor, list[Tensor | None]]], template: Any, num_rows: int, device: torch.device
) -> RowGradient:
    """The pieces of all batches as one; `template` is a batch of the data."""
    rows = torch.cat([torch.empty(0, dtype=torch.int64), *(rows for rows, _ in pieces)])
    columns = iter(zip(*(gradients for _, gradients in pieces), strict=True))

    def values(tensor: Tensor) -> Tensor | None:
        if not can_have_gradient(tensor):
            return None
        parts = [tensor.detach().new_zeros(0, *tensor.shape[1:])]
        for (own, _), found in zip(pieces, next(columns, ()), strict=False):
            parts.append(tensor.detach().new_zeros(len(own), *tensor.shape[1:]) if found is None else found)
        return torch.cat(parts)

    return RowGradient(rows.to(device), map_tensors(template, values), num_rows)


def _add(total: list[Tensor | None], more: Sequence[Tensor | None]) -> None:
    """Add in place what is there; the first to come is taken as it is."""
    for place, (mine, theirs) in enumerate(zip(total, more, strict=True)):
        if theirs is not None:
            total[place] = theirs if mine is None else mine + theirs
