"""What happens to parameters between calls: steps, edits, and gradients that several calls left."""

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._C._autograd import _get_sequence_nr as clock

from multiback.traces import Place
from multiback.tracing.calls import Call
from multiback.tracing.walking import NO_NUMBER, Walked, fingerprint

_MOST_CONTRIBUTIONS = 64
_EDITED = 8  # leaves looked at in a call


@dataclass(eq=False)
class Known:
    """A leaf as the recorder knows it.

    Attributes
    ----------
    stepped : thread, clock and place of the last optimiser step that changed it.
    seen : version, clock, thread and place at the end of the last call that reached it.
    left : the calls whose gradients its `.grad` holds.
    grad : identity and version of `.grad` as the last call left it.
    """

    leaf: "weakref.ref[Tensor]"
    stepped: tuple[int, int, Place] | None = None
    seen: tuple[int, int, int, Place] | None = None
    left: deque[Call] = field(default_factory=lambda: deque(maxlen=_MOST_CONTRIBUTIONS))
    grad: tuple[int, int] | None = None


@dataclass(frozen=True)
class Used:
    """An optimiser's last step: where, and which calls, from which places, had left the gradients it used."""

    place: Place
    calls: frozenset[int]
    places: frozenset[Place]


class Parameters:
    """Every leaf that a walked call has reached, by identity; those that are gone are dropped."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}

    def of(self, leaf: Tensor) -> Known:
        """What is known of a leaf."""
        key = id(leaf)
        known = self._known.get(key)
        if known is None or known.leaf() is not leaf:
            known = self._known[key] = Known(weakref.ref(leaf, lambda _: self._known.pop(key, None)))
        return known

    def stepped(self, leaves: list[Tensor], thread: int, place: Place) -> None:
        """An optimiser has changed them."""
        now = clock()
        for leaf in leaves:
            self.of(leaf).stepped = (thread, now, place)

    def stale(self, walked: Walked, call: Call) -> list[tuple[Tensor, str, Place | None]]:
        """Leaves that have changed since a node of this graph used them: how, and where."""
        found: list[tuple[Tensor, str, Place | None]] = []
        for key, leaf in walked.leaves.items():
            known, used = self.of(leaf), walked.consumers.get(key, NO_NUMBER)
            if known.stepped is not None and known.stepped[0] == call.thread and used < known.stepped[1]:
                found.append((leaf, "step", known.stepped[2]))
            elif known.seen is not None:
                version, then, thread, place = known.seen
                if leaf._version != version and thread == call.thread and used < then and known.stepped is None:
                    found.append((leaf, "edit", place))
        return found

    def edited(self, walked: Walked, kept: Call) -> list[tuple[Tensor, str, Place | None]]:
        """Leaves whose values have changed since the call that kept this graph, without a new version."""
        some = list(walked.leaves.items())
        first = kept.number * _EDITED % max(len(some), 1)
        return [
            (leaf, "data", kept.place)
            for key, leaf in [*some, *some][first : first + _EDITED]  # others on other graphs: updates change most
            if key in kept.fingerprints
            and walked.consumers.get(key, NO_NUMBER) < kept.ended
            and kept.fingerprints[key] != fingerprint(leaf)
        ]

    def before(self, walked: Walked, call: Call) -> None:
        """Forget what `.grad` held, where it has been taken away or zeroed since."""
        for leaf in walked.leaves.values():
            known, grad = self.of(leaf), leaf.grad
            if grad is None:
                known.left.clear()
            elif known.grad is None or known.grad == (id(grad), grad._version):
                continue
            elif known.grad[0] != id(grad) or not bool(grad.any()):
                known.left.clear()
        call.cleared = any(not self.of(leaf).left for leaf in walked.leaves.values())

    def after(self, leaves: list[Tensor], call: Call) -> None:
        """The call has run, and left its gradient in theirs."""
        for leaf in leaves:
            known, grad = self.of(leaf), leaf.grad
            known.seen = (leaf._version, call.ended, call.thread, call.place)
            if call.kind == "backward":
                known.left.append(call)
                known.grad = None if grad is None else (id(grad), grad._version)

    def left_in(self, leaves: list[Any]) -> list[Call]:
        """The calls whose gradients are in the leaves' `.grad`, each once."""
        found = {call.number: call for leaf in leaves if leaf.grad is not None for call in self.of(leaf).left}
        return list(found.values())
