"""One backward call as the recorder holds it, and the graphs that are kept for further calls."""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from multiback.traces import Evidence, Kind, Place
from multiback.tracing.places import Name


@dataclass(eq=False)
class Call:
    """What was known of a call before it ran, and what it cost.

    Attributes
    ----------
    numbers : sequence numbers of its graph's nodes; None where it was not walked, or is no longer needed.
    ended : this thread's clock of operations afterwards.
    names : by node, what the caller's names held.
    thread : a number of its own for each thread, which no later one gets.
    step : optimiser steps before it.
    listening : seconds that the recorder's own hooks took inside it.
    weight : which part of what it ran from the first shared node on was shared, by nodes.
    chosen : whether it gave cotangents of its own, as a root of several elements must.
    stale : leaves that had changed since its graph used them.
    tied : whether it left a `.grad` that has a graph itself.
    followed_grad : identity and version of the followed leaf's `.grad` before a call that is not walked.
    """

    number: int
    kind: Kind
    place: Place
    thread: int
    retain: bool
    create: bool
    names: dict[int, Name] = field(default_factory=dict)
    step: int = 0
    chosen: bool = False
    numbers: Collection[int] | None = None
    least: int = 0
    root: int = -1
    selecting: int = 0
    ended: int = 0
    seconds: float = 0.0
    listening: float = 0.0
    faults: int = 0
    finished_at: float = 0.0
    saved_bytes: int = 0
    reused: bool = False
    story: "Story | None" = None
    fingerprints: dict[int, Any] = field(default_factory=dict)
    entered_at: float | None = None
    weight: float = 1.0
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    norm_rows: tuple[int, int] | None = None
    cleared: bool = False
    stale: list[tuple[Any, str, Place | None]] = field(default_factory=list)
    leaves: frozenset[int] = frozenset()
    tied: bool = False
    followed_grad: tuple[int, int] | None = None


@dataclass(eq=False)
class Story:
    """All calls on one graph that is kept.

    Attributes
    ----------
    repeated_seconds : spent on nodes that an earlier call had been through.
    cleared : whether some `.grad` was taken away or zeroed between calls, so that they were kept apart.
    stepped : whether an optimiser stepped between them.
    shared : what the program calls a tensor that they share.
    leaves : all that were reached, by identity.
    in_common : whether some leaf was reached by several calls.
    rows : by call, rows that carried something where the shared part begins, and all rows there.
    """

    first: Call
    calls: int = 0
    seconds: float = 0.0
    repeated_seconds: float = 0.0
    kinds: set[str] = field(default_factory=set)
    places: set[Place] = field(default_factory=set)
    cleared: bool = False
    chosen: bool = False
    stepped: bool = False
    shared: str = ""
    second_order: bool = False
    selecting: int = 0
    rows: list[tuple[int, int]] = field(default_factory=list)
    norm_rows: tuple[int, int] | None = None
    leaves: set[int] = field(default_factory=set)
    in_common: bool = False

    def add(self, call: Call) -> None:
        """A call that has run."""
        self.calls += 1
        self.seconds += call.seconds
        self.kinds.add(call.kind)
        self.places.add(call.place)
        self.second_order |= call.create
        self.selecting += call.selecting
        if call.entered_at is not None:
            self.repeated_seconds += call.weight * max(0.0, call.finished_at - call.entered_at - call.listening)
        if call.rows and len(self.rows) < 4096:
            self.rows.append(max(call.rows.values(), key=lambda pair: pair[1]))
        self.norm_rows = call.norm_rows or self.norm_rows
        self.cleared |= call.cleared
        self.in_common |= not self.leaves.isdisjoint(call.leaves)
        self.leaves |= call.leaves
        call.leaves = frozenset()
        self.chosen |= call.chosen and call is not self.first

    def close(self, see: Callable[[Evidence], None]) -> None:
        """Tell what all its calls together show."""
        where = max(self.places) if len(self.places) > 1 else self.first.place
        if self.calls < 2 or self.second_order:
            return
        apart = self.cleared or "grad" in self.kinds or not self.in_common
        sparse = [pair for pair in self.rows if pair[0] < pair[1]]
        slices = bool(sparse) and self.selecting > 0 and 2 * len(sparse) >= len(self.rows)
        see(
            Evidence(
                code="repeated-traversal",
                place=where,
                sums={"traversals": self.calls, "seconds": self.seconds, "repeated": self.repeated_seconds},
                example={
                    "apart": apart,
                    "slices": slices,
                    "chosen": self.chosen,
                    "stepped": self.stepped,
                    "shared": self.shared,
                },
            )
        )
        if not slices:
            return
        used, everything = sum(pair[0] for pair in sparse), sum(pair[1] for pair in sparse)
        see(
            Evidence(
                code="zero-rows",
                place=where,
                sums={"used": used, "rows": everything},
                example={"used": sparse[0][0], "rows": sparse[0][1]},
            )
        )
        if self.norm_rows is not None and self.norm_rows[0] > sparse[0][0] and apart:
            example = {"in": sparse[0][0], "out": self.norm_rows[0], "rows": self.norm_rows[1]}
            see(Evidence(code="coupled-rows", place=where, example=example))


class Token:
    """Lives in a kept graph's own dictionary; its end is the graph's, and goes into a list, without any lock."""

    __slots__ = ("_dead", "_number")

    def __init__(self, call: Call, dead: "deque[tuple[int, float]]") -> None:
        self._number, self._dead = call.number, dead

    def __del__(self) -> None:
        self._dead.append((self._number, time.perf_counter()))
