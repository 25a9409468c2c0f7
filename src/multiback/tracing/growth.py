"""Graphs that grow from call to call, since something carries the earlier ones over."""

from collections import deque
from typing import NamedTuple

from multiback.traces import Place
from multiback.tracing.calls import Call
from multiback.tracing.walking import Walked

_RISES = 3  # running
_REMEMBERED = 64  # calls of a site


class Grown(NamedTuple):
    """Nodes of the last calls' graphs, how many earlier calls they reach back before, and when the last one ended."""

    sizes: list[int]
    calls: int
    before: int


class _Seen(NamedTuple):
    """A walked call's graph: nodes, those from before the call before, leaves, and how many calls it reaches back."""

    nodes: int
    old: int
    leaves: int
    calls: int

    def has_grown_from(self, last: "_Seen") -> bool:
        """Whether more of what was there is carried on, through the same leaves; layers on layers have new ones."""
        return (
            self.nodes > last.nodes
            and self.calls > last.calls
            and self.old > last.old
            and self.leaves <= max(last.leaves, 1)
        )


class Growth:
    """By place and kind, the walked calls whose graphs rise."""

    def __init__(self) -> None:
        self._rising: dict[tuple[Place, str], list[_Seen]] = {}
        self._ends: dict[tuple[Place, str], deque[int]] = {}

    def suspects(self, call: Call) -> bool:
        """Whether the last graph from there reached back before an earlier call."""
        return bool(self._rising.get((call.place, call.kind)))

    def look(self, call: Call, walked: Walked) -> Grown | None:
        """What has grown, once graphs have risen often enough and reach back further and further."""
        key = (call.place, call.kind)
        ends = self._ends.setdefault(key, deque(maxlen=_REMEMBERED))
        calls = sum(map(call.least.__lt__, ends))
        old = sum(number < ends[-1] for number in walked.nodes) if calls else 0
        now = _Seen(walked.count, old, len(walked.leaves), calls)
        history = self._rising.setdefault(key, [])
        if not history or not now.has_grown_from(history[-1]) or (call.kind == "grad" and call.create):
            history.clear()
        history.append(now)
        del history[:-8]
        grown = Grown([one.nodes for one in history], calls, ends[-1]) if len(history) > _RISES else None
        if not calls:
            del self._rising[key]
        ends.append(call.ended)
        return grown
