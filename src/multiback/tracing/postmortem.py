"""After autograd's errors: which nodes had been freed, what was changed in place, which tensor survived."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from multiback import graph
from multiback.tracing import places
from multiback.tracing.walking import NO_NUMBER, Walked

SECOND_TIME = "backward through the graph a second time"
IN_PLACE = "modified by an inplace operation"


def freed(walked: Walked) -> set[int]:
    """The numbers of the nodes whose saved tensors an earlier traversal has freed."""
    found = set()
    for number, node in walked.nodes.items():
        names = [name.removeprefix("_raw") for name in graph.names_saved(type(node)).tensors] or ["saved_tensors"]
        for name in names:
            try:
                getattr(node, name, None)
            except RuntimeError as error:
                if "freed" in str(error):
                    found.add(number)
                break
    return found


def changed(walked: Walked) -> list[tuple[str, list[int], Tensor | None]]:
    """By saved tensor that was written to: the operation that saved it, its shape, and the leaf that it is."""
    found = []
    for node in walked.nodes.values():
        for raw in graph.names_saved(type(node)).tensors:
            try:
                getattr(node, raw.removeprefix("_raw"), None)
            except RuntimeError as error:
                if "inplace" in str(error):
                    found.append(_written(walked, node, raw))
    return found


def _written(walked: Walked, node: Any, raw: str) -> tuple[str, list[int], Tensor | None]:
    value = getattr(node, raw)
    tensor = (value[0] if isinstance(value, (list, tuple)) else value).data
    if tensor is None:
        return node.name(), [], None
    pointer = tensor.untyped_storage().data_ptr()
    leaves = [leaf for leaf in walked.leaves.values() if leaf.untyped_storage().data_ptr() == pointer]
    return node.name(), list(tensor.shape), leaves[0] if leaves else None


def border(walked: Walked, roots: Iterable[Any], old: set[int]) -> set[int]:
    """Of the old nodes, those from which newer ones, or the call itself, went on: what survived."""
    pending, seen = list(roots), set[int]()
    found = {root._sequence_nr() for root in pending if root._sequence_nr() in old}
    while pending:
        node = pending.pop()
        number = node._sequence_nr()
        if number in seen or number in old or number == NO_NUMBER:
            continue
        seen.add(number)
        for child, _ in node.next_functions:
            if child is None or child._sequence_nr() == NO_NUMBER:
                continue
            if child._sequence_nr() in old:
                found.add(child._sequence_nr())
            else:
                pending.append(child)
    return found


def surviving(walked: Walked, roots: Iterable[Any], old: set[int], remembered: dict[int, str]) -> dict[str, list[Any]]:
    """What the program calls the tensors by which the newer part hangs on old nodes, and where it assigns them."""
    numbers = border(walked, roots, old)
    for one in places.frames_from(places.current()):
        names = places.names_in(one)
        found = sorted({names[number] for number in numbers if number in names})
        if found:
            return {"survivors": found, "lines": [places.assigned(one.f_code, name) for name in found]}
    found = [remembered[number] for number in sorted(numbers) if number in remembered][:4]
    return {"survivors": found, "lines": [[] for _ in found]}
