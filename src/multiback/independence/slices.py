"""Losses of equal slices of one tensor, in order: where a walk can start although no one tensor holds all losses."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from multiback.independence.layouts import signed

_MOST_NODES_ABOVE = 32


def common_slice(losses: Sequence[Tensor]) -> tuple[Node, int, int] | None:
    """The node and output that are sliced, and the elements of one loss's slice; None where losses are anything else.

    Loss k must depend on rows k * c to (k + 1) * c of that tensor, its dimension 0, and on nothing else.
    """
    common: tuple[Any, int] | None = None
    expected = size = 0
    for loss in losses:
        if loss.ndim or loss.grad_fn is None:
            return None
        found = _slice_below(loss.grad_fn)
        if found is None:
            return None
        place, start, stop = found
        if common is None:
            common, size = place, stop - start
        if place != common or start != expected or stop - start != size:
            return None
        expected = stop
    if common is None or not size:
        return None
    shape = common[0]._input_metadata[common[1]].shape
    return (*common, size * math.prod(shape[1:])) if shape[0] == expected else None


def _slice_below(root: Any) -> tuple[tuple[Any, int], int, int] | None:
    """The one slice along dimension 0 at which every path from `root` ends: what is sliced, from where to where."""
    found: tuple[tuple[Any, int], int, int] | None = None
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        here = _slice(node)
        if here is not None:
            if found is not None and found != here:
                return None
            found = here
            continue
        if not node.next_functions or len(seen) > _MOST_NODES_ABOVE:  # a leaf, or no mere loss
            return None
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return found


def _slice(node: Any) -> tuple[tuple[Any, int], int, int] | None:
    name = type(node).__name__
    if name not in ("SliceBackward0", "SelectBackward0") or node._saved_dim != 0:
        return None
    place = node.next_functions[0]
    length = int(node._saved_self_sym_sizes[0])
    if name == "SelectBackward0":
        index = signed(node._saved_index) % length
        return place, index, index + 1
    if node._saved_step != 1:
        return None
    start, stop = signed(node._saved_start), min(signed(node._saved_end), length)
    return (place, start, stop) if 0 <= start < stop else None
