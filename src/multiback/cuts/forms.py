"""Forms of graphs: by them the graph of some rows is trusted as the graph of a whole batch, of which it is proven.

What no graph shows in full, such as a statistic of the batch behind `detach`, or a hook that mixes
rows, is held back in two ways. What operations saved that holds no rows must be the same, bit for
bit, as in the graph that was proven: a statistic of another batch is not. And on the first batch some
rows are run by themselves, and their gradients held against those of the whole (`confirming`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from multiback import graph
from multiback.cuts import fingerprints

Constant = tuple[tuple[int, ...], int | None]


@dataclass(frozen=True)
class Form:
    """The operations of a graph, how they are wired, and what they saved, for so many rows.

    Attributes
    ----------
    nodes : by node, its name and which nodes its inputs come from.
    numbers : by what was saved and is no tensor, whether it is a dimension, and its value.
    saved : by saved tensor, its shape, and its fingerprint where it holds no rows and is no leaf.
    """

    rows: int
    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    numbers: tuple[tuple[bool, Any], ...]
    saved: tuple[Constant, ...]

    def matches(self, other: "Form") -> bool:
        """Whether they differ in nothing but the number of rows."""
        if self.nodes != other.nodes or len(self.saved) != len(other.saved):
            return False
        alike = self.numbers == other.numbers or all(
            mine == theirs or (not exact and _in_proportion(mine, theirs, self.rows, other.rows))
            for (exact, mine), (_, theirs) in zip(self.numbers, other.numbers, strict=True)
        )
        return alike and all(
            shape != other_shape or value == other_value
            for (shape, value), (other_shape, other_value) in zip(self.saved, other.saved, strict=True)
        )


def form_of(nodes: Sequence[Node], rows: int) -> Form | None:
    """The form of a graph of these nodes; None where saved tensors are behind hooks, which must not be called.

    A few microseconds a node, and a read of every saved tensor that holds no rows.
    """
    places: dict[Node | None, int] = {node: place for place, node in enumerate(nodes)}
    names = [node.name() for node in nodes]
    wired = [tuple([places.get(child, -1) for child, _ in node.next_functions]) for node in nodes]
    kinds = [(node, graph.names_saved(type(node))) for node in nodes]
    numbers = [("dim" in name, getattr(node, name)) for node, kind in kinds for name in kind.numbers]
    leaves = {leaf.data_ptr() for leaf in map(graph.leaf_of, nodes) if leaf is not None and leaf.numel()}
    saved: list[Constant] = []
    for node, kind in kinds:
        for name in kind.tensors:
            for value in graph.saved_values(node, name):
                if value.unpack_hook is not None:
                    return None
                saved.append(_constant(value.data, rows, leaves))
    return Form(rows, tuple(zip(names, wired, strict=True)), tuple(numbers), tuple(saved))


def _constant(tensor: Tensor | None, rows: int, leaves: set[int]) -> Constant:
    if tensor is None:
        return (), None
    shape = tuple(tensor.shape)
    if (shape and shape[0] == rows) or (tensor.numel() and tensor.data_ptr() in leaves):
        return shape, None
    found = fingerprints.of_tensor(tensor)
    return shape, None if found is None else int(found)


def foreign(nodes: Sequence[Node], data: Sequence[Tensor], rows: int) -> str:
    """The first operation that saved rows which neither are data nor come out of the graph, such as a mask.

    What they come from, other rows among it, cannot be known. Empty where none did; the graph is one of
    which `form_of` knows the form.
    """
    given = {tensor.untyped_storage().data_ptr() for tensor in data if tensor.numel()}
    for node in nodes:
        for name in graph.names_saved(type(node)).tensors:
            values = graph.saved_values(node, name)
            if any(_may_be_foreign(node, value.data, name, rows, given) for value in values):
                saved = graph.saved_values(node, name.removeprefix("_raw"))
                if not all(part is None or part.requires_grad for part in saved):
                    return node.name()
    return ""


# What operations save of their own making, by the names that torch gives it.
_OWN = re.compile(
    r"result\d*|output\d*|.*mean|.*rstd|.*invstd|.*logsumexp|.*log_sumexp|philox.*|rng_state|reserve.*|total_weight|buf"
    r"|workspace"
)
_CHOOSING = ("Sort", "Topk", "Max", "Min", "Median", "Nanmedian", "Kthvalue", "Mode", "Aminmax", "Cummax", "Cummin")


def _may_be_foreign(node: Node, tensor: Tensor | None, name: str, rows: int, given: set[int]) -> bool:
    """Whether a saved tensor has rows and is neither the operation's own nor data; the walk sees one with a graph."""
    if tensor is None or not tensor.numel() or rows not in tensor.shape:
        return False
    if tensor.untyped_storage().data_ptr() in given:
        return False
    own = name.removeprefix("_raw_saved_")
    return not _OWN.fullmatch(own) and not (own == "indices" and node.name().startswith(_CHOOSING))


def _in_proportion(one: Any, other: Any, rows: int, others_rows: int) -> bool:
    """Whether saved sizes are equal, or as many times larger as there are more rows."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_in_proportion(mine, theirs, rows, others_rows) for mine, theirs in pairs)
    if type(one) is int and type(other) is int:
        return one == other or one * others_rows == other * rows
    return bool(one == other)
