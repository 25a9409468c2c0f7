"""Names whose graphs grow while nothing goes through them, as of a running total of losses that was never detached."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor

from multiback.traces import Evidence
from multiback.tracing import postmortem
from multiback.tracing.holders import Holder, adding_place, holders_from
from multiback.tracing.places import kind_of, maker_of
from multiback.tracing.walking import NO_NUMBER, Walked, saved_bytes, walk

_FEWEST_RISES = 4  # of a name before it is judged; twice that where nothing has been through its graphs
_SURE_RISES = 32  # of a list or dict; a shorter one may turn out to hold the last few alone
_LEAST_BYTES = 2**20  # that are worth a word
_BYTES_OF_NODE = 1100  # that stay of one whose saved tensors are freed; resident memory, torch 2.13 on CPU
_MOST_NAMES, _MOST_SUSPECTS = 4096, 64
_STEPS_BACK, _NODES_BACK = 2000, 300  # on the way back to what a name held at the look before
_NODES_JUDGED = 500
_NODES_MEASURED = 1000
_REMEMBERED = 64  # numbers of a name
_PATIENCE = 16  # calls that are walked since they might use what a name holds
_ITEMS = 8

UNKNOWN = object()
See = Callable[[Evidence], None]
_Key = tuple[int, str, str, str]


@dataclass(slots=True, eq=False)
class _Hoard:
    """What a name held at the last look: its newest node, and for a list or dict its length and where that node is.

    Attributes
    ----------
    rises : looks in succession at which it held what it held before, and more.
    numbers : of the newest nodes at those looks.
    evidence : what there is to say if nothing goes through it.
    patience : calls that are still to be walked to find that out.
    is_used : whether a call went through it.
    """

    number: int
    length: int = 0
    place: int | str = 0
    rises: int = 0
    numbers: list[int] = field(default_factory=list)
    evidence: Evidence | None = None
    patience: int = 0
    is_used: bool = False

    @property
    def is_freed(self) -> bool:
        """Whether what is to be said is that a backward has freed what it holds."""
        return self.evidence is not None and self.evidence.example["held"] == "freed"


class Hoards:
    """All names of all threads that have been looked at, by thread, file, function and text."""

    def __init__(self) -> None:
        self._hoards: dict[_Key, _Hoard] = {}
        self._told: set[_Key] = set()
        self._suspects: list[tuple[int, _Hoard]] = []  # by thread; their names may hold something else by now

    def look(self, frame: FrameType | None, thread: int, see: See) -> None:
        """At all names from a frame outwards; tell of those that keep adding graphs which were gone through."""
        for held in holders_from(frame):
            key = (thread, *held.key)
            if key not in self._told:
                self._look_at(key, held, see)

    def _look_at(self, key: _Key, held: Holder, see: See) -> None:
        before = self._hoards.get(key)
        newest = _newest(held.value)
        if newest is None:
            self._let_go(key, 0, see)
            return
        node, length, place = newest
        number = node._sequence_nr()
        if before is not None and number == before.number and length == before.length:
            return
        old = None if before is None else _still_held(before, held.value, node)
        if before is None or old is None:
            self._let_go(key, length, see)
            if len(self._hoards) < _MOST_NAMES:
                self._hoards[key] = _Hoard(number, length, place)
            return
        before.number, before.length, before.place = number, length, place
        if old is UNKNOWN:
            return
        before.rises += 1
        before.numbers = [*before.numbers[1 - _REMEMBERED :], number]
        if before.rises >= _FEWEST_RISES and not before.rises & (before.rises - 1):  # 4, 8, 16 ...
            self._judge(key, held, before, node, old, see)

    def _let_go(self, key: _Key, length: int, see: See) -> None:
        """The name holds something else; what it held may be elsewhere now, unless it was the last few all along."""
        gone = self._hoards.pop(key, None)
        if gone is None or not gone.is_freed:
            return
        self._forget(gone)
        if gone.evidence is not None and length != gone.length:
            self._tell(key, gone.evidence, see)

    def _forget(self, hoard: _Hoard) -> None:
        self._suspects = [one for one in self._suspects if one[1] is not hoard]

    def _tell(self, key: _Key, evidence: Evidence, see: See) -> None:
        """Once for a name."""
        self._told.add(key)
        see(evidence)

    def _judge(self, key: _Key, held: Holder, hoard: _Hoard, node: Any, old: Any, see: See) -> None:
        """A name holds more and more: of what a backward has freed, or what nothing might ever go through."""
        newest, items = walk([node], most=_NODES_MEASURED), max(hoard.length, 1)
        size = items * (saved_bytes(newest) + _BYTES_OF_NODE * newest.count)
        if size < _LEAST_BYTES:
            return
        freed = bool(postmortem.freed(walk([old], most=_NODES_JUDGED)))
        evidence = _evidence(held, hoard, "freed" if freed else "unused", bytes=size)
        if freed and (not hoard.length or hoard.rises >= _SURE_RISES):
            del self._hoards[key]
            self._forget(hoard)
            self._tell(key, evidence, see)
        elif freed or (hoard.rises > _FEWEST_RISES and not hoard.is_used):
            if hoard.evidence is None and len(self._suspects) < _MOST_SUSPECTS:
                self._suspects.append((key[0], hoard))
            hoard.evidence, hoard.patience = evidence, 0 if freed else _PATIENCE

    def awaits(self, thread: int) -> bool:
        """Whether a call must be walked, as it might go through what is suspected."""
        return any(number == thread and one.patience for number, one in self._suspects)

    def used_by(self, walked: Walked, thread: int) -> None:
        """A call goes through a graph."""
        for suspect in list(self._suspects):
            number, one = suspect
            if number == thread and not one.is_freed:
                one.patience = max(0, one.patience - 1)
                if any(one in walked.nodes for one in one.numbers):
                    self._suspects.remove(suspect)
                    one.is_used = True

    def close(self, see: See, *, whole: bool) -> None:
        """The end: where the program has come to its own, what nothing has gone through is not going to be."""
        for _, one in self._suspects:
            if one.evidence is not None and (whole or one.is_freed):
                see(one.evidence)


def _newest(value: Any) -> tuple[Any, int, int | str] | None:
    """The node that made a tensor, or the last item of a list or dict, its length, and where the item is."""
    if issubclass(type(value), Tensor):
        node = maker_of(value)
        return None if node is None else (node, 0, 0)
    if not value:
        return None
    place = len(value) - 1 if type(value) is list else next(reversed(value))
    node = _first_maker(value[place]) if type(place) in (int, str) else None
    return None if node is None else (node, len(value), place)


def _first_maker(item: Any, depth: int = 2) -> Any:
    """The node that made an item, or the first of its own items, or of theirs, that any node has made."""
    if issubclass(type(item), Tensor):
        return maker_of(item)
    if depth and type(item) in (list, tuple, dict):
        inner = list(item.values()) if type(item) is dict else item
        makers = (_first_maker(one, depth - 1) for one in inner[:_ITEMS])
        return next((one for one in makers if one is not None), None)
    return None


def _still_held(before: _Hoard, value: Any, node: Any) -> Any:
    """The node that was newest at the last look, where the name leads to it still and holds more; else None.

    UNKNOWN where that cannot be told.
    """
    if issubclass(type(value), Tensor):
        return _way_back(node, before.number) if not before.length else None
    if not before.length < len(value) or (type(value) is dict and before.place not in value):
        return None
    found = _first_maker(value[before.place])  # type: ignore[index] # a dict's key, or a list's index
    return found if found is not None and found._sequence_nr() == before.number else None


def _way_back(node: Any, number: int) -> Any:
    """The node of that number from which one was made; None where it was not, UNKNOWN where the way is long.

    What was added to, at each step, is older than what was added: so the oldest are gone through first.
    """
    one, steps = node, 0
    while one is not None and one._sequence_nr() != number and steps < _STEPS_BACK:
        one, steps = min(_children(one, number), key=_number, default=None), steps + 1
    if one is not None:
        return one if one._sequence_nr() == number else UNKNOWN
    waiting, seen = [node._sequence_nr()], {node._sequence_nr(): node}
    while waiting and len(seen) < _NODES_BACK:
        for child in _children(seen[heapq.heappop(waiting)], number):
            its_number = child._sequence_nr()
            if its_number == number:
                return child
            if its_number not in seen:
                seen[its_number] = child
                heapq.heappush(waiting, its_number)
    return UNKNOWN if waiting else None


def _children(node: Any, number: int) -> list[Any]:
    """What a node was made from, leaves and what is older than that number left out."""
    found = [child for child, _ in node.next_functions if child is not None]
    return [child for child in found if number <= child._sequence_nr() != NO_NUMBER]


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _evidence(held: Holder, hoard: _Hoard, state: str, **sums: float) -> Evidence:
    place, text = adding_place(held)
    example = {
        "held": state,
        "survivors": [held.text],
        "kinds": ["" if issubclass(type(held.value), Tensor) else kind_of(held.value)],
        "looks": hoard.rises,
        "length": hoard.length,
        "line": text,
    }
    return Evidence(code="growing-graph", place=place, sums=sums, example=example)
