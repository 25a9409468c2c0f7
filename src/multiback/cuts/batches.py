"""What inference keeps: batches, what is needed to run them again, and their graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._C._autograd
from torch import Tensor
from torch.autograd.graph import Node

from multiback import graph
from multiback.cuts import locality
from multiback.cuts.forms import Form, form_of
from multiback.cuts.models import Model, Replayed
from multiback.cuts.sources import RowPrints, Source
from multiback.errors import RecomputationError, RequestError
from multiback.nested import map_tensors, tensors_in
from multiback.states import Randomness


@dataclass(frozen=True, eq=False)
class Kept:
    """A batch's graph.

    Attributes
    ----------
    outputs : its differentiable outputs.
    inputs : the data they were computed from, as leaves.
    """

    outputs: list[Tensor]
    inputs: Any


@dataclass(eq=False)
class Batch:
    """Rows `start` to `stop`, and what is needed to run them again as they were.

    Attributes
    ----------
    apart : whether its graph proved that each row's output follows from that row alone.
    form : its graph's, where rows run by themselves may be held against it.
    kept : the graph itself.
    """

    start: int
    stop: int
    random: Randomness | None
    replayed: Replayed
    apart: bool = False
    form: Form | None = None
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
    template : a batch of the data without rows.
    reentrant : whether a part of the model is checkpointed with `use_reentrant=True`.
    asked_for_graphs : whether graphs are kept because the caller said so.
    reads_data : whether the model uses a data tensor itself, beside the rows that it is given.
    shares : whether a part of some batch's graph is older than its run, as of weights that are computed once, so that
        no traversal must free it.
    together : why rows are run with their batch; empty where they may be run by themselves.
    forms : of batches' graphs, each once.
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
    template: Any
    reentrant: bool
    asked_for_graphs: bool
    reads_data: bool
    shares: bool = False
    together: str = ""
    forms: list[Form] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    @property
    def values(self) -> list[Tensor]:
        """The differentiable outputs [N, ...]."""
        tensors = tensors_in(self.output)
        return [tensors[place] for place in self.places]

    def check_data_alone(self) -> None:
        """RequestError where the data's gradient is not that of the rows which the model is given."""
        if not any(can_have_gradient(tensor) for tensor in tensors_in(self.template)):
            raise RequestError(
                "wrt: must be given where the data hold no floating tensor; got None. Name parameters or a module."
            )
        if self.reads_data:
            raise RequestError(
                "wrt: must be given where the model also uses the data tensor itself, beside its rows; got None. Name "
                "the data tensor."
            )

    def differentiable(self, output: Any) -> list[Tensor]:
        """The differentiable tensors of a batch's output; RecomputationError where others have a graph."""
        tensors = tensors_in(output)
        extra = [place for place, tensor in enumerate(tensors) if tensor.requires_grad and place not in self.places]
        if extra or len(tensors) <= max(self.places):
            raise RecomputationError(
                f"model: must give the same outputs with a graph for every batch; tensor "
                f"{(extra or self.places)[-1]} of its output has one in some batches only. Compute it alike for all "
                "rows, or leave it out."
            )
        return [tensors[place] for place in self.places]


def leaves_like(data: Any) -> Any:
    """The data as leaves of their own; those that can have a gradient require it."""
    return map_tensors(data, lambda tensor: tensor.detach().requires_grad_(can_have_gradient(tensor)))


def can_have_gradient(tensor: Tensor) -> bool:
    """Whether a tensor of that dtype can."""
    return tensor.is_floating_point() or tensor.is_complex()


def look_at_rows(found: Inferred, batch: Batch, outputs: list[Tensor], inputs: Any) -> None:
    """Whether a batch's graph proves that rows are apart, and its form; the first obstacle of any batch is kept."""
    there = [output for output in outputs if output.requires_grad]
    rows, given = len(batch.rows), tensors_in(inputs)
    if rows < 2:
        batch.apart = True
        return
    coupled = locality.coupling(there, given, rows)
    found.coupling = found.coupling or coupled
    batch.apart = not coupled
    if coupled or found.together:
        return
    nodes = graph.walk(graph.roots_of(there))
    form, found.together = form_of(nodes, given, rows)
    if form is not None:
        batch.form = next((known for known in found.forms if known == form), form)
        if batch.form is form:
            found.forms.append(form)


def operations_so_far() -> int:
    """A number that the operations which this thread records from now on do not fall below."""
    return torch._C._autograd._get_sequence_nr()


def is_shared(nodes: Sequence[Node], begun: int) -> bool:
    """Whether a graph holds operations from before the `begun`-th of this thread."""
    return any(node.next_functions and node._sequence_nr() < begun for node in nodes)
