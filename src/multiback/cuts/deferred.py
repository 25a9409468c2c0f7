"""A cut of a model and its data: everything inferred in batches, gradients of chosen rows afterwards."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from multiback.api.answering import freed_graphs_named
from multiback.arguments import Bare, Differentiable, Losses, Named, Wrt
from multiback.cuts.batches import Batch, Inferred
from multiback.cuts.cotangents import cotangents_of, filled, gradients_of, refuse_lost, refuse_unreached, root_of
from multiback.cuts.data_gradients import DataGradients, Piece, accumulate, joined, traversed
from multiback.cuts.existing import check_one, refuse_inference_mode
from multiback.cuts.inference import shown
from multiback.cuts.routing import Routed, spread, union
from multiback.cuts.row_gradient import RowGradient
from multiback.cuts.running import Runner
from multiback.cuts.stand_ins import StandIns
from multiback.errors import RequestError, StaleForwardError
from multiback.independence import mixes_rows
from multiback.nested import dense
from multiback.request import Target, mirrored, targets_of
from multiback.survey import REENTRANT


class DeferredCut(StandIns):
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
        self._versions = [leaf._version for leaf in self._leaves]
        self.value: Any = inferred.output
        self.num_rows = inferred.source.num_rows
        self.batch_size = len(inferred.batches[0].rows)
        self.keep = "graph" if inferred.keeping else "recompute"
        self.graph_bytes = inferred.graph_bytes
        starts = [batch.start for batch in inferred.batches]
        self._starts = torch.tensor(starts, dtype=torch.int64, device="cpu")
        self._broken: list[Tensor] = []
        self._own: list[Tensor] = []
        self._watch(self._leaves)

    @property
    def coupling(self) -> str:
        """Where rows meet, or what is not known to keep them apart; empty where rows can be run by themselves."""
        return self._inferred.coupling or self._inferred.together

    def __repr__(self) -> str:
        """Rows, batches and how gradients are computed."""
        drawn = sum(batch.random is not None for batch in self._inferred.batches)
        whole = f"whole batches, because of {self.coupling}" if self.coupling else "the rows asked for"
        if drawn and not self.coupling:
            whole = f"whole batches, {drawn} of which drew random numbers"
        how = f"graphs kept, about {self.graph_bytes:,} bytes" if self.keep == "graph" else f"recompute {whole}"
        return f"DeferredCut({self.num_rows} rows in {len(self._inferred.batches)} batches; {how})"

    def report(self) -> str:
        """Why gradients may differ from those of one batch of N rows: a line for each cause, or that there is none."""
        found, several = self._inferred, len(self._inferred.batches) > 1
        lines = []
        if several and found.coupling:
            meet = "meet" if mixes_rows(found.coupling) else "may meet"
            lines.append(
                f"Rows {meet} at {found.coupling}: a row depends on its batch of {self.batch_size}, not on all "
                f"{self.num_rows}. Put batch norm in eval mode, or raise batch_size."
            )
        drawn = sum(batch.random is not None for batch in found.batches)
        if several and drawn:
            lines.append(
                f"Random numbers were drawn in {drawn} of {len(found.batches)} batches, as dropout does: one batch of "
                f"{self.num_rows} would draw others. Each batch's own are used again for its gradient."
            )
        hooked = found.model.hooked()
        if several and hooked is not None:
            lines.append(
                f"A hook on {hooked} acts on each batch's gradient, not on the sum: the same only where it is linear."
            )
        if not lines:
            lines.append("None but rounding: rows are apart and no random numbers were drawn.")
        lines.append(
            f"The loss is that of cut.value: negatives, means and counts are over all {self.num_rows} rows, where a "
            "loss for each batch would have them over the batch."
        )
        return "\n".join(lines)

    def parameters(self) -> list[Tensor]:
        """The trainable leaves that the model uses beside its data, in one order."""
        return self._inferred.model.leaves

    def described_parameters(self) -> list[tuple[str, list[int], str, int | None]]:
        """Names, shapes, dtypes of `parameters()`; fingerprints of those without a name."""
        return self._inferred.model.described_leaves()

    def data_tensors(self) -> list[Tensor]:
        """The tensors that hold the data; none for a data set."""
        return list(self._inferred.source.tensors)

    def acting_on_grad(self) -> str | None:
        """The name of a parameter with a hook that acts when its gradient is complete."""
        return self._inferred.model.acting_on_grad()

    # ---- into .grad ------------------------------------------------------------------------

    def backward(self, *, retain_graph: bool = False) -> None:
        """Send everything accumulated on `value` on to the model: into `.grad` of its parameters.

        Data tensors that require grad get theirs as well. The gradient on `value` is used up row by
        row, so that after an error what has not been sent on is still there: a repeated call adds
        nothing twice, and is refused where the error left part of a batch in `.grad`.

        Parameters
        ----------
        retain_graph : where graphs are kept, keep them further; otherwise they are freed, and later
            requests run rows again.

        Raises
        ------
        RequestError : no loss has left a gradient on `value`.
        StaleForwardError : a parameter, a buffer or a row of the data has changed since inference.
        RecomputationError : the model gives another output than at inference.
        FreedGraphError : data that come out of a graph, which another backward has freed.

        Notes
        -----
        A forward and a traversal of the touched rows, or, where rows are coupled or random numbers
        were drawn, of the touched batches; a traversal alone where graphs are kept. Holds the graph
        of one batch at a time.
        """
        waiting = self._waiting()
        self._check_unchanged()
        self._check_hooks()
        data = DataGradients(self._inferred.source.tensors)
        data.check_upstream()
        self._forgotten.detach()  # whatever comes now, it was not forgotten
        try:
            for number in shown(self._progress, "back-propagating batch", len(self._inferred.batches)):
                batch = self._inferred.batches[number]
                self._send(batch, waiting, data, retain_graph=retain_graph)
        finally:
            root = data.root()
            if root is not None:
                root.backward(retain_graph=retain_graph)
        if not any(batch.kept for batch in self._inferred.batches):
            self.keep = "recompute"
        self._own = []
        self._use_up()

    def _waiting(self) -> list[Tensor | None]:
        """The gradient on `value`, dense; RequestError where there is none, or part of it has been sent on already."""
        refuse_inference_mode()
        for leaf in self._leaves:
            if leaf.grad is not None and not any(leaf.grad is one for one in (*self._own, *self._broken)):
                leaf.grad = dense(leaf.grad.detach()).clone(memory_format=torch.contiguous_format)
        self._own = [leaf.grad for leaf in self._leaves if leaf.grad is not None]  # rows are zeroed once they are sent
        waiting = self._accumulated()
        if any(one is not None and any(one is old for old in self._broken) for one in waiting):
            raise RequestError(
                "cut.backward(): must not follow one that an error stopped inside the model's traversal, which has "
                "left part of a batch's gradient in .grad. Set all .grad to None, cut.value's too, and back-propagate "
                "the losses again."
            )
        return waiting

    def _send(self, batch: Batch, waiting: Sequence[Tensor | None], data: DataGradients, *, retain_graph: bool) -> None:
        """One batch's rows on to the model; what has been sent on is zero afterwards."""
        here = slice(batch.start, batch.stop)
        part = Routed.of(0, [None if one is None else one[here] for one in waiting], batch.start)
        if not len(part.rows):
            return
        with self._runner.run(batch, part.rows) as run:
            root = root_of(run.outputs, spread([part], run.rows))
            if root is not None:
                self._broken = [one for one in waiting if one is not None]
                accumulate(root, run, data, retain_graph=run.shared or (retain_graph and batch.kept is not None))
                self._broken = []
        if not retain_graph:
            batch.kept = None
        for gradient in waiting:
            if gradient is not None:
                gradient[here] = 0

    def _check_unchanged(self) -> None:
        """StaleForwardError where the model, or the value, is not as inference left it."""
        if [leaf._version for leaf in self._leaves] != self._versions:
            raise StaleForwardError(
                "cut.value: must stay as it is; it has been written to in place since inference. Compute losses from a "
                "clone of it."
            )
        self._inferred.model.check_unchanged()

    def _check_hooks(self) -> None:
        """RequestError where a hook that acts when .grad is complete would act once for every batch."""
        name = self._inferred.model.acting_on_grad() if len(self._inferred.batches) > 1 else None
        if name is not None:
            raise RequestError(
                f"cut.backward(): must find no post-accumulate hook on a parameter, which would act once for each of "
                f"{len(self._inferred.batches)} batches; got one on {name}. Remove it, or infer all rows in one batch."
            )

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
        refuse_inference_mode()
        found = self._inferred
        if found.reentrant:
            raise RequestError(REENTRANT)
        if wrt is None:
            found.check_data_alone()
        elif isinstance(wrt, Tensor) and any(wrt is one for one in found.source.tensors) and not wrt.requires_grad:
            raise RequestError(
                "wrt: must require grad before the cut is made where it is the data tensor itself; it does not. Leave "
                "wrt out: the data's gradient is what grad_of gives."
            )
        tensors = [tensor for tensor in found.source.tensors if tensor.requires_grad]
        asked = tensors if wrt is None else wrt  # of data that require grad a loss may make direct use
        targets, structure = targets_of(asked) if wrt is not None or tensors else ((), "tuple")
        self._check_unchanged()
        upstream = any(not tensor.is_leaf for tensor in tensors)
        numbers = itertools.count()
        routed = cotangents_of(
            losses,
            self._leaves,
            targets,
            lambda one: (Routed.of(next(numbers), one.values), one.direct),
            retain_graph=retain_graph or upstream,
        )
        parts = [replace(part, loss=number) for number, (part, _) in enumerate(routed)]
        direct = [one for _, one in routed]
        if wrt is None:
            return self._rows_of_data(parts, direct)
        answers = self._targets(parts, direct, targets)
        for answer in answers:
            refuse_lost(losses, (), self._leaves, targets, answer)
        refuse_unreached(answers)
        return [mirrored(structure, targets, filled(targets, answer)) for answer in answers]

    def _touched(self, routed: Sequence[Routed]) -> Iterator[tuple[Batch, list[Routed]]]:
        """The batches that hold any of the rows, with what each loss has there."""
        found: dict[int, list[Routed]] = {}
        for part in routed:
            for number, here in part.by_batch(self._starts):
                found.setdefault(number, []).append(here)
        touched = sorted(found)
        for place in shown(self._progress, "back-propagating batch", len(touched)):
            yield self._inferred.batches[touched[place]], found[touched[place]]

    def _rows_of_data(self, routed: Sequence[Routed], direct: Sequence[list[Tensor | None]]) -> list[RowGradient]:
        pieces: list[list[Piece]] = [[] for _ in routed]
        for batch, parts in self._touched(routed):
            with self._runner.run(batch, union(parts)) as run, freed_graphs_named():
                for loss, piece in traversed(run, parts):
                    pieces[loss].append(piece)
        data = DataGradients(self._inferred.source.tensors)
        device = self._leaves[0].device
        return [
            joined([*found, *data.pieces(own)], self._inferred.template, self.num_rows, device)
            for found, own in zip(pieces, direct, strict=True)
        ]

    def _targets(
        self, routed: Sequence[Routed], direct: Sequence[list[Tensor | None]], targets: Sequence[Target]
    ) -> list[list[Tensor | None]]:
        """By loss, the gradient of every target: direct, by way of the model, and by way of the data's own graph."""
        totals = [list(one) for one in direct]
        data = [DataGradients(self._inferred.source.tensors) for _ in direct]
        for batch, parts in self._touched(routed):
            with self._runner.run(batch, union(parts)) as run, freed_graphs_named():
                roots = [root_of(run.outputs, spread([part], run.rows)) for part in parts]
                for part, root in zip(parts, roots, strict=True):
                    data[part.loss].gather(root, run)
                gradients = gradients_of(roots, targets, retain_graph=run.keep)
            for part, row in zip(parts, gradients, strict=True):
                _add(totals[part.loss], row)
        for one, total in zip(data, totals, strict=True):
            _add(total, gradients_of([one.root()], targets, retain_graph=True)[0])
        return totals


def _add(total: list[Tensor | None], more: Sequence[Tensor | None]) -> None:
    """Add in place what is there; the first to come is taken as it is."""
    for place, (mine, theirs) in enumerate(zip(total, more, strict=True)):
        if theirs is not None:
            total[place] = theirs if mine is None else mine + theirs
