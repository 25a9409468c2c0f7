"""Graphs that grow from call to call, since something carries the earlier ones over."""

from collections import deque
from typing import NamedTuple

from multiback.traces import Place
from multiback.tracing.calls import Call

_RISES = 3  # running
_REMEMBERED = 64  # calls of a site


class Grown(NamedTuple):
    """Nodes of the last calls' graphs, how many earlier calls they reach back before, and when the last one ended."""

    sizes: list[int]
    calls: int
    before: int


class Growth:
    """By place and kind, walked calls whose graphs rise: nodes, and how many earlier calls they reach back before."""

    def __init__(self) -> None:
        self._rising: dict[tuple[Place, str], list[tuple[int, int]]] = {}
        self._ends: dict[tuple[Place, str], deque[int]] = {}

    def suspects(self, call: Call) -> bool:
        """Whether the last graph from there reached back before an earlier call."""
        return bool(self._rising.get((call.place, call.kind)))

    def look(self, call: Call, nodes: int) -> Grown | None:
        """What has grown, once nodes have risen often enough on graphs that reach back further and further."""
        key = (call.place, call.kind)
        ends = self._ends.setdefault(key, deque(maxlen=_REMEMBERED))
        spans = sum(map(call.least.__lt__, ends))
        history = self._rising.setdefault(key, [])
        rises = bool(history) and nodes > history[-1][0] and spans > history[-1][1]
        if not rises or (call.kind == "grad" and call.create):
            history.clear()
        history.append((nodes, spans))
        del history[:-8]
        grown = Grown([size for size, _ in history], spans, ends[-1]) if len(history) > _RISES else None
        if not spans:
            del self._rising[key]
        ends.append(call.ended)
        return grown
