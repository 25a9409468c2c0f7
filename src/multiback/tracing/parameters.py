"""What happens to parameters between calls: steps, edits, and gradients that several calls left."""

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr as clock

from multiback.traces import Place
from multiback.tracing.calls import Call
from multiback.tracing.kept import others_compute
from multiback.tracing.walking import NO_NUMBER, Walked, fingerprint, is_zero

_MOST_CONTRIBUTIONS = 64


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
        self._followed: dict[tuple[Place, str], weakref.ref[Tensor]] = {}

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
        if walked.mixed or others_compute():  # numbers are counted by thread, and a graph does not tell its own
            return found
        for key, leaf in walked.leaves.items():
            known, used = self.of(leaf), walked.consumers.get(key, NO_NUMBER)
            if known.stepped is not None and known.stepped[0] == call.thread and used < known.stepped[1]:
                found.append((leaf, "step", known.stepped[2]))
            elif known.seen is not None:
                version, then, thread, place = known.seen
                if leaf._version != version and thread == call.thread and used < then and known.stepped is None:
                    found.append((leaf, "edit", place))
        return found

    def edited(self, walked: Walked, call: Call, kept: Call, *, few: bool) -> list[tuple[Tensor, str, Place | None]]:
        """Leaves whose values have changed since the call that kept this graph, without a new version.

        `few` looks at one of those that it had looked at, each time another.
        """
        known = [k for k in kept.fingerprints if k in walked.leaves and walked.consumers[k] < kept.ended]
        known = [k for k in known if self.of(walked.leaves[k]).stepped is None or kept.step == call.step]
        if few and known:
            known = [known[call.number % len(known)]]
        leaves = [(walked.leaves[key], kept.fingerprints[key]) for key in known]
        return [(leaf, "data", kept.place) for leaf, then in leaves if then != fingerprint(leaf)]

    def before(self, leaves: Iterable[Tensor], call: Call) -> None:
        """Forget what `.grad` held, where it has been taken away or zeroed since.

        The call is `cleared` where an earlier call on its own graph had left that, or something else has
        changed it since: their gradients are kept apart, and are not those of the sum.
        """
        for leaf in leaves:
            known, grad = self.of(leaf), grad_of(leaf)
            if not known.left or (grad is not None and known.grad in (None, grad)):
                continue
            call.cleared |= call.story is not None and any(one.story is call.story for one in known.left)
            if self._is_reset(leaf, known):  # and not only scaled, as clipping does
                known.left.clear()

    @staticmethod
    def _is_reset(leaf: Tensor, known: Known) -> bool:
        grad = leaf.grad
        return grad is None or known.grad is None or known.grad[0] != id(grad) or is_zero(grad)

    def follow(self, leaves: Iterable[Tensor], call: Call) -> None:
        """Choose the leaf by which calls of this place that are not walked are followed: one that they all reach."""
        parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        before = self.followed(call)
        if parameters and not any(leaf is one for one in before for leaf in parameters):
            found = max(parameters, key=lambda leaf: sum(one.place == call.place for one in self.of(leaf).left))
            self._followed[call.place, call.kind] = weakref.ref(found)

    def followed(self, call: Call) -> list[Tensor]:
        """That leaf, if there is one."""
        found = self._followed.get((call.place, call.kind))
        leaf = None if found is None else found()
        return [] if leaf is None else [leaf]

    def accumulates(self, leaves: Iterable[Tensor], place: Place) -> bool:
        """Whether some `.grad` holds what an earlier call from there left."""
        return any(one.place == place for leaf in leaves for one in self.of(leaf).left)

    def after(self, leaves: list[Tensor], call: Call) -> None:
        """The call has run, and left its gradient in theirs."""
        for leaf in leaves:
            known = self.of(leaf)
            known.seen = (leaf._version, call.ended, call.thread, call.place)
            if call.kind == "backward":
                known.left.append(call)
                known.grad = grad_of(leaf)

    def left_in(self, leaves: list[Any]) -> list[Call]:
        """The calls whose gradients are in the leaves' `.grad`, each once; of those that are as a call left them."""
        found: dict[int, Call] = {}
        for leaf in leaves:
            known, grad = self.of(leaf), grad_of(leaf)
            if grad is not None and known.grad == grad:
                found.update({call.number: call for call in known.left})
        return list(found.values())


def grad_of(leaf: Tensor) -> tuple[int, int] | None:
    """Identity and version of `.grad`."""
    grad = leaf.grad
    return None if grad is None else (id(grad), grad._version)
