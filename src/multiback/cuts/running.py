"""Runs rows of a batch again with a graph: the rows asked for by themselves where that is exact, else the batch."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from multiback import graph
from multiback.cuts.batches import Batch, Inferred, Kept, is_shared, leaves_like, operations_so_far
from multiback.cuts.sources import taken
from multiback.errors import MultibackError, RecomputationError
from multiback.measure.agreement import tolerance_of
from multiback.nested import tensors_in
from multiback.states import random_kept

# Running a row again costs a forward more than its share of a traversal of the kept graph, which
# runs all rows; a forward is about half a traversal.
_PRICE_OF_A_ROW = 1.5
_TF32 = 1e-2
_SAMPLE = 1024  # rows
_MOST_MISFITS = 8  # of rows run by themselves, before this is no longer tried
_ORDINARY = 1e-15


@dataclass(frozen=True, eq=False)
class Run:
    """Rows with a graph.

    Attributes
    ----------
    outputs : the differentiable outputs [n, ...].
    inputs : the data they came from, in its structure, as leaves.
    rows : int64 [n], which rows of the data these are.
    nodes : of the graph, where it was made for this run.
    apart : whether it is proven that each row's output follows from that row alone.
    keep : whether the graph must be kept by what returns gradients.
    shared : whether it must be kept in any case, since a part of it is older than this run.
    """

    outputs: list[Tensor]
    inputs: Any
    rows: Tensor
    nodes: Sequence[Node]
    apart: bool
    keep: bool
    shared: bool


class Runner:
    """Gives graphs for rows of inferred batches."""

    def __init__(self, inferred: Inferred) -> None:
        self._inferred = inferred
        self._misfits, self._singles_differ = 0, False
        self._scales = [_Scale(value, self._tolerance(value)) for value in inferred.values]

    @contextmanager
    def run(self, batch: Batch, rows: Tensor) -> Generator[Run]:
        """A graph that holds `rows`, int64 ascending; it is to be traversed inside the context."""
        found = self._inferred
        alone = not (found.together or batch.random) and len(rows) < len(batch.rows)
        alone = alone and batch.form is not None
        few = alone and not found.asked_for_graphs and _PRICE_OF_A_ROW * len(rows) < len(batch.rows)
        if batch.kept is not None and not few:
            with self._from_graph(batch, batch.kept) as run:
                yield run
            return
        for some in self._groups(rows, batch) if alone else ():
            group = self._read(some.tolist())
            with found.model.again(None, batch.replayed, tried=True) as call:
                run = self._by_themselves(call, group, some, batch)
                if run is not None:
                    yield run
                    return
            del group, run
        group = self._read(batch.rows)
        with found.model.again(batch.random, batch.replayed) as call:
            run = self._again(call, group, torch.arange(batch.start, batch.stop, device="cpu"))
            self._check(run.outputs, batch.rows)
            yield replace(run, apart=batch.apart and not found.coupling)

    def _groups(self, rows: Tensor, batch: Batch) -> Iterator[Tensor]:
        """The rows; and where one row takes other operations than several, as in recurrent layers, it and another."""
        if len(rows) > 1 or not self._singles_differ:
            yield rows
        if len(rows) == 1 and self._singles_differ and not self._inferred.together:
            first = min(int(rows[0]), batch.stop - 2)
            yield torch.arange(first, first + 2, device="cpu")

    @contextmanager
    def _from_graph(self, batch: Batch, kept: Kept) -> Generator[Run]:
        """The kept graph; after an error it may be half freed, so the batch is run again the next time."""
        self._inferred.prints.check(batch.rows, kept.inputs)
        rows = torch.arange(batch.start, batch.stop, device="cpu")
        try:
            with self._inferred.model.undisturbed():  # checkpointed parts run forward again
                apart = batch.apart and not self._inferred.coupling
                yield Run(kept.outputs, kept.inputs, rows, (), apart, keep=True, shared=self._inferred.shares)
        except BaseException:
            batch.kept = None
            raise
        finally:
            for tensor in tensors_in(kept.inputs):
                tensor.grad = None

    def _read(self, rows: Sequence[int]) -> Any:
        source = self._inferred.source
        with nullcontext() if source.tensors else random_kept():  # a data set may draw as it reads
            (group,) = source.read([rows])
            group = self._inferred.move(group)
        self._inferred.prints.check(rows, group)
        return group

    def _again(self, call: Callable[[Any], Any], group: Any, rows: Tensor) -> Run:
        """Rows as a batch of their own."""
        begun = operations_so_far()
        inputs = leaves_like(group)
        outputs = self._inferred.differentiable(call(inputs))
        nodes = graph.walk(graph.roots_of(outputs))
        shared = self._inferred.shares or is_shared(nodes, begun)
        return Run(outputs, inputs, rows, nodes, apart=False, keep=shared, shared=shared)

    def _by_themselves(self, call: Callable[[Any], Any], group: Any, rows: Tensor, batch: Batch) -> Run | None:
        """These rows alone; None, and no further tries where none would do, if that is not what a batch gives."""
        count, numbers = len(rows), rows.tolist()
        try:
            run = self._again(call, group, rows)
        except (MultibackError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._inferred.together = f"a batch of {count} rows, which raised {type(error).__name__}"
            return None
        if (
            any(not one.ndim or one.shape[0] != count for one in run.outputs)
            or self._worst(run.outputs, numbers)[0] > 1
        ):
            self._inferred.together = "an operation that no graph shows: rows by themselves give another output"
            return None
        if batch.form is not None and batch.form.is_of(run.nodes, count):
            return replace(run, apart=True)
        if count == 1 and len(batch.rows) > 2 and not self._singles_differ:
            self._singles_differ = True  # perhaps, and two rows do not
            return None
        self._misfits += 1
        if self._misfits >= _MOST_MISFITS:
            self._inferred.together = "operations or constants that are others for some rows than for their batch"
        return None

    def _check(self, outputs: list[Tensor], rows: Sequence[int]) -> None:
        """RecomputationError where a batch gives another output than at inference."""
        excess, number, row = self._worst(outputs, rows)
        if excess > 1:
            allowed = self._scales[number].tolerance
            raise RecomputationError(
                f"model: must give the same output whenever it is run on the same rows; output {number} of row {row} "
                f"differs by {excess * allowed:.2%} of its spread where {allowed:.2%} is allowed. It holds hidden "
                "state, draws from a generator of its own or is not deterministic: remove that, or use "
                'keep="graph".'
            )

    def _worst(self, outputs: list[Tensor], rows: Sequence[int]) -> tuple[float, int, int]:
        """The largest difference in units of its tolerance, the output and the row where it is."""
        worst = (0.0, 0, rows[0])
        for number, (now, then) in enumerate(zip(outputs, self._inferred.values, strict=True)):
            expected = taken(then.detach(), rows).to(now.device)
            if now.shape != expected.shape:
                return float("inf"), number, rows[0]
            if self._scales[number].is_near(now.detach(), expected):  # nearly always
                continue
            excess, row = self._scales[number].excess(now.detach(), expected).max(0)
            if float(excess) > worst[0]:
                worst = (float(excess), number, rows[int(row)])
        return worst

    def _tolerance(self, value: Tensor) -> float:
        found = max(
            tolerance_of(torch.empty(0, dtype=dtype, device="cpu"))
            for dtype in (value.dtype, *self._inferred.model.computing_dtypes)
        )
        tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        return max(found, _TF32) if value.is_cuda and tf32 else found


class _Scale:
    """What a difference of an output's rows is held against: the spread of the rows, and rounding.

    The spread is the median distance of rows from their median, by a sample of the rows: an offset
    common to all, or one far from the others, makes no difference look small.
    """

    def __init__(self, value: Tensor, tolerance: float) -> None:
        self.tolerance = tolerance
        rows = _wide(value.detach()[:: -(-value.shape[0] // _SAMPLE)])
        rows = rows[torch.isfinite(rows).all(1)]
        centre = rows.median(0).values if len(rows) > 1 else 0
        self._spread = float(_norms(rows - centre).median()) if len(rows) else 0.0
        self._rounding = 4 * torch.finfo(value.dtype).eps
        # where the square of a difference that counts does not vanish; one that overflows is not near
        self._is_ordinary = value.dtype in (torch.float32, torch.float64) and tolerance * self._spread > _ORDINARY

    def is_near(self, now: Tensor, then: Tensor) -> bool:
        """Whether all rows together differ by less than one may."""
        allowed = self.tolerance * self._spread
        if not self._is_ordinary:
            now, then = _wide(now), _wide(then)
        return float(torch.dist(now, then)) < allowed

    def excess(self, now: Tensor, then: Tensor) -> Tensor:
        """By row, the norm of the difference in units of what is allowed, [n]."""
        now, then = _wide(now), _wide(then)
        finite = torch.isfinite(then)
        same = (finite == torch.isfinite(now)).all(1)
        gap, size = _norms(torch.where(finite, now - then, 0)), _norms(torch.where(finite, then, 0))
        relative = torch.where(gap == 0, gap, gap / (self.tolerance * self._spread + self._rounding * size))
        return torch.where(same & ~torch.isnan(relative), relative, torch.inf)


def _wide(value: Tensor) -> Tensor:
    """[n, elements], in a dtype whose squares neither vanish nor overflow."""
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return real.reshape(value.shape[0], -1).double()


def _norms(rows: Tensor) -> Tensor:
    """The norm of each row, [n]."""
    return torch.linalg.vector_norm(rows, dim=1)
