"""Infers everything in batches: outputs, what is needed to run any batch again, and whether graphs are kept."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from multiback import graph
from multiback.cuts.batches import Batch, Inferred, Kept, is_shared, leaves_like, look_at_rows, operations_so_far
from multiback.cuts.confirming import confirm
from multiback.cuts.models import Model, Replayed
from multiback.cuts.sources import RowPrints, Source
from multiback.errors import OptionError, RequestError
from multiback.nested import map_tensors, named_tensors, tensors_in
from multiback.states import Randomness, random_kept
from multiback.survey import has_reentrant

Keep = Literal["graph", "recompute", "auto"]
DEFAULT_BUDGET = 1 << 30
_MOMENT = 0.5  # seconds


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
    with random_kept():  # importing rich draws from Python's generator
        from multiback.report import progress
    with progress.showing(wanted) as update:
        for number in range(number, count):  # noqa: B020 - goes on where the other loop ended
            update(Stand(f"{label} {number + 1} of {count}", number / count))
            yield number


def infer(model: Model, source: Source, move: Callable[[Any], Any], options: Options) -> Inferred:
    """Run every batch once, in order, with a graph, which tells of rows and is then dropped unless graphs are kept."""
    starts = range(0, source.num_rows, options.batch_size)
    bounds = [(start, min(start + options.batch_size, source.num_rows)) for start in starts]
    groups = iter(source.read([range(*pair) for pair in bounds]))
    prints = RowPrints(source.num_rows)
    found: Inferred | None = None
    parameters: dict[int, Tensor] = {}
    try:
        for number in shown(options.progress, "inferring batch", len(bounds)):
            given = move(next(groups))
            prints.keep(bounds[number][0], given)
            begun = operations_so_far()
            inputs, (output, random, replayed) = _run(model, given)
            batch = Batch(*bounds[number], random, replayed)
            if found is None:
                found = _decided(model, source, prints, move, options, output, inputs, len(batch.rows))
            _store(found.output, output, batch)
            found.batches.append(batch)
            kept = _kept(found, batch, output, inputs, begun)
            parameters.update({id(leaf): leaf for leaf in _others(kept.outputs, inputs)})
            if found.keeping or number == 0:
                batch.kept = kept
            del given, inputs, output, kept
        if found is None:
            raise AssertionError("a source has at least one row")
        _confirmed(found, model)
        model.settle(parameters.values())
    except BaseException:
        model.undo()
        raise
    return found


def _confirmed(found: Inferred, model: Model) -> None:
    """Try what the graphs proved, once all batches are through: a model may count its calls."""
    first = found.batches[0]
    if first.random is not None:
        found.together = found.coupling or "random numbers that were drawn for the whole batch"
    if model.has_backward_hooks():
        found.coupling = found.coupling or "hooks on tensors or modules, which may act on all rows of a batch at once"
    if first.kept is not None and first.apart and len(first.rows) > 1 and not found.coupling:
        with model.undisturbed(), model.without_hooks_on_parameters():  # whose gradients are not the user's here
            confirm(found, first, first.kept)
    elif not found.together:
        found.together = found.coupling or "batches of one row"
    if not found.keeping:
        first.kept = None


def _kept(found: Inferred, batch: Batch, output: Any, inputs: Any, begun: int) -> Kept:
    """The batch's graph; what it proves is remembered of the batch, whether the graph is kept or not."""
    outputs = found.differentiable(output)
    found.shares = found.shares or is_shared(graph.walk(graph.roots_of(outputs)), begun)
    look_at_rows(found, batch, outputs, inputs)
    return Kept(outputs, inputs)


def _run(model: Model, given: Any) -> tuple[Any, tuple[Any, Randomness | None, Replayed]]:
    """The data as leaves, and what the model makes of them; a model that writes to its data is given copies."""
    inputs = leaves_like(given)
    before = [tensor._version for tensor in tensors_in(inputs)]
    try:
        found = model.infer(inputs)
    except TypeError as error:
        if "argument" not in str(error) or not isinstance(given, (tuple, list, Mapping)):
            raise
        raise OptionError(
            f"model: must take a batch's {len(given)} parts as its arguments; it raised: {error}. Choose what it gets "
            "in collate_fn, or by a function that takes them all."
        ) from error
    except RuntimeError as error:
        if not ("leaf Variable" in str(error) and "in-place" in str(error)) or model.needs_copy:
            raise
        model.needs_copy = True
        return _run(model, given)
    written = [number for number, one in enumerate(tensors_in(inputs)) if one._version != before[number]]
    if written:
        raise OptionError(
            f"model: must leave the data as they are; it has written to tensor {written[0]} of them, so that they "
            "cannot be read again as they were. Clone it in the model before it is written to."
        )
    return inputs, found


def _decided(
    model: Model,
    source: Source,
    prints: RowPrints,
    move: Callable[[Any], Any],
    options: Options,
    output: Any,
    inputs: Any,
    rows: int,
) -> Inferred:
    """What the graph of the first batch tells."""
    given, tensors = tensors_in(inputs), tensors_in(output)
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
    return Inferred(
        model,
        source,
        map_tensors(output, lambda tensor: _room(tensor, source.num_rows, options.keep_on), _plain),
        places,
        prints,
        move,
        "" if rows > 1 else "batches of one row",
        predicted,
        _keeps(options, predicted, readable=not facts.unreadable),
        map_tensors(inputs, lambda tensor: tensor.detach()[:0]),
        has_reentrant(node.name() for node in graph.walk(graph.roots_of(outputs))),
        options.keep == "graph",
        graph.reaches(outputs, [tensor for tensor in source.tensors if tensor.requires_grad]),
    )


def _plain(value: Any) -> Any:
    """What stands beside tensors in an output: texts and flags; what may differ by batch is left out."""
    return value if value is None or isinstance(value, (str, bool)) else None


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
    if _described(output) != _described(whole):
        raise OptionError(
            f"model: must give outputs of the same names, shapes and dtypes for every batch; got {_described(output)} "
            f"for rows {batch.start} to {batch.stop - 1} and {_described(whole)} before them, rows left out. Pad them "
            "to one length."
        )
    for place, tensor in zip(places, tensors, strict=True):
        place[batch.start : batch.stop] = tensor.detach()


def _described(output: Any) -> str:
    """Every tensor's name, shape without its rows, and dtype."""
    named = named_tensors("output", output)
    return ", ".join(f"{name} {list(t.shape[1:])} {str(t.dtype).removeprefix('torch.')}" for name, t in named)
