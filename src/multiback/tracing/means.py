"""Means that are back-propagated within one step over unequal numbers of elements."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multiback.traces import Evidence, Place
from multiback.tracing.calls import Call
from multiback.tracing.walking import Walked

_LEEWAY = 1.02


class Means:
    """By place, the means of the step that is under way: elements, and the weight of each."""

    def __init__(self) -> None:
        self._seen: dict[Place, deque[tuple[int, float, float]]] = {}

    def hook(self, call: Call, walked: Walked, step: int) -> list[Any]:
        """A prehook on the mean nearest to the loss."""
        if call.kind != "backward" or not walked.means:
            return []
        node = walked.nodes[max(walked.means)]
        elements = _elements(node)
        if elements is None:
            return []

        def hear(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[0]
            if gradient is None or gradient.numel() != 1 or torch._C._functorch.is_functorch_wrapped_tensor(gradient):
                return
            seen = self._seen.setdefault(call.place, deque(maxlen=64))
            seen.append((step, elements, float(gradient) / elements))

        return [node.register_prehook(hear)]

    def tell(self, place: Place, step: int, see: Callable[[Evidence], None]) -> None:
        """Whether this step's means at a place weigh elements differently."""
        now = [(elements, weight) for then, elements, weight in self._seen.get(place, ()) if then == step]
        weights = [abs(weight) for _, weight in now if weight]
        if len({elements for elements, _ in now}) < 2 or max(weights) <= _LEEWAY * min(weights):
            return
        example = {"sizes": [elements for elements, _ in now[:6]], "ratio": max(weights) / min(weights)}
        see(Evidence(code="uneven-mean", place=place, example=example))


def _elements(node: Any) -> float | None:
    """Over how many elements a node takes the mean; None where it takes none."""
    name = node.name()
    if getattr(node, "_saved_reduction", 1) != 1:
        return None
    if name.startswith("NllLoss"):
        return float(node._saved_total_weight) or None
    if name.startswith("Mean"):
        return float(node._saved_self_sym_numel) if hasattr(node, "_saved_self_sym_numel") else None
    raw = getattr(node, "_raw_saved_self", None)
    return float(raw.data.numel()) if raw is not None and raw.data is not None and raw.data.numel() else None
