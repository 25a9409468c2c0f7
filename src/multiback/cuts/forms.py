"""Forms of graphs: by them the graph of some rows is trusted as the graph of a whole batch, of which it is proven.

What no graph shows in full, such as a statistic of the batch behind `detach`, or a hook that mixes
rows, is held back in two ways. What operations saved that comes out of no graph must be the same, bit for
bit, as in the graph that was proven: a statistic of another batch, or a mask over it, is not. And on the first
batch some rows are run by themselves, and their gradients held against those of the whole (`confirming`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from multiback import graph
from multiback.cuts import fingerprints

# Rows of the data or of what the graph shows; values that must be the same where they have the same shape; that must
# be the same; and of which every row must be the same.
Kind = Literal["rows", "shown", "constant", "uniform"]


class Saved(NamedTuple):
    """A saved tensor: its kind, its shape, and a fingerprint, for the kind uniform of one row."""

    kind: Kind
    shape: tuple[int, ...]
    value: int | None = None


@dataclass(frozen=True)
class Form:
    """The operations of a batch's graph, how they are wired, and what they saved, for so many rows.

    Attributes
    ----------
    nodes : by node, its name and which nodes its inputs come from.
    numbers : by what was saved and is no tensor, whether it is a dimension, and its value.
    """

    rows: int
    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    numbers: tuple[tuple[bool, Any], ...]
    saved: tuple[Saved, ...]

    def is_of(self, nodes: Sequence[Node], rows: int) -> bool:
        """Whether the graph of these nodes, for so many rows, differs in nothing but the number of rows.

        A few microseconds a node, and a read of what must be the same.
        """
        if _wiring(nodes) != self.nodes:
            return False
        kinds = [(node, graph.names_saved(type(node))) for node in nodes]
        numbers = [getattr(node, name) for node, kind in kinds for name in kind.numbers]
        if len(numbers) != len(self.numbers) or not all(
            mine == theirs or (not exact and _in_proportion(mine, theirs, rows, self.rows))
            for mine, (exact, theirs) in zip(numbers, self.numbers, strict=True)
        ):
            return False
        values = [one for node, kind in kinds for name in kind.tensors for one in graph.saved_values(node, name)]
        return len(values) == len(self.saved) and all(
            one.unpack_hook is None and _is_alike(one.data, rows, known)
            for one, known in zip(values, self.saved, strict=True)
        )


def _wiring(nodes: Sequence[Node]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    places: dict[Node | None, int] = {node: place for place, node in enumerate(nodes)}
    return tuple([(node.name(), tuple([places.get(child, -1) for child, _ in node.next_functions])) for node in nodes])


def _is_alike(tensor: Tensor | None, rows: int, known: Saved) -> bool:
    if known.kind == "rows":
        return tensor is not None
    if tensor is None:
        return known == _NOTHING
    shape = tuple(tensor.shape)
    if known.kind == "uniform":
        return shape == (rows, *known.shape[1:]) and known.value is not None and _of_one_row(tensor) == known.value
    if shape != known.shape:
        return known.kind == "shown"
    return known.value == _value(tensor)


def form_of(nodes: Sequence[Node], data: Sequence[Tensor], rows: int) -> tuple[Form | None, str]:
    """The form of a batch's graph, or why some of its rows must not be held against it.

    They must not where saved tensors are behind hooks, which must not be called, or where an operation saved rows that
    neither are data nor come out of the graph, such as a mask: what they come from, other rows among it, cannot be
    known. A few microseconds a node, and a read of every saved tensor that is not known to hold rows.
    """
    kinds = [(node, graph.names_saved(type(node))) for node in nodes]
    numbers = [("dim" in name, getattr(node, name)) for node, kind in kinds for name in kind.numbers]
    leaves = {(leaf.data_ptr(), leaf.numel()) for leaf in map(graph.leaf_of, nodes) if leaf is not None}
    found: list[Saved] = []
    for node, kind in kinds:
        for name in kind.tensors:
            values = graph.saved_values(node, name)
            if any(value.unpack_hook is not None for value in values):
                return None, "saved tensors behind hooks, as of checkpointing"
            shown: list[bool] | None = None
            for place, value in enumerate(values):
                saved = _plainly(value.data, node, name, rows, leaves, data)
                if saved is None and value.data is not None:
                    shown = _come_with_graph(node, name) if shown is None else shown
                    saved = _by_graph(value.data, rows, shown=shown[place])
                if saved is None:
                    return None, f"{node.name()}, which uses rows that come from outside the graph, such as a mask"
                found.append(saved)
    return Form(rows, _wiring(nodes), tuple(numbers), tuple(found)), ""


def _plainly(
    tensor: Tensor | None, node: Node, name: str, rows: int, leaves: set[tuple[int, int]], data: Sequence[Tensor]
) -> Saved | None:
    """What can be told of a saved tensor without unpacking it; else None."""
    if tensor is None:
        return _NOTHING
    shape = tuple(tensor.shape)
    if not tensor.numel() or (tensor.data_ptr(), tensor.numel()) in leaves or _are_rows_of(tensor, data, rows):
        return Saved("rows", shape)
    own = name.removeprefix("_raw_saved_")
    if _OWN.fullmatch(own) or (own == "indices" and node.name().startswith(_CHOOSING)):
        return _by_graph(tensor, rows, shown=True)
    return None


def _by_graph(tensor: Tensor, rows: int, *, shown: bool) -> Saved | None:
    """As what a saved tensor counts that comes out of the graph, or does not; None where it may be of other rows."""
    shape = tuple(tensor.shape)
    if shown:
        return Saved("rows", shape) if shape[:1] == (rows,) else Saved("shown", shape, _value(tensor))
    if shape[:1] == (rows,):
        value = _of_one_row(tensor)
        return None if value is None else Saved("uniform", shape, value)
    return None if rows in shape else Saved("constant", shape, _value(tensor))


def _come_with_graph(node: Node, name: str) -> list[bool]:
    """By tensor saved under a name, whether it has a graph, which the walk has seen."""
    try:
        return [one is None or one.requires_grad for one in graph.saved_values(node, name.removeprefix("_raw"))]
    except RuntimeError:  # written to since, which a traversal will say
        return [False] * len(graph.saved_values(node, name))


def _are_rows_of(tensor: Tensor, data: Sequence[Tensor], rows: int) -> bool:
    """Whether a tensor is a view of the data in which every row is in its place, once or in equal parts."""
    for given in data:
        if not given.numel() or tensor.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
            continue
        row = given.stride(0) * given.element_size()
        if 0 <= tensor.data_ptr() - given.data_ptr() < max(row, 1) and any(
            size % rows == 0 and stride * tensor.element_size() * (size // rows) == row
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            return True
    return False


def _value(tensor: Tensor) -> int | None:
    found = fingerprints.of_tensor(tensor)
    return None if found is None else int(found)


def _of_one_row(tensor: Tensor) -> int | None:
    """The fingerprint of every row, if all have the same; else None."""
    try:
        found = fingerprints.of_rows(tensor)
    except (NotImplementedError, RuntimeError):  # no plain storage
        return None
    return int(found[0]) if bool((found == found[0]).all()) else None


_NOTHING = Saved("constant", ())


# What operations save of their own making, by the names that torch gives it.
_OWN = re.compile(
    r"result\d*|output\d*|.*mean|.*rstd|.*invstd|.*logsumexp|.*log_sumexp|philox.*|rng_state|reserve.*|total_weight|buf"
    r"|workspace"
)
_CHOOSING = ("Sort", "Topk", "Max", "Min", "Median", "Nanmedian", "Kthvalue", "Mode", "Aminmax", "Cummax", "Cummin")


def _in_proportion(one: Any, other: Any, rows: int, others_rows: int) -> bool:
    """Whether saved sizes are equal, or as many times larger as there are more rows."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_in_proportion(mine, theirs, rows, others_rows) for mine, theirs in pairs)
    if type(one) is int and type(other) is int:
        return one == other or one * others_rows == other * rows
    return bool(one == other)
