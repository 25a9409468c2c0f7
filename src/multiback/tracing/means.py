"""Means that are back-propagated within one step over unequal numbers of elements."""

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from multiback.traces import Evidence, Place
from multiback.tracing import listening
from multiback.tracing.calls import Call
from multiback.tracing.walking import Walked, has_values

_LEEWAY = 1.02
_MOST_PLACES = 2000


class Means:
    """By place and form of the graph, the means of the step that is under way: elements, and the weight of each."""

    def __init__(self) -> None:
        self._seen: dict[Place, deque[tuple[int, Hashable, float, float]]] = {}

    def hook(self, call: Call, walked: Walked, step: int) -> list[Any]:
        """A prehook on the mean nearest to the loss."""
        if call.kind != "backward" or not walked.means:
            return []
        node = walked.nodes[max(walked.means)]
        found = _elements(node)
        if found is None:
            return []
        elements, shape = found
        form = (type(node), len(walked.nodes), shape)  # other losses at the same place are no slices of one

        def hear(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[0]
            if gradient is None or gradient.numel() != 1 or not has_values(gradient):
                return
            if len(self._seen) > _MOST_PLACES:
                self._seen.clear()
            seen = self._seen.setdefault(call.place, deque(maxlen=64))
            seen.append((step, form, elements, float(gradient.detach()) / elements))

        return [node.register_prehook(listening.guarded(call, hear))]

    def tell(self, place: Place, step: int, see: Callable[[Evidence], None]) -> None:
        """Whether this step's means at a place weigh elements differently."""
        now = [one for one in self._seen.get(place, ()) if one[0] == step and one[3]]
        for form in {one[1] for one in now}:
            alike = [(elements, abs(weight)) for _, its, elements, weight in now if its == form]
            weights = [weight for _, weight in alike]
            if len({elements for elements, _ in alike}) > 1 and max(weights) > _LEEWAY * min(weights):
                example = {"sizes": [elements for elements, _ in alike[:6]], "ratio": max(weights) / min(weights)}
                see(Evidence(code="uneven-mean", place=place, example=example))


def _elements(node: Any) -> tuple[float, tuple[int, ...]] | None:
    """Over how many elements a node takes the mean, and the shape of one row; None where it takes none, or is hidden.

    Nothing is unpacked: hooks on saved tensors are the program's.
    """
    name = node.name()
    if getattr(node, "_saved_reduction", 1) != 1:
        return None
    if name.startswith("Mean"):
        count, shape = getattr(node, "_saved_self_sym_numel", 0), getattr(node, "_saved_self_sym_sizes", ())
        return (float(count), tuple(shape[1:])) if count else None
    own = _held(node, "_raw_saved_self")
    if own is None or not own.numel():
        return None
    count = float(own.numel())
    if name.startswith("NllLoss"):
        weight = _held(node, "_raw_saved_total_weight")
        if weight is None or not has_values(weight):
            return None
        count = float(weight)
    return (count, tuple(own.shape[1:])) if count else None


def _held(node: Any, name: str) -> Tensor | None:
    """A saved tensor, where no hook stands before it."""
    raw = getattr(node, name, None)
    return None if raw is None or raw.unpack_hook is not None else raw.data
