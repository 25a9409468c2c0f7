"""Walks a graph by sequence numbers, which identify nodes without keeping them alive."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from multiback import graph

NO_NUMBER = 2**64 - 1  # of AccumulateGrad
_SELECTING = (
    "SelectBackward", "SliceBackward", "IndexBackward", "IndexSelectBackward", "GatherBackward", "SplitBackward",
    "SplitWithSizesBackward", "UnbindBackward", "MaskedSelectBackward", "NarrowBackward", "TakeBackward",
)  # fmt: skip
_MEANS = ("MeanBackward", "NllLossBackward", "NllLoss2DBackward", "MseLossBackward", "L1LossBackward",
          "SmoothL1LossBackward", "BinaryCrossEntropyWithLogitsBackward", "BinaryCrossEntropyBackward")  # fmt: skip
_EDITED = 8  # leaves of a kept graph, looked at for edits without a new version
_KINDS: dict[type, str] = {}


@dataclass
class Walked:
    """What one walk saw; `nodes` are held for the length of a call alone.

    Attributes
    ----------
    numbers : the sequence numbers of all nodes but leaves'.
    least, root : the smallest and the largest of them.
    leaves : tensors into which a backward would accumulate, by identity.
    consumers : by leaf, the smallest number of the nodes that use it.
    """

    nodes: dict[int, Any] = field(default_factory=dict)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    consumers: dict[int, int] = field(default_factory=dict)
    least: int = NO_NUMBER
    root: int = -1
    selecting: int = 0
    means: list[int] = field(default_factory=list)
    batch_norms: list[int] = field(default_factory=list)
    compiled: bool = False

    @property
    def numbers(self) -> set[int]:
        """Of all nodes but leaves'."""
        return set(self.nodes)


def roots_of(outputs: Any) -> list[Any]:
    """The nodes from which the engine would start."""
    given = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    nodes = [one.grad_fn if isinstance(one, Tensor) else getattr(one, "node", None) for one in given]
    return [node for node in nodes if node is not None]


def walk(roots: Iterable[Any]) -> Walked:
    """Every node once; a microsecond or two each."""
    found = Walked()
    pending = list(roots)
    while pending:
        node = pending.pop()
        number = node._sequence_nr()
        if number == NO_NUMBER or number in found.nodes:
            continue
        found.nodes[number] = node
        _note(found, node, number)
        for child, _ in node.next_functions:
            if child is None:
                continue
            leaf = getattr(child, "variable", None) if child._sequence_nr() == NO_NUMBER else None
            if leaf is None:
                pending.append(child)
                continue
            found.leaves[id(leaf)] = leaf
            found.consumers[id(leaf)] = min(number, found.consumers.get(id(leaf), NO_NUMBER))
    if found.nodes:
        found.least, found.root = min(found.nodes), max(found.nodes)
    return found


def _note(found: Walked, node: Any, number: int) -> None:
    """Count what bears on findings."""
    kind = type(node)
    name = _KINDS.get(kind)
    if name is None:
        name = _KINDS[kind] = kind.__name__
    if name.startswith(_SELECTING):
        found.selecting += 1
    elif name.startswith(_MEANS):
        found.means.append(number)
    elif "BatchNorm" in name and getattr(node, "_saved_training", True):
        found.batch_norms.append(number)
    elif name.startswith("CompiledFunction"):
        found.compiled = True


def saved_bytes(walked: Walked) -> int:
    """Bytes of unique storages that the nodes keep for backward, leaves' own left out; nothing is unpacked."""
    own = {_pointer(leaf) for leaf in walked.leaves.values()}
    sizes: dict[int, int] = {}
    for node in walked.nodes.values():
        for name in graph.names_saved(type(node)).tensors:
            try:
                raw = getattr(node, name)
                for value in raw if isinstance(raw, (list, tuple)) else [raw]:
                    tensor = value.data
                    if tensor is not None and _pointer(tensor) not in own:
                        sizes[_pointer(tensor)] = tensor.untyped_storage().nbytes()
            except RuntimeError:  # freed, or without plain storage
                continue
    return sum(sizes.values())


def _pointer(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def fingerprints(walked: Walked, start: int) -> dict[int, tuple[Any, ...]]:
    """By identity, of some of a graph's leaves: others on other graphs, since updates change most."""
    some = list(walked.leaves.items())
    first = start * _EDITED % max(len(some), 1)
    return {key: fingerprint(leaf) for key, leaf in [*some, *some][first : first + _EDITED]}


def fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Some eight elements and the place of the memory: enough to see an update, at a few microseconds."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // 8)
    return tensor.data_ptr(), tuple(flat[: 8 * step + 1 : step].tolist())
