"""Runs rows of a batch again with a graph: the rows asked for by themselves where that is exact, else the batch."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiback.cuts import locality
from multiback.cuts.inference import Batch, Inferred, leaves_like
from multiback.errors import MultibackError, RecomputationError
from multiback.measure.agreement import tolerance_of
from multiback.nested import tensors_in

# Running a row again costs a forward more than its share of a traversal of the kept graph, which
# runs all rows; a forward is about half a traversal.
_PRICE_OF_A_ROW = 1.5
_TF32 = 1e-2


@dataclass(frozen=True, eq=False)
class Run:
    """Rows with a graph.

    Attributes
    ----------
    outputs : the differentiable outputs [n, ...].
    inputs : the data they came from, in its structure, as leaves.
    rows : int64 [n], which rows of the data these are.
    apart : whether it is proven that each row's output follows from that row alone.
    kept : whether the graph must be kept.
    """

    outputs: list[Tensor]
    inputs: Any
    rows: Tensor
    apart: bool
    kept: bool


class Runner:
    """Gives graphs for rows of inferred batches."""

    def __init__(self, inferred: Inferred) -> None:
        self._inferred = inferred
        self._sizes = [_typical(value) for value in inferred.values]
        self._allowed = [self._tolerance(value) for value in inferred.values]

    @contextmanager
    def run(self, batch: Batch, rows: Tensor, *, data: bool) -> Generator[Run]:
        """A graph that holds `rows`, int64 ascending; it is to be traversed inside the context.

        `data` says that the data's own gradient is asked for.
        """
        alone = not (self._inferred.coupling or batch.random or len(rows) == len(batch.rows))
        if batch.kept is not None and not (alone and _PRICE_OF_A_ROW * len(rows) < len(batch.rows)):
            apart = self._is_apart(batch.kept.outputs, batch.kept.inputs)
            yield Run(batch.kept.outputs, batch.kept.inputs, torch.arange(batch.start, batch.stop), apart, kept=True)
            return
        if alone:
            with self._inferred.model.again(None, batch.buffers) as call:
                found = self._by_themselves(call, rows)
                if found is not None:
                    yield found
                    return
        with self._inferred.model.again(batch.random, batch.buffers) as call:
            inputs, outputs = self._again(call, batch.rows, data=data)
            self._check(outputs, batch.rows)
            apart = self._is_apart(outputs, inputs)
            yield Run(outputs, inputs, torch.arange(batch.start, batch.stop), apart, kept=False)

    def _by_themselves(self, call: Callable[[Any], Any], rows: Tensor) -> Run | None:
        """These rows alone; None, and no further tries where none would do, if that is not what a batch gives."""
        numbers = rows.tolist()
        try:
            inputs, outputs = self._again(call, numbers, data=True)  # as the graphs that are proven
        except (MultibackError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._inferred.coupling = f"a batch of {len(numbers)} rows, which raised {type(error).__name__}"
            return None
        if any(output.shape[0] != len(numbers) for output in outputs) or self._worst(outputs, numbers)[0] > 1:
            self._inferred.coupling = "an operation outside the graph: rows by themselves give another output"
            return None
        if locality.signature(outputs) not in self._inferred.signatures:
            return None
        return Run(outputs, inputs, rows, apart=True, kept=False)

    def _again(self, call: Callable[[Any], Any], rows: Sequence[int], *, data: bool) -> tuple[Any, list[Tensor]]:
        (group,) = self._inferred.source.read([rows])
        self._inferred.prints.check(rows, group)
        inputs = leaves_like(self._inferred.move(group), grad=data)
        return inputs, self._inferred.differentiable(call(inputs))

    def _is_apart(self, outputs: list[Tensor], inputs: Any) -> bool:
        """Whether a whole batch's graph is proven row-local; remembers its form if so."""
        if self._inferred.coupling:
            return False
        form = locality.signature(outputs)
        if form in self._inferred.signatures:
            return True
        rows = outputs[0].shape[0]
        if rows < 2 or locality.coupling(outputs, tensors_in(inputs), rows):
            return rows < 2
        self._inferred.signatures.add(form)
        return True

    def _check(self, outputs: list[Tensor], rows: Sequence[int]) -> None:
        """RecomputationError where a batch gives another output than at inference."""
        excess, number, row = self._worst(outputs, rows)
        if excess > 1:
            allowed = self._allowed[number]
            raise RecomputationError(
                f"model: must give the same output whenever it is run on the same rows; output {number} of row {row} "
                f"differs by {excess * allowed:.2%} of its norm where {allowed:.2%} is allowed. It holds hidden state, "
                'draws from a generator of its own or is not deterministic: remove that, or use keep="graph".'
            )

    def _worst(self, outputs: list[Tensor], rows: Sequence[int]) -> tuple[float, int, int]:
        """The largest difference in units of its tolerance, the output and the row where it is."""
        worst = (0.0, 0, rows[0])
        index = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else torch.as_tensor(rows)
        for number, (now, then) in enumerate(zip(outputs, self._inferred.values, strict=True)):
            expected = then.detach()[index.to(then.device) if isinstance(index, Tensor) else index].to(now.device)
            ratios = _differences(now.detach(), expected, self._sizes[number]) / self._allowed[number]
            excess, row = ratios.max(0)
            if float(excess) > worst[0]:
                worst = (float(excess), number, rows[int(row)])
        return worst

    def _tolerance(self, value: Tensor) -> float:
        found = max(
            tolerance_of(torch.empty(0, dtype=dtype)) for dtype in (value.dtype, *self._inferred.model.computing_dtypes)
        )
        tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        return max(found, _TF32) if value.is_cuda and tf32 else found


def _norms(rows: Tensor) -> Tensor:
    """The norm of each row, [n]."""
    wide = rows.reshape(rows.shape[0], -1)
    wide = wide if wide.dtype in (torch.float64, torch.complex64, torch.complex128) else wide.float()
    return torch.linalg.vector_norm(wide, dim=1)


def _typical(value: Tensor) -> float:
    """The typical norm of a row: a row near zero by cancellation has the rounding of its neighbours."""
    norms = _norms(value)
    norms = norms[torch.isfinite(norms)]
    return float(norms.square().mean().sqrt()) if len(norms) else 0.0


def _differences(now: Tensor, then: Tensor, typical: float) -> Tensor:
    """By row, the norm of the difference relative to the row's norm or the typical one, whichever is larger."""
    if torch.equal(now, then):
        return torch.zeros(now.shape[0])
    finite = torch.isfinite(then)
    same = (finite == torch.isfinite(now)).reshape(now.shape[0], -1).all(1)
    gap = _norms(torch.where(finite, now - then, 0))
    scale = _norms(torch.where(finite, then, 0)).clamp_min(typical)
    relative = torch.where(gap == 0, gap, gap / scale)
    return torch.where(same & torch.isfinite(relative), relative, torch.inf).cpu()
