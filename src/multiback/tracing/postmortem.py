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
        names = graph.names_saved(type(node)).tensors
        for name in [raw.removeprefix("_raw") for raw in names if not _is_hooked(node, raw)] or ["saved_tensors"] * (
            not names
        ):
            try:
                getattr(node, name, None)
            except RuntimeError as error:
                if "freed" in str(error):
                    found.add(number)
                break
    return found


def _is_hooked(node: Any, raw: str) -> bool:
    """Whether reading a saved value would run hooks, which are the program's; so they are after it has been freed."""
    try:
        return any(value.unpack_hook is not None for value in graph.saved_values(node, raw))
    except RuntimeError:
        return False


def changed(walked: Walked) -> list[tuple[str, list[int], Tensor | None]]:
    """By saved tensor that was written to: the operation that saved it, its shape, and the leaf that it is."""
    found = []
    for node in walked.nodes.values():
        for raw in graph.names_saved(type(node)).tensors:
            if _is_hooked(node, raw):
                continue
            try:
                getattr(node, raw.removeprefix("_raw"), None)
            except RuntimeError as error:
                if "inplace" in str(error):
                    found.append(_written(walked, node, raw))
    return found


def _written(walked: Walked, node: Any, raw: str) -> tuple[str, list[int], Tensor | None]:
    tensor = graph.saved_values(node, raw)[0].data
    if tensor is None:
        return node.name(), [], None
    pointer = tensor.untyped_storage().data_ptr()
    leaves = [leaf for leaf in walked.leaves.values() if leaf.untyped_storage().data_ptr() == pointer]
    return node.name(), list(tensor.shape), leaves[0] if leaves else None


def border(walked: Walked, roots: Iterable[Any], old: set[int]) -> tuple[dict[int, Any], bool]:
    """Of the old nodes, those from which newer ones, or the call itself, went on; whether the newer use leaves."""
    pending, seen, fresh = list(roots), set[int](), False
    found = {root._sequence_nr(): root for root in pending if root._sequence_nr() in old}
    while pending:
        node = pending.pop()
        number = node._sequence_nr()
        if number in seen or number in old or number == NO_NUMBER:
            continue
        seen.add(number)
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child._sequence_nr() == NO_NUMBER:
                fresh = True
            elif child._sequence_nr() in old:
                found[child._sequence_nr()] = child
            else:
                pending.append(child)
    return found, fresh


def surviving(
    walked: Walked, roots: Iterable[Any], old: set[int], remembered: dict[int, places.Name]
) -> dict[str, Any]:
    """By what the newer part of a graph hangs on old nodes.

    Returns
    -------
    dict : `survivors`, what the program calls these tensors; `lines`, where it assigns each; `kinds`, what
        holds it, for a name with an index; `fresh`, whether the newer part uses leaves itself, as a forward
        does and a loss does not; `scalar`, whether what survives is a scalar, such as a sum of losses.
    """
    numbers, fresh = border(walked, roots, old)
    scalar = bool(numbers) and all(not _shape(node) for node in numbers.values())
    told: dict[str, Any] = {"fresh": fresh, "scalar": scalar}
    for one in places.frames_from(places.current()):
        names = places.names_in(one)
        found = sorted({names[number] for number in numbers if number in names})
        if found:
            return {**told, **_told(found), "lines": [places.assigned(one, name.text) for name in found]}
    found = [remembered[number] for number in sorted(numbers) if number in remembered][:4]
    return {**told, **_told(found), "lines": [[] for _ in found]}


def _told(names: list[places.Name]) -> dict[str, Any]:
    return {"survivors": [name.text for name in names], "kinds": [name.kind for name in names]}


def _shape(node: Any) -> tuple[int, ...]:
    metadata = getattr(node, "_input_metadata", ())
    return tuple(metadata[0].shape) if metadata else (1,)


def edits() -> list[tuple[int, str]]:
    """Lines that change something in place, in the file from which the call came."""
    frame = next(places.frames_from(places.current()), None)
    return [] if frame is None else places.edited(frame)
