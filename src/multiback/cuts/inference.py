"""Infers everything in batches: outputs, what is needed to run any batch again, and whether graphs are kept."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from multiback import graph
from multiback.cuts import locality
from multiback.cuts.models import Model
from multiback.cuts.sources import RowPrints, Source
from multiback.errors import OptionError, RequestError
from multiback.nested import map_tensors, tensors_in
from multiback.report import progress
from multiback.states import BufferValues, Randomness

Keep = Literal["graph", "recompute", "auto"]
DEFAULT_BUDGET = 1 << 30
_MOMENT = 0.5  # seconds


@dataclass(frozen=True, eq=False)
class Kept:
    """A batch's graph: its differentiable outputs and the data they were computed from."""

    outputs: list[Tensor]
    inputs: Any


@dataclass(eq=False)
class Batch:
    """Rows `start` to `stop`, and what is needed to run them again as they were; `kept` is their graph."""

    start: int
    stop: int
    random: Randomness | None
    buffers: BufferValues
    kept: Kept | None = None

    @property
    def rows(self) -> range:
        """The numbers of its rows."""
        return range(self.start, self.stop)


@dataclass(eq=False)
class Inferred:
    """Everything that inference leaves behind.

    Attributes
    ----------
    output : the structure of the model's output, its tensors [N, ...].
    places : which of its tensors are differentiable, by number.
    prints : fingerprints of the data's rows.
    move : brings a batch to the device that runs it.
    coupling : where rows of the data meet in the model, or what is not known to keep them apart; empty
        where each row can be run by itself.
    graph_bytes : predicted bytes of the graphs of all batches, data that are copies included.
    keeping : whether they are kept.
    """

    model: Model
    source: Source
    output: Any
    places: list[int]
    prints: RowPrints
    move: Callable[[Any], Any]
    coupling: str
    graph_bytes: int
    keeping: bool
    signatures: set[locality.Signature] = field(default_factory=set)
    batches: list[Batch] = field(default_factory=list)

    @property
    def values(self) -> list[Tensor]:
        """The differentiable outputs [N, ...]."""
        return self.differentiable(self.output)

    def differentiable(self, output: Any) -> list[Tensor]:
        """The differentiable tensors of an output of this structure."""
        tensors = tensors_in(output)
        return [tensors[place] for place in self.places]


@dataclass(frozen=True)
class Options:
    """How batches are made and kept."""

    batch_size: int
    keep: Keep
    budget: int | None
    keep_on: torch.device | None
    progress: bool | None


@dataclass(frozen=True)
class Stand:
    """Where a run over batches stands."""

    label: str
    share: float
    seconds_left: None = None
    half_width: None = None


def shown(wanted: bool | None, label: str, count: int) -> Iterator[int]:
    """The numbers 0 to count - 1, with a progress line once they have taken longer than a moment."""
    begun, number = time.monotonic(), 0
    while number < count and (wanted is None and time.monotonic() - begun < _MOMENT):
        yield number
        number += 1
    if number == count:
        return
    with progress.showing(wanted) as update:
        for number in range(number, count):
            update(Stand(f"{label} {number + 1} of {count}", number / count))
            yield number


def leaves_like(data: Any, *, grad: bool) -> Any:
    """The data as leaves of their own; those that can have a gradient require it, if asked."""
    return map_tensors(data, lambda tensor: tensor.detach().requires_grad_(grad and can_have_gradient(tensor)))


def can_have_gradient(tensor: Tensor) -> bool:
    """Whether a tensor of that dtype can."""
    return tensor.is_floating_point() or tensor.is_complex()


def infer(model: Model, source: Source, move: Callable[[Any], Any], options: Options) -> Inferred:
    """Run every batch once, in order; the first with a graph, from which the rest is decided."""
    starts = range(0, source.num_rows, options.batch_size)
    bounds = [(start, min(start + options.batch_size, source.num_rows)) for start in starts]
    groups = iter(source.read([range(*pair) for pair in bounds]))
    prints = RowPrints(source.num_rows)
    found: Inferred | None = None
    parameters: list[Tensor] = []
    for number in shown(options.progress, "inferring batch", len(bounds)):
        group = next(groups)
        prints.keep(bounds[number][0], group)
        inputs, (output, random, buffers) = _run(model, move(group), grad=found is None or found.keeping)
        del group
        if found is None:
            found = _decided(model, source, prints, move, options, output, inputs)
            parameters = _others(found.differentiable(output), inputs)
        batch = Batch(*bounds[number], random, buffers)
        if found.keeping:
            batch.kept = Kept(found.differentiable(output), inputs)
        found.batches.append(batch)
        _store(found.output, output, batch)
        del inputs, output
    if found is None:
        raise AssertionError("a source has at least one row")
    model.settle(parameters)
    return found


def _run(model: Model, given: Any, *, grad: bool) -> tuple[Any, tuple[Any, Randomness | None, BufferValues]]:
    """The data as leaves, and what the model makes of them.

    A model that works with its own graph, such as one that differentiates inside its forward, is given
    one for every batch, which is then dropped.
    """
    inputs = leaves_like(given, grad=grad or model.needs_graph)
    try:
        return inputs, model.infer(inputs, grad=grad or model.needs_graph)
    except Exception:
        if grad or model.needs_graph:
            raise
        model.needs_graph = True
        return _run(model, given, grad=False)


def _decided(
    model: Model,
    source: Source,
    prints: RowPrints,
    move: Callable[[Any], Any],
    options: Options,
    output: Any,
    inputs: Any,
) -> Inferred:
    """What the graph of the first batch tells."""
    given, tensors = tensors_in(inputs), tensors_in(output)
    rows = given[0].shape[0]
    places = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
    if not places:
        raise OptionError(
            f"model: must give an output that depends on floating data or on a trainable parameter; got "
            f"{type(output).__name__} without a graph. Unfreeze a parameter, and leave out no_grad() and detach()."
        )
    _check_rows(tensors, rows)
    outputs = [tensors[place] for place in places]
    facts = graph.read(outputs, inputs=given)
    copied = sum(t.numel() * t.element_size() for t in given) if not source.tensors else 0
    predicted = math.ceil((facts.saved_bytes + copied) * source.num_rows / rows)
    coupled = locality.coupling(outputs, given, rows) if rows > 1 else "batches of one row"
    return Inferred(
        model,
        source,
        map_tensors(output, lambda tensor: _room(tensor, source.num_rows, options.keep_on)),
        places,
        prints,
        move,
        coupled,
        predicted,
        _keeps(options, predicted, readable=not facts.unreadable),
        set() if coupled else {locality.signature(outputs)},
    )


def _keeps(options: Options, predicted: int, *, readable: bool) -> bool:
    """Whether graphs are kept; RequestError where they were asked for and would break the budget."""
    if options.keep == "graph" and options.budget is not None and predicted > options.budget:
        raise RequestError(
            f'budget: must be at least {predicted} bytes for keep="graph", by the graph of the first batch; got '
            f'{options.budget}. Give more, or keep="recompute".'
        )
    limit = DEFAULT_BUDGET if options.budget is None else options.budget
    return options.keep == "graph" or (options.keep == "auto" and readable and predicted <= limit)


def _others(outputs: list[Tensor], inputs: Any) -> list[Tensor]:
    """The leaves of a graph that are not its data."""
    given = {id(tensor) for tensor in tensors_in(inputs)}
    return [leaf for leaf in graph.leaves_of(outputs) if id(leaf) not in given]


def _room(tensor: Tensor, rows: int, device: torch.device | None) -> Tensor:
    return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=device or tensor.device)


def _check_rows(tensors: list[Tensor], rows: int) -> None:
    for tensor in tensors:
        if not tensor.ndim or tensor.shape[0] != rows:
            raise OptionError(
                f"model: must give outputs that hold the rows in dimension 0; got shape {list(tensor.shape)} for "
                f"{rows} rows. Move the batch to dimension 0, and compute what spans the batch from cut.value."
            )


def _store(whole: Any, output: Any, batch: Batch) -> None:
    """Copy a batch's outputs to their rows."""
    places, tensors = tensors_in(whole), tensors_in(output)
    _check_rows(tensors, len(batch.rows))
    shapes, known = [list(t.shape[1:]) for t in tensors], [list(t.shape[1:]) for t in places]
    if shapes != known:
        raise OptionError(
            f"model: must give outputs of the same shapes for every batch; got {shapes} for rows {batch.start} to "
            f"{batch.stop - 1} and {known} before them, rows left out. Pad the outputs to one length."
        )
    for place, tensor in zip(places, tensors, strict=True):
        place[batch.start : batch.stop] = tensor.detach()
