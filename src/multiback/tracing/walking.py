"""Walks a graph by sequence numbers, which identify nodes without keeping them alive."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from multiback import graph

NO_NUMBER = 2**64 - 1  # of AccumulateGrad
_SELECTING = (
    "SelectBackward", "SliceBackward", "IndexBackward", "IndexSelectBackward", "GatherBackward", "SplitBackward",
    "SplitWithSizesBackward", "UnbindBackward", "MaskedSelectBackward", "NarrowBackward", "TakeBackward",
)  # fmt: skip
_MEANS = ("MeanBackward", "NllLossBackward", "NllLoss2DBackward", "MseLossBackward", "L1LossBackward",
          "SmoothL1LossBackward", "BinaryCrossEntropyWithLogitsBackward", "BinaryCrossEntropyBackward")  # fmt: skip
_KINDS: dict[type, str] = {}


@dataclass
class Walked:
    """What one walk saw; `nodes` are held for the length of a call alone.

    Attributes
    ----------
    nodes : all but leaves', by sequence number; where a call names its inputs, those that lead to them.
    count : of all of them, also where numbers of several threads coincide.
    least, root : the smallest and the largest number.
    leaves : tensors into which a backward would accumulate, by identity.
    consumers : by leaf, the smallest number of the nodes that use it.
    selecting : nodes that take rows, or parts along dimension 0, out of a tensor.
    mixed : whether numbers are of several threads, and tell nothing of what came first.
    """

    nodes: dict[int, Any] = field(default_factory=dict)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    consumers: dict[int, int] = field(default_factory=dict)
    count: int = 0
    least: int = NO_NUMBER
    root: int = -1
    selecting: list[int] = field(default_factory=list)
    means: list[int] = field(default_factory=list)
    batch_norms: list[int] = field(default_factory=list)
    compiled: bool = False
    mixed: bool = False

    @property
    def numbers(self) -> set[int]:
        """Of all nodes but leaves'."""
        return set(self.nodes)


def given_outputs(outputs: Any) -> tuple[Any, ...]:
    """What the engine was given, one or several."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def roots_of(outputs: Any) -> list[Any]:
    """The nodes from which the engine would start."""
    given = given_outputs(outputs)
    nodes = [one.grad_fn if isinstance(one, Tensor) else getattr(one, "node", None) for one in given]
    return [node for node in nodes if node is not None]


def walk(roots: Iterable[Any], inputs: Sequence[Any] = (), most: int = sys.maxsize) -> Walked:
    """Every node that a call from the roots would run, once, or `most` of them; a microsecond or two each."""
    found, pending, seen = Walked(), list(roots), set[Any]()
    wanted = _leading_to(pending, inputs) if inputs else None
    while pending and len(seen) < most:
        node = pending.pop()
        if node in seen or (wanted is not None and node not in wanted):
            continue
        number = node._sequence_nr()
        if number == NO_NUMBER:
            continue
        seen.add(node)
        found.mixed |= number in found.nodes
        found.nodes[number] = node
        _note(found, node, number)
        for child, _ in node.next_functions:
            if child is None:
                continue
            its_number = child._sequence_nr()
            leaf = getattr(child, "variable", None) if its_number == NO_NUMBER else None
            if leaf is None:
                pending.append(child)
                found.mixed |= number <= its_number != NO_NUMBER
            elif wanted is None or child in wanted:
                found.leaves[id(leaf)] = leaf
                found.consumers[id(leaf)] = min(number, found.consumers.get(id(leaf), NO_NUMBER))
    if found.nodes:
        found.count, found.least, found.root = len(seen), min(found.nodes), max(found.nodes)
    return found


def _leading_to(roots: list[Any], inputs: Sequence[Any]) -> set[Any]:
    """The nodes from which an input's can be reached, these included."""
    above: dict[Any, list[Any]] = {}
    pending, seen = list(roots), set(roots)
    while pending:
        node = pending.pop()
        for child, _ in node.next_functions:
            if child is not None:
                above.setdefault(child, []).append(node)
                if child not in seen:
                    seen.add(child)
                    pending.append(child)
    found = {node for node in map(_node_of, inputs) if node is not None}
    pending = list(found)
    while pending:
        for node in above.get(pending.pop(), ()):
            if node not in found:
                found.add(node)
                pending.append(node)
    return found


def _node_of(one: Any) -> Any:
    """Where a gradient of it arrives."""
    return torch.autograd.graph.get_gradient_edge(one).node if isinstance(one, Tensor) else getattr(one, "node", None)


def _note(found: Walked, node: Any, number: int) -> None:
    """Count what bears on findings."""
    kind = type(node)
    name = _KINDS.get(kind)
    if name is None:
        name = _KINDS[kind] = kind.__name__
    if name.startswith(_SELECTING):
        if takes_rows(node, name):
            found.selecting.append(number)
    elif name.startswith(_MEANS):
        found.means.append(number)
    elif "BatchNorm" in name and getattr(node, "_saved_training", True):
        found.batch_norms.append(number)
    elif name.startswith("CompiledFunction"):
        found.compiled = True


def takes_rows(node: Any, name: str) -> bool:
    """Whether a selecting node selects along dimension 0."""
    if name.startswith("MaskedSelect") or name.startswith("Take"):
        return True
    if name.startswith("IndexBackward"):
        try:
            indices = getattr(node, "_raw_saved_indices", ())
        except RuntimeError:  # freed
            return False
        return bool(indices) and indices[0].data is not None
    return getattr(node, "_saved_dim", None) == 0


def saved_bytes(walked: Walked) -> int:
    """Bytes of unique storages that the nodes keep for backward, leaves' own left out; nothing is unpacked."""
    own = {_pointer(leaf) for leaf in walked.leaves.values() if has_values(leaf)}
    sizes: dict[int, int] = {}
    for node in walked.nodes.values():
        for name in graph.names_saved(type(node)).tensors:
            try:
                for value in graph.saved_values(node, name):
                    tensor = value.data
                    if tensor is not None and has_values(tensor) and _pointer(tensor) not in own:
                        sizes[_pointer(tensor)] = tensor.untyped_storage().nbytes()
            except RuntimeError:  # freed, or without plain storage
                continue
    return sum(sizes.values())


def _pointer(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one, whose elements can be read without running any code of a subclass."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.device.type != "meta" and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def fingerprint(tensor: Tensor) -> tuple[str, ...]:
    """Some eight elements, enough to see an update, at a few microseconds; as text, in which NaN equals itself."""
    if not has_values(tensor):
        return ()
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // 8)
    return tuple(map(repr, flat[: 8 * step + 1 : step].tolist()))


def is_zero(tensor: Tensor) -> bool:
    """Whether a tensor is zero throughout; a few elements tell nearly always that it is not."""
    if not has_values(tensor):
        return False
    flat = tensor.detach().reshape(-1)
    return not any(flat[:: max(1, flat.numel() // 8)].tolist()) and not bool(flat.any())
