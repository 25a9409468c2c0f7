"""Gradients that arrive at the rows of the data: read, gathered over all batches, and passed on to the data's graph."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from multiback import graph, traversals
from multiback.api.accumulate import backward
from multiback.cuts.batches import can_have_gradient
from multiback.cuts.cotangents import root_of
from multiback.cuts.routing import Routed, disjoint, spread
from multiback.cuts.row_gradient import RowGradient, nonzero_rows
from multiback.cuts.running import Run
from multiback.errors import FreedGraphError
from multiback.nested import map_tensors, tensors_in
from multiback.survey import has_reentrant


@dataclass(frozen=True, eq=False)
class Piece:
    """Gradients [n, ...] of the data's floating tensors at some rows, int64 [n]; None where there is none."""

    rows: Tensor
    gradients: list[Tensor | None]


class DataGradients:
    """Gradients of those data tensors that require grad, gathered row by row over their whole length."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.requires_grad]
        self._places = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
        self._floating = [tensor.requires_grad for tensor in tensors if can_have_gradient(tensor)]
        self._found: list[Tensor | None] = [None] * len(self._tensors)

    @property
    def wanted(self) -> bool:
        """Whether any does."""
        return bool(self._tensors)

    def check_upstream(self) -> None:
        """FreedGraphError where the graph that the data come out of has been freed, before anything is sent on."""
        above = [tensor for tensor in self._tensors if not tensor.is_leaf]
        if above and graph.read(above).freed:
            raise FreedGraphError(
                "data: must have the graph that they come out of; a backward has freed it, and what arrives at the "
                "data cannot go on. Give that backward retain_graph=True."
            )

    def chosen(self, run: Run) -> list[Tensor]:
        """Of a run's data, the tensors that stand for them."""
        given = tensors_in(run.inputs)
        return [given[place] for place in self._places]

    def gather(self, root: Tensor | None, run: Run) -> None:
        """Add what a traversal from `root` brings; the graph is kept."""
        if root is not None and self.wanted:
            self.add(traversals.plain(root, self.chosen(run), retain_graph=True), run.rows)

    def add(self, gradients: Sequence[Tensor | None], rows: Tensor) -> None:
        """Add the gradients of some rows."""
        for place, (tensor, gradient) in enumerate(zip(self._tensors, gradients, strict=True)):
            if gradient is not None:
                whole = self._found[place]
                whole = torch.zeros_like(tensor) if whole is None else whole
                self._found[place] = whole.index_add_(0, rows.to(tensor.device), gradient.to(tensor.device))

    def root(self) -> Tensor | None:
        """A scalar above the data whose gradient at each is what was gathered; None where nothing was."""
        return root_of(self._tensors, self._found)

    def pieces(self, direct: Sequence[Tensor | None]) -> list[Piece]:
        """What a loss brings to these tensors by ways past the model, [N, ...] each."""
        there = [one for one in direct if one is not None]
        if not there:
            return []
        rows, own = nonzero_rows(there), iter(direct)
        columns = [next(own) if wanted else None for wanted in self._floating]
        return [Piece(rows, [None if one is None else one[rows.to(one.device)] for one in columns])]


def accumulate(root: Tensor, run: Run, data: DataGradients, *, retain_graph: bool) -> None:
    """One traversal into `.grad` of the parameters, and into what is gathered for the data."""
    given = [tensor for tensor in tensors_in(run.inputs) if tensor.requires_grad]
    restricted = bool(given) and not data.wanted
    nodes = graph.walk(graph.roots_of([root])) if restricted else list[Node]()
    if has_reentrant(node.name() for node in nodes):  # it takes no choice of leaves
        nodes.clear()
    reached = [leaf for leaf in map(graph.leaf_of, nodes) if leaf is not None and leaf.requires_grad]
    leaves = [leaf for leaf in reached if all(leaf is not one for one in given)]
    if nodes and not leaves:
        return
    backward(root, wrt=leaves or None, retain_graph=retain_graph)
    data.add([tensor.grad for tensor in data.chosen(run)], run.rows)
    for tensor in given:
        tensor.grad = None


def traversed(run: Run, parts: Sequence[Routed]) -> Iterator[tuple[int, Piece]]:
    """By loss, the gradients of the data in this run.

    Losses of different rows share a traversal where rows are apart.
    """
    leaves = [tensor for tensor in tensors_in(run.inputs) if can_have_gradient(tensor)]
    groups = list(disjoint(parts)) if run.apart else [[part] for part in parts]
    for number, group in enumerate(groups):
        root = root_of(run.outputs, spread(group, run.rows))
        keep = run.keep or number + 1 < len(groups)
        gradients: list[Tensor | None] = [None] * len(leaves)
        if root is not None:
            gradients = traversals.plain(root, leaves, retain_graph=keep)
        there = [gradient for gradient in gradients if gradient is not None]
        for part in group:
            # where rows meet, a loss may touch others of its batch than those whose output it uses
            rows = part.rows if run.apart else torch.cat([part.rows, run.rows[nonzero_rows(there)]]).unique()
            if len(rows) == len(run.rows):
                yield part.loss, Piece(rows, _owned(gradients))
                continue
            index = torch.searchsorted(run.rows, rows)
            yield part.loss, Piece(rows, [None if one is None else one[index.to(one.device)] for one in gradients])


def _owned(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients in memory of their own: the engine gives one tensor to two inputs of a sum, and expands."""
    seen = set[int]()

    def owned(one: Tensor) -> Tensor:
        shared = one.untyped_storage().data_ptr() in seen or not one.is_contiguous()
        mine = one.clone(memory_format=torch.contiguous_format) if shared else one
        seen.add(mine.untyped_storage().data_ptr())
        return mine

    return [None if one is None else owned(one) for one in gradients]


def joined(pieces: Sequence[Piece], template: Any, num_rows: int, device: torch.device) -> RowGradient:
    """The sum of the pieces; `template` is the data without rows."""
    rows = torch.empty(0, dtype=torch.int64, device="cpu")
    if pieces:
        rows = pieces[0].rows if len(pieces) == 1 else torch.cat([piece.rows for piece in pieces]).unique()
    columns = zip(*(piece.gradients for piece in pieces), strict=True)

    def values(tensor: Tensor) -> Tensor | None:
        if not can_have_gradient(tensor):
            return None
        column = next(columns, ())
        if len(column) == 1 and column[0] is not None:
            return column[0]
        whole = tensor.detach().new_zeros(len(rows), *tensor.shape[1:])
        for piece, found in zip(pieces, column, strict=False):
            if found is not None:
                whole.index_add_(0, torch.searchsorted(rows, piece.rows).to(whole.device), found.to(whole.device))
        return whole

    return RowGradient(rows.to(device), map_tensors(template, values), num_rows)
