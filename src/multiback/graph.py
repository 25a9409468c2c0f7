"""Reads an autograd graph: nodes, leaves, saved bytes, freed nodes; never runs a backward."""

import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

_ACCUMULATE = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class GraphFacts:
    """What a walk of one graph found.

    Attributes
    ----------
    nodes : number of nodes reachable from the roots, `AccumulateGrad` nodes included.
    leaves : the tensors into which a backward would accumulate, each once.
    saved_bytes : bytes of unique storages that nodes keep for backward, apart from the two below.
    parameter_bytes : bytes of saved storages that belong to leaves or to `parameters`.
    input_bytes : bytes of saved storages that belong to `inputs`.
    freed : names of the nodes whose saved tensors a backward has already freed.
    unreadable : names of nodes with a value behind saved-tensor hooks (checkpointing, save_on_cpu);
        reading it would run user code, so its bytes are not counted.
    """

    nodes: int
    leaves: tuple[Tensor, ...]
    saved_bytes: int
    parameter_bytes: int
    input_bytes: int
    freed: tuple[str, ...]
    unreadable: tuple[str, ...]


def roots_of(tensors: Iterable[Tensor]) -> list[Node]:
    """The nodes at which a backward of `tensors` would start; a leaf has its `AccumulateGrad` node."""
    found = []
    for tensor in tensors:
        node = tensor.grad_fn
        if node is None and tensor.requires_grad:
            node = torch.autograd.graph.get_gradient_edge(tensor).node
        if node is not None:
            found.append(node)
    return found


def walk(roots: Iterable[Node]) -> list[Node]:
    """Every node reachable from `roots`, each once; O(nodes + edges), about a microsecond a node."""
    seen: set[Node] = set()
    order: list[Node] = []
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        order.append(node)
        pending.extend(child for child, _ in node.next_functions if child is not None)
    return order


_FREED = "multiback: freed"


def mark_freed(losses: Iterable[Tensor]) -> None:
    """Remember, on the graph itself, that it has been used up.

    A traversal frees what it visits. Where little is left to visit, such as a single layer below a
    sum, torch would answer a second request; the mark tells.
    """
    for loss in losses:
        if loss.grad_fn is not None:
            _metadata(loss.grad_fn)[_FREED] = True


def is_marked_freed(losses: Iterable[Tensor]) -> bool:
    """Whether a loss's graph bears the mark."""
    return any(loss.grad_fn is not None and _FREED in _metadata(loss.grad_fn) for loss in losses)


def _metadata(node: Any) -> dict[str, Any]:
    """A node's own dictionary, which lives as long as it does."""
    return node.metadata


def traversal_bytes(nodes: Sequence[Node], roots: Sequence[Node]) -> int:
    """Upper bound of the bytes of gradients that one traversal holds at once, leaves' own left out.

    Plays the engine's order, last made first, with every gradient as a tensor of its own; twice the
    largest node's inputs and outputs stand for what an operation allocates while it runs.
    """
    waiting: dict[Node, int] = {}
    for node in nodes:
        for child, _ in node.next_functions:
            if child is not None:
                waiting[child] = waiting.get(child, 0) + 1
    sizes = {node: _arriving_bytes(node) for node in nodes}
    order = itertools.count()  # nodes themselves have no order
    ready = [(-node._sequence_nr(), next(order), node) for node in dict.fromkeys(roots)]
    heapq.heapify(ready)
    live = sum(sizes[node] for *_, node in ready)
    peak = largest = 0
    alive = {node for *_, node in ready}
    while ready:
        *_, node = heapq.heappop(ready)
        made = 0
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in alive:
                alive.add(child)
                made += sizes[child]
            waiting[child] -= 1
            if not waiting[child]:
                heapq.heappush(ready, (-child._sequence_nr(), next(order), child))
        live += made
        peak = max(peak, live)
        largest = max(largest, sizes[node] + made)
        live -= sizes[node]
    return peak + 2 * largest


def _arriving_bytes(node: Node) -> int:
    """Bytes of all gradients that reach a node; 0 for leaves."""
    if not node.next_functions:
        return 0
    return sum(math.prod(metadata.shape) * metadata.dtype.itemsize for metadata in node._input_metadata)


def edges_into(nodes: Iterable[Node], roots: Iterable[Node] = ()) -> dict[Node, list[tuple[Node | None, int]]]:
    """For every node, the edges that lead into it: (node, its input number); (None, 0) for a root."""
    into: dict[Node, list[tuple[Node | None, int]]] = {root: [(None, 0)] for root in roots}
    for node in nodes:
        for number, (child, _) in enumerate(node.next_functions):
            if child is not None:
                into.setdefault(child, []).append((node, number))
    return into


def leaves_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The leaves into which a backward of `tensors` would accumulate, each once."""
    return [leaf for leaf in map(leaf_of, walk(roots_of(tensors))) if leaf is not None]


def reaches(tensors: Iterable[Tensor], wanted: Iterable[Tensor]) -> bool:
    """Whether the graph behind `tensors` leads to any of those wanted; ends with the first that is met."""
    nodes = {torch.autograd.graph.get_gradient_edge(tensor).node for tensor in wanted}
    return any(node in nodes for node in nearest_first(roots_of(tensors)))


def nearest_first(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node reachable from `roots`, each once, fewest steps away first; no further than it is asked."""
    pending = deque(dict.fromkeys(roots))
    seen = set(pending)
    while pending:
        node = pending.popleft()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)


def leaf_of(node: Node) -> Tensor | None:
    """The tensor into which an `AccumulateGrad` node accumulates; None for any other node."""
    return getattr(node, "variable", None) if node.name() == _ACCUMULATE else None


def read(tensors: Iterable[Tensor], *, parameters: Sequence[Tensor] = (), inputs: Sequence[Tensor] = ()) -> GraphFacts:
    """Walk the graph behind `tensors` and count what it keeps alive.

    Storages are counted once, however many nodes or views share them, and whole: a saved view
    keeps all of its storage alive. Nothing is unpacked through saved-tensor hooks, and no
    backward is run. Costs one walk and no memory beyond it.
    """
    nodes = walk(roots_of(tensors))
    leaves = tuple(leaf for leaf in map(leaf_of, nodes) if leaf is not None)
    owned = {_key(leaf) for leaf in (*leaves, *parameters)} - {None}
    given = {_key(tensor) for tensor in inputs} - {None}
    storages: dict[tuple[str, int], int] = {}
    freed: list[str] = []
    unreadable: list[str] = []
    for node in nodes:
        saved, is_freed, is_hooked = _saved(node)
        if is_freed:
            freed.append(node.name())
        if is_hooked:
            unreadable.append(node.name())
        for tensor in saved:
            key = _key(tensor)
            if key is not None:
                storages[key] = tensor.untyped_storage().nbytes()
    by_input = sum(size for key, size in storages.items() if key in given)
    by_parameter = sum(size for key, size in storages.items() if key in owned and key not in given)
    return GraphFacts(
        nodes=len(nodes),
        leaves=leaves,
        saved_bytes=sum(storages.values()) - by_input - by_parameter,
        parameter_bytes=by_parameter,
        input_bytes=by_input,
        freed=tuple(freed),
        unreadable=tuple(unreadable),
    )


def _key(tensor: Tensor) -> tuple[str, int] | None:
    """Identity of a tensor's memory; None where it has no plain storage (sparse, meta, wrapper)."""
    try:
        pointer = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    return (str(tensor.device), pointer) if pointer else None


class NamesSaved(NamedTuple):
    """The attributes of a node's kind: of numbers (dimensions, sizes, flags), and of tensors, raw."""

    numbers: tuple[str, ...]
    tensors: tuple[str, ...]


@functools.cache
def names_saved(kind: type) -> NamesSaved:
    """What nodes of a kind save for backward; reading a raw tensor unpacks nothing."""
    names = dir(kind)
    raw = {name for name in names if name.startswith("_raw_saved_")}
    numbers = sorted(name for name in names if name.startswith("_saved_") and f"_raw{name}" not in raw)
    return NamesSaved(tuple(numbers), tuple(sorted(raw)))


def saved_values(node: Node, name: str) -> Sequence[Any]:
    """What a node saved under a name, of which some operations save several."""
    found = getattr(node, name)
    return found if isinstance(found, (list, tuple)) else [found]


def _saved(node: Node) -> tuple[list[Tensor], bool, bool]:
    """Tensors saved by `node`, whether they have been freed, whether hooks stand before any of them."""
    found: list[Tensor] = []
    freed = hooked = False
    for name in names_saved(type(node)).tensors:
        try:
            values = saved_values(node, name)
        except RuntimeError:  # a list of saved values cannot be read once freed
            freed = True
            continue
        for value in values:
            if value.unpack_hook is not None:
                hooked = True
            elif value.data is not None:
                found.append(value.data)
            else:  # freed, or an optional value that was never there: only the reader tells them apart
                freed |= _raises(node, name.removeprefix("_raw"))
    return found, freed, hooked


def freed_state(node: Node) -> bool | None:
    """Whether what a node saved has been freed; None where it saved nothing that can be read."""
    found, freed, hooked = _saved(node)
    return freed if (found or freed) and not hooked else None


def _raises(node: Node, name: str) -> bool:
    """Whether reading a saved value raises, as it does once the graph has been freed."""
    try:
        getattr(node, name, None)
    except RuntimeError:
        return True
    return False
