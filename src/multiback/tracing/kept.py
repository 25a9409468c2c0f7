"""Graphs that outlive a call: which later calls go through them again, and when they are gone."""

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from multiback.traces import Evidence, Place
from multiback.tracing.calls import Call, Story, Token
from multiback.tracing.walking import Walked, fingerprint, saved_bytes

_EDITED = 8  # leaves of a kept graph, looked at for edits without a new version
_SERVING = ("torch.utils.data", "logging", "multiprocessing.queues", "tqdm", "IPython", "ipykernel", "zmq", "tornado")
See = Callable[[Evidence], None]


class Graph:
    """One kept graph.

    Attributes
    ----------
    numbers : of its nodes; for a later call on a graph that is followed already, of those that it adds.
    marked : whether every node bears the token, since other threads may have made nodes of the same numbers.
    """

    def __init__(self, call: Call, numbers: set[int], *, marked: bool) -> None:
        self.call, self.numbers, self.marked = call, numbers, marked
        self.least, self.root = min(numbers, default=0), max(numbers, default=-1)
        self.key = f"multiback {call.number}"

    def shared_with(self, walked: Walked) -> set[int]:
        """The nodes that a call goes through again, as far as numbers tell."""
        if not self.numbers or self.root < walked.least or walked.root < self.least:
            return set()
        both = walked.nodes.keys() & self.numbers
        if self.marked:
            return {number for number in both if self.key in walked.nodes[number].metadata}
        return both


class Kept:
    """All of them, by the number of the call that kept them; an observer's lock is held by whoever calls."""

    def __init__(self) -> None:
        self._graphs: dict[int, Graph] = {}
        self._stories: dict[int, Story] = {}
        self._dead: deque[tuple[int, float]] = deque()
        self._unused: list[Evidence] = []
        self._reusing: set[Place] = set()
        self._sizes: dict[Place, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._graphs)

    def any_of(self, thread: int) -> bool:
        """Whether any was kept by a call of that thread."""
        return any(graph.call.thread == thread for graph in self._graphs.values())

    def calls(self) -> list[Call]:
        """The calls whose graphs are still there."""
        return [graph.call for graph in self._graphs.values()]

    def look(self, call: Call, walked: Walked) -> set[int]:
        """The nodes that this call shares with kept graphs; it joins the story of the calls on them."""
        shared = set[int]()
        for graph in list(self._graphs.values()):
            both = graph.shared_with(walked)
            if not both:
                continue
            self._reuse(graph.call)
            if graph.call.thread != call.thread or walked.mixed:
                continue  # used again, but what it costs cannot be told
            shared |= both
            if graph.call.story is None:
                graph.call.story = self._stories.setdefault(graph.call.number, Story(graph.call))
                graph.call.story.add(graph.call)
            call.story = graph.call.story
        if shared:
            entered = max(shared)
            others = sum(number < entered and number not in shared for number in walked.nodes)
            call.weight = len(shared) / (len(shared) + others)
        return shared

    def unfollowed(self, call: Call, walked: Walked, others: Iterable[Call]) -> None:
        """What this call may share with graphs that were kept and not followed: those made in between its own nodes."""
        for one in others:
            if (
                one.retain
                and one.numbers is None
                and one.thread == call.thread
                and walked.least <= one.root <= walked.root
            ):
                self._reusing.add(one.place)

    def look_only(self, walked: Walked) -> None:
        """A call that is not recorded, such as one inside another, goes through graphs."""
        for graph in list(self._graphs.values()):
            if graph.shared_with(walked):
                self._reuse(graph.call)

    def _reuse(self, call: Call) -> None:
        call.reused = True
        self._reusing.add(call.place)

    def keep(self, call: Call, walked: Walked, shared: set[int], *, measure: bool) -> None:
        """Follow the graph of a call that is about to run, or what it adds to one that is followed."""
        call.saved_bytes = self._bytes(call, walked, measure=measure)
        if call.retain and call.story is None:
            call.fingerprints = _fingerprints(walked, call.number)
        graph = Graph(call, walked.numbers - shared, marked=others_compute())
        token = Token(call, self._dead)
        some = graph.numbers if graph.marked else {graph.root} if shared else {graph.root, graph.least}
        for number in some & walked.nodes.keys():
            walked.nodes[number].metadata[graph.key] = token
        self._graphs[call.number] = graph

    def _bytes(self, call: Call, walked: Walked, *, measure: bool) -> int:
        """What the graph saved; where it is not measured, as the last one of that size from there."""
        if call.story is not None:
            return call.story.first.saved_bytes
        nodes, last = self._sizes.get(call.place, (-1, 0))
        if not measure and nodes == len(walked.nodes):
            return last
        found = saved_bytes(walked)
        self._sizes[call.place] = len(walked.nodes), found
        return found

    def failed(self, call: Call) -> None:
        """The call has raised: what it would have kept shows nothing."""
        call.reused = True

    def bury(self, see: See) -> None:
        """Take leave of graphs that are gone: their calls' story is told, or they were kept for nothing."""
        while self._dead:
            number, when = self._dead.popleft()
            graph = self._graphs.pop(number, None)
            if graph is None:
                continue
            call = graph.call
            if call.story is not None and call.story.first is call:
                self._stories.pop(number, None)
                call.story.close(see)
            if call.retain and not call.create and not call.reused and call.story is None and call.finished_at:
                self._unused.append(_needless(call, when, to_exit=False))
            call.fingerprints.clear()

    def tell_unused(self, see: See) -> None:
        """Graphs that were kept and are gone, unused; the program has gone on, so no error took them along."""
        for evidence in self._unused:
            see(evidence)
        self._unused.clear()

    def close(self, see: See, *, broken: bool, stopped: bool) -> None:
        """The end of the recording: after an error, or where it was stopped under way, graphs might have been used."""
        self.bury(see)
        for story in list(self._stories.values()):
            story.close(see)
        if broken:
            return
        self.tell_unused(see)
        for call in self.calls():
            if call.retain and not (call.create or call.reused or stopped) and call.story is None:
                see(_needless(call, time.perf_counter(), to_exit=True))

    def may_leave_out(self, place: Place) -> bool:
        """Whether no graph that was kept there was ever used again."""
        return place not in self._reusing


def _needless(call: Call, when: float, *, to_exit: bool) -> Evidence:
    return Evidence(
        code="needless-retain",
        place=call.place,
        sums={"bytes": call.saved_bytes, "held_seconds": when - call.finished_at, "to_exit": int(to_exit)},
    )


def _fingerprints(walked: Walked, start: int) -> dict[int, Any]:
    """By identity, of some of a graph's leaves: others on other graphs, since updates change most."""
    some: list[tuple[int, Tensor]] = list(walked.leaves.items())
    first = start * _EDITED % max(len(some), 1)
    return {key: fingerprint(leaf) for key, leaf in [*some, *some][first : first + _EDITED]}


def in_few_bytes(numbers: Iterable[int]) -> "array[int]":
    """Numbers of nodes, 8 bytes each."""
    return array("Q", numbers)


def others_compute() -> bool:
    """Whether other threads are alive that may make nodes, whose numbers are counted by thread."""
    if threading.active_count() == 1:
        return False
    return any(_may_compute(one) for one in threading.enumerate() if one is not threading.current_thread())


def _may_compute(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    module = getattr(target, "__module__", None) or type(thread).__module__
    return thread is threading.main_thread() or not module.startswith(_SERVING)
