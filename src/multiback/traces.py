"""What a trace holds, and its versioned JSON: sites of backward calls, evidence and findings.

`multiback.trace/1` (first version): one JSON object, written atomically. Seconds are floats, memory is
in whole bytes, counts are integers. Everything is bounded: sites and evidence are kept per place in the
program, and times as sums and histograms, however many calls there were.
"""

from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, Literal, TypeAlias

import msgspec

from multiback.errors import RecordError
from multiback.records import read

TRACE_SCHEMA = "multiback.trace/1"
RUNNING = "still running"  # how a record ends that was kept on the way

Level: TypeAlias = Literal["finding", "likely", "note"]
Kind: TypeAlias = Literal["backward", "grad"]
Code: TypeAlias = Literal[
    "repeated-traversal",
    "needless-retain",
    "zero-rows",
    "growing-graph",
    "freed-graph",
    "changed-in-place",
    "stale-gradient",
    "polluted-step",
    "unreduced-ranks",
    "create-graph-cycle",
    "coupled-rows",
    "uneven-mean",
    "cold-start",
    "page-fault-bound",
]


class Place(msgspec.Struct, frozen=True, order=True):
    """A line of the program."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """Without the folders."""
        return f"{PurePath(self.file).name}:{self.line}"


class IndexTime(msgspec.Struct):
    """Calls that were the n-th backward on their graph, and their seconds in all."""

    calls: int = 0
    seconds: float = 0.0


class Site(msgspec.Struct, kw_only=True):
    """One place from which gradients are asked for, over all its calls.

    Attributes
    ----------
    histogram : calls by the power of two of their microseconds: entry i holds those below 2^i.
    by_index : the first eight call indices on one graph.
    first_seconds : of the first call; where several processes have called, the mean of their first calls.
    accumulating_calls : calls that added to a `.grad` which an earlier call of the site had left.
    nodes, saved_bytes : of the graph at the first and at the last call that was walked, and the most.
    rows : rows of the shared part of a graph that carried something, and all of them.
    """

    place: Place
    kind: Kind
    calls: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    processes: int = 1
    least_seconds: float = float("inf")
    most_seconds: float = 0.0
    histogram: list[int] = msgspec.field(default_factory=lambda: [0] * 40)
    by_index: list[IndexTime] = msgspec.field(default_factory=lambda: [IndexTime() for _ in range(8)])
    first_faults: int = 0
    faults: int = 0
    retaining_calls: int = 0
    creating_calls: int = 0
    accumulating_calls: int = 0
    walked_calls: int = 0
    first_nodes: int = 0
    last_nodes: int = 0
    most_nodes: int = 0
    saved_bytes: int = 0
    rows_used: int = 0
    rows_all: int = 0
    errors: int = 0

    def add(self, seconds: float, faults: int, index: int) -> None:
        """One more call."""
        if not self.calls:
            self.first_seconds, self.first_faults = seconds, faults
        self.calls += 1
        self.seconds += seconds
        self.faults += faults
        self.least_seconds, self.most_seconds = min(self.least_seconds, seconds), max(self.most_seconds, seconds)
        self.histogram[min(int(seconds * 1e6).bit_length(), len(self.histogram) - 1)] += 1
        place = self.by_index[min(index, len(self.by_index)) - 1]
        place.calls += 1
        place.seconds += seconds

    @property
    def later_seconds(self) -> float | None:
        """The mean of the calls after each process's first; None where there was none."""
        later = self.calls - self.processes
        return (self.seconds - self.first_seconds * self.processes) / later if later > 0 else None

    def merge(self, other: "Site") -> None:
        """Add another process's calls from the same place."""
        for name in ("calls", "seconds", "faults", "retaining_calls", "creating_calls", "accumulating_calls"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("walked_calls", "rows_used", "rows_all", "errors"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.least_seconds = min(self.least_seconds, other.least_seconds)
        both = self.processes + other.processes
        weighted = self.first_seconds * self.processes + other.first_seconds * other.processes
        self.first_seconds, self.processes = weighted / both, both
        for name in ("most_seconds", "first_faults", "most_nodes", "saved_bytes"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.histogram = [one + two for one, two in zip(self.histogram, other.histogram, strict=True)]
        for mine, theirs in zip(self.by_index, other.by_index, strict=True):
            mine.calls += theirs.calls
            mine.seconds += theirs.seconds


class Evidence(msgspec.Struct, kw_only=True):
    """What was seen at one place that bears on one code.

    `count` is how often; `sums` are added up over it; `example` is the first one seen.
    """

    code: Code
    place: Place
    count: int = 1
    sums: dict[str, float] = msgspec.field(default_factory=dict)
    example: dict[str, Any] = msgspec.field(default_factory=dict)

    def merge(self, other: "Evidence") -> None:
        """Add what was seen elsewhere, or later."""
        self.count += other.count
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.example.items():
            self.example.setdefault(name, value)


class Finding(msgspec.Struct, kw_only=True):
    """What is wrong, or may be, at one place; what it cost in this run, about; and the edit that mends it."""

    code: Code
    level: Level
    place: Place
    count: int
    said: str
    remedy: str
    seconds: float | None = None
    bytes: int | None = None


FromEvidence: TypeAlias = dict[Code, Callable[[Evidence], Finding | None]]


def finding(evidence: Evidence, said: str, remedy: str, *, level: Level = "finding", **cost: float | None) -> Finding:
    """What is said of a piece of evidence."""
    held = cost.get("bytes")
    return Finding(
        code=evidence.code,
        level=level,
        place=evidence.place,
        count=evidence.count,
        said=said,
        remedy=remedy,
        seconds=cost.get("seconds"),
        bytes=None if held is None else int(held),
    )


class TraceRecord(msgspec.Struct, kw_only=True):
    """One traced program, self-sufficient.

    Attributes
    ----------
    program : its arguments, itself first.
    ended : how: "exit 0", "exit 3", an exception's name, "signal 15", or "stopped recording".
    processes : how many were recorded, children and ranks among them.
    unobserved : what could not be seen, such as a backward inside a compiled function.
    faults : what went wrong inside the recorder; the record lacks what it says.
    checksums : by rank, of gradients after a backward that should have been reduced.
    """

    schema: str
    program: list[str]
    started: str
    seconds: float
    ended: str
    versions: dict[str, str]
    steps: int
    processes: int
    sites: list[Site]
    evidence: list[Evidence]
    findings: list[Finding]
    unobserved: list[str]
    faults: list[str]
    rank: int | None = None
    checksums: dict[str, float] = msgspec.field(default_factory=dict)
    overhead_seconds: float = 0.0


class _Head(msgspec.Struct):
    """What says of which kind a record is."""

    schema: str


def encode(record: TraceRecord) -> bytes:
    """JSON of a record, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes, source: str) -> TraceRecord:
    """The record in `data`; RecordError, naming `source`, where it is none of this version."""
    try:
        schema = msgspec.json.decode(data, type=_Head).schema
        if schema != TRACE_SCHEMA:
            raise RecordError(
                f"{source}: the record's schema must be {TRACE_SCHEMA!r}; got {schema!r}. Trace the program again."
            )
        return msgspec.json.decode(data, type=TraceRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{source}: the record is damaged: {error}. Trace the program again.") from error


def load(path: Path) -> TraceRecord:
    """Read a record; RecordError where it is missing, unreadable or of another version."""
    return decode(read(path), str(path))


def merged(records: list[TraceRecord]) -> TraceRecord:
    """One record of several processes, the first one's program; findings are left for the caller to judge again."""
    first = records[0]
    sites: dict[tuple[Place, str], Site] = {}
    evidence: dict[tuple[str, Place], Evidence] = {}
    for record in records:
        for site in record.sites:
            known = sites.setdefault((site.place, site.kind), site)
            if known is not site:
                known.merge(site)
        for one in record.evidence:
            seen = evidence.setdefault((one.code, one.place), one)
            if seen is not one:
                seen.merge(one)
    _compare_ranks(records, evidence)
    return msgspec.structs.replace(
        first,
        processes=max(1, sum(record.processes for record in records if record.sites or record.steps)),
        steps=max(record.steps for record in records),
        sites=list(sites.values()),
        evidence=list(evidence.values()),
        findings=[],
        unobserved=sorted({text for record in records for text in record.unobserved}),
        faults=[text for record in records for text in record.faults],
    )


def _compare_ranks(records: list[TraceRecord], evidence: dict[tuple[str, Place], Evidence]) -> None:
    """How far apart the gradients of ranks are, where a backward was not reduced."""
    for (code, place), one in evidence.items():
        sums = [record.checksums[str(place)] for record in records if str(place) in record.checksums]
        largest = max(map(abs, sums), default=0.0)
        if code == "unreduced-ranks" and len(sums) > 1 and largest:
            one.example["difference"] = (max(sums) - min(sums)) / largest
