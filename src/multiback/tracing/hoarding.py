"""Names whose graphs grow while nothing goes through them, as of a running total of losses that was never detached."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

from torch.utils.hooks import RemovableHandle

from multiback import graph
from multiback.traces import Evidence
from multiback.tracing import insides
from multiback.tracing.adding import adding_place
from multiback.tracing.hiding import unseen
from multiback.tracing.holders import Holder, holders_from
from multiback.tracing.places import kind_of, maker_of
from multiback.tracing.walking import NO_NUMBER, saved_bytes, walk

_FEWEST_RISES = 4  # before a tensor is judged; twice that for lists, and for what nothing has been through
_SURE_RISES = 32  # of a list or dict; a shorter one may turn out to hold the last few alone
_LEAST_BYTES = 2**20  # that are worth a word
_BYTES_OF_NODE = 1100  # that stay of one whose saved tensors are freed; resident memory, torch 2.13 on CPU
_MOST_NAMES, _MOST_HANDLES = 4096, 1024
_STEPS_BACK, _NODES_BACK = 2000, 300  # on the way back to what a name held at the look before
_STEPS_A_LOOK = 4000  # of all names
_NODES_JUDGED, _NODES_MEASURED = 500, 1000
_ITEMS = 8

UNKNOWN = object()
See = Callable[[Evidence], None]
_Key = tuple[int, str, str, str]


@dataclass(slots=True, eq=False)
class _Hoard:
    """What a name held at the last look: its newest node, and for a list or dict its length.

    Attributes
    ----------
    look : the number of that look.
    rises : looks in succession at which it held what it held before, and more.
    evidence : what there is to say at the end, where nothing speaks against it.
    is_freed : whether that is that a backward has freed what it holds.
    is_used : whether a backward went through what it holds.
    """

    number: int
    length: int
    look: int
    rises: int = 0
    evidence: Evidence | None = None
    is_freed: bool = False
    is_used: bool = False

    def use(self, _gradients: Any) -> None:
        """A prehook of its newest nodes."""
        self.is_used = True


class Hoards:
    """All names of all threads that have been looked at, by thread, file, function and text."""

    def __init__(self) -> None:
        self._hoards: dict[_Key, _Hoard] = {}
        self._told: set[_Key] = set()
        self._used: set[_Key] = set()  # names of which a backward has been through what they held
        self._longest: dict[_Key, int] = {}  # what a list or dict held before it was begun anew
        self._ended: list[tuple[_Key, _Hoard]] = []  # of names that hold something else by now
        self._handles: deque[RemovableHandle] = deque()
        self._looks = self._steps = 0

    def look(self, frame: FrameType | None, thread: int, see: See) -> None:
        """At all names from a frame outwards; tell of those that keep adding graphs which were gone through."""
        self._looks += 1
        self._steps = _STEPS_A_LOOK
        for held in holders_from(frame):
            key = (thread, *held.key)
            if key not in self._told:
                self._look_at(key, held, see)
        if len(self._hoards) >= _MOST_NAMES:
            for key in [key for key, one in self._hoards.items() if one.look < self._looks]:
                self._end(key)

    def _look_at(self, key: _Key, held: Holder, see: See) -> None:
        newest = _newest(held.value)
        if newest is None:
            self._end(key)
            return
        node, length = newest
        number = node._sequence_nr()
        before = self._hoards.get(key)
        if before is not None and number == before.number and length == before.length:
            before.look = self._looks
            return
        old = None if before is None else self._still_held(before, held.value, node)
        if before is None or old is None:
            self._end(key, length)
            if len(self._hoards) < _MOST_NAMES:
                self._hoards[key] = _Hoard(number, length, self._looks)
            return
        before.number, before.length, before.look = number, length, self._looks
        if old is UNKNOWN:
            return
        before.rises += 1
        if before.rises >= _FEWEST_RISES:
            if len(self._handles) == _MOST_HANDLES:
                self._handles.popleft().remove()
            self._handles.append(node.register_prehook(before.use))
            if not before.rises & (before.rises - 1):  # 4, 8, 16 ...
                with unseen():
                    self._judge(key, held, before, node, old, see)

    def _still_held(self, before: _Hoard, value: Any, node: Any) -> Any:
        """The node that was newest at the last look, where the name leads to it still and holds more; else None.

        UNKNOWN where that cannot be told.
        """
        if insides.is_plain_tensor(type(value)):
            if before.length:
                return None
            if self._steps <= 0:
                return UNKNOWN
            found, steps = _way_back(node, before.number)
            self._steps -= steps
            return found
        added = len(value) - before.length
        if not before.length or added <= 0:
            return None
        items = reversed(value) if type(value) is list else reversed(value.values())
        found = _first_maker(next(islice(items, added, None), None))
        return found if found is not None and found._sequence_nr() == before.number else None

    def _end(self, key: _Key, length: int = 0) -> None:
        """The name holds something else; a list or dict that is as long as before holds the last few alone."""
        gone = self._hoards.pop(key, None)
        if gone is None:
            return
        if gone.is_used and len(self._used) < _MOST_NAMES:
            self._used.add(key)
        if gone.length and (key in self._longest or len(self._longest) < _MOST_NAMES):
            self._longest[key] = max(gone.length, length, self._longest.get(key, 0))
        elif not gone.length and gone.evidence is not None and len(self._ended) < _MOST_NAMES:
            self._ended.append((key, gone))

    def _judge(self, key: _Key, held: Holder, hoard: _Hoard, node: Any, old: Any, see: See) -> None:
        """A name holds more and more: of what a backward has freed, or what nothing might ever go through."""
        newest, items = walk([node], most=_NODES_MEASURED), max(hoard.length, 1)
        size = items * (saved_bytes(newest) + _BYTES_OF_NODE * newest.count)
        hoard.is_freed = _is_freed(old)
        is_early = hoard.rises == _FEWEST_RISES and (hoard.length or not hoard.is_freed)
        if size < _LEAST_BYTES or is_early:
            return
        if hoard.evidence is None:
            place, text = adding_place(held)
            kind = "" if insides.is_plain_tensor(type(held.value)) else kind_of(held.value)
            example = {"survivors": [held.text], "kinds": [kind], "line": text}
            hoard.evidence = Evidence(code="growing-graph", place=place, example=example)
        state = "freed" if hoard.is_freed else "unused"
        hoard.evidence.sums["bytes"] = size
        hoard.evidence.example |= {"held": state, "looks": hoard.rises, "length": hoard.length}
        if hoard.is_freed and (not hoard.length or hoard.rises >= _SURE_RISES):
            del self._hoards[key]
            self._told.add(key)
            see(hoard.evidence)

    def close(self, see: See, *, whole: bool) -> None:
        """The end: where the program has come to its own, what nothing has gone through is not going to be."""
        while self._handles:
            self._handles.pop().remove()
        for key, one in [*self._hoards.items(), *self._ended]:
            is_periodic = one.length and one.length <= 2 * self._longest.get(key, 0)
            is_needed = one.is_used or key in self._used or not whole
            if one.evidence is not None and not is_periodic and (one.is_freed or not is_needed):
                see(one.evidence)
        self._hoards.clear()
        self._ended.clear()


def _newest(value: Any) -> tuple[Any, int] | None:
    """The node that made a tensor, or the last item of a list or dict, and its length."""
    if insides.is_plain_tensor(type(value)):
        node = maker_of(value)
        return None if node is None else (node, 0)
    if not len(value):
        return None
    node = _first_maker(value[-1] if type(value) is list else next(reversed(value.values())))
    return None if node is None else (node, len(value))


def _first_maker(item: Any, depth: int = 2) -> Any:
    """The node that made an item, or the first of its own items, or of theirs, that any node has made."""
    kind = type(item)
    if insides.is_plain_tensor(kind):
        return maker_of(item)
    if depth and (kind is list or kind is tuple or kind is dict):
        inner = islice(item.values() if kind is dict else item, _ITEMS)
        makers = (_first_maker(one, depth - 1) for one in inner)
        return next((one for one in makers if one is not None), None)
    return None


def _way_back(node: Any, number: int) -> tuple[Any, int]:
    """The node of that number from which one was made, and the steps that this took.

    None where it was not made from it, UNKNOWN where the way is long. What was added to, at each step, is older than
    what was added: so the oldest are gone through first.
    """
    one, steps = node, 0
    while one is not None and one._sequence_nr() != number and steps < _STEPS_BACK:
        one, steps = min(_children(one, number), key=_number, default=None), steps + 1
    if one is not None:
        return (one if one._sequence_nr() == number else UNKNOWN), steps
    waiting, seen = [node._sequence_nr()], {node._sequence_nr(): node}
    while waiting and len(seen) < _NODES_BACK:
        for child in _children(seen[heapq.heappop(waiting)], number):
            its_number = child._sequence_nr()
            if its_number == number:
                return child, steps + len(seen)
            if its_number not in seen:
                seen[its_number] = child
                heapq.heappush(waiting, its_number)
    return (UNKNOWN if waiting else None), steps + len(seen)


def _children(node: Any, number: int) -> list[Any]:
    """What a node was made from, leaves and what is older than that number left out."""
    found = [child for child, _ in node.next_functions if child is not None]
    return [child for child in found if number <= child._sequence_nr() != NO_NUMBER]


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _is_freed(root: Any) -> bool:
    """Whether a backward from a node has freed what it saved: by the nearest that has saved anything."""
    states = map(graph.freed_state, islice(graph.nearest_first([root]), _NODES_JUDGED))
    return next((state for state in states if state is not None), False)
