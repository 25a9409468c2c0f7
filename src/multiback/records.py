"""Frozen results of a run, and their versioned JSON: raw values only, no sentences.

`multiback.bench/1` (first version): one JSON object, written atomically, from which every
verdict can be recomputed. Seconds are floats, memory is in whole bytes, counts are integers.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from multiback.errors import OutputError, RecordError

BENCH_SCHEMA = "multiback.bench/1"

_LONGEST_NAME = 255

Phase: TypeAlias = Literal["cold", "warm", "warmup"]
Grads: TypeAlias = Literal["none", "accumulate", "prealloc"]
Outcome: TypeAlias = Literal["less", "more", "same", "small", "cannot-tell", "not-comparable"]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run took place: versions, processor, threads, allocator, load."""

    versions: dict[str, str]
    platform: str
    cpu: str
    cores: int
    threads: int
    device: str
    allocator: str
    allocator_settings: dict[str, str]
    transparent_huge_pages: str
    load_before: list[float]
    load_after: list[float]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of a run, after defaults were filled in."""

    mode: Literal["quick", "default", "rigorous"]
    questions: list[str]
    ways: list[str] | None
    grads: Grads | None
    processes: int
    rounds: dict[str, int]
    cold_processes: int
    budget: float | None
    margin: float
    threads: int
    seed: int
    precision: float
    stopped_by: Literal["precision", "budget", "plan", "interrupt"]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """When and how the run was started, how long it took, and whether it was cut short."""

    argv: list[str]
    started: str
    seconds: float
    partial: bool
    settings: Settings


class ProblemFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The problem measured: K losses, P parameter elements, B rows of data."""

    target: str
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    losses: str
    num_losses: int = msgspec.field(name="K")
    num_parameters: int = msgspec.field(name="P")
    num_rows: int = msgspec.field(name="B")
    seed: int


class WayFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a way does, measured once and apart from time.

    `difference_from_reference` is the largest difference of any gradient tensor from the
    reference way's, relative to that tensor's norm; `factor` is the number c for which the
    gradients equal c times the reference, where there is one. Ways of one `group` give the same
    gradients; group 0 is the reference's, and only ways of one group are ranked. `peak_bytes` counts live bytes
    above the start, `saved_bytes` what the graph keeps for backward apart from parameters and
    inputs, `held_bytes` what is still live after the last call (fresh gradients included),
    `collected` the objects that only the cyclic garbage collector freed.
    """

    question: str
    way: str
    grads: Grads
    comparable: bool
    group: int = 0
    difference_from_reference: float | None = None
    factor: float | None = None
    peak_bytes: int | None = None
    high_water_bytes: int | None = None
    saved_bytes: int | None = None
    held_bytes: int | None = None
    flops: int | None = None
    nodes: int | None = None
    collected: int | None = None
    note: str = ""


class Samples(msgspec.Struct, kw_only=True):
    """One entry per timed call, as equally long columns; `process`, `round` and `order` count from 0."""

    question: list[str] = msgspec.field(default_factory=list)
    way: list[str] = msgspec.field(default_factory=list)
    phase: list[Phase] = msgspec.field(default_factory=list)
    grads: list[Grads] = msgspec.field(default_factory=list)
    call_index: list[int] = msgspec.field(default_factory=list)
    process: list[int] = msgspec.field(default_factory=list)
    round: list[int] = msgspec.field(default_factory=list)
    order: list[int] = msgspec.field(default_factory=list)
    seconds: list[float] = msgspec.field(default_factory=list)
    cpu_seconds: list[float] = msgspec.field(default_factory=list)
    minor_faults: list[int] = msgspec.field(default_factory=list)
    involuntary_switches: list[int] = msgspec.field(default_factory=list)
    rss_bytes: list[int] = msgspec.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.seconds)

    def append(self, **row: Any) -> None:
        """Add one row; every column must be given."""
        for column in self.__struct_fields__:
            getattr(self, column).append(row[column])

    def extend(self, other: "Samples") -> None:
        """Append another table's rows."""
        for column in self.__struct_fields__:
            getattr(self, column).extend(getattr(other, column))


class GrowthStep(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes and saved bytes of the graph that one step traverses; deterministic, so seen once."""

    way: str
    step: int
    nodes: int
    saved_bytes: int


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """The graph step by step, and the carried tensors that a walk of the next step's graph proved."""

    steps: list[GrowthStep]
    carried: list[str]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison: `ratio` is baseline over candidate, so above 1 means the candidate needs less."""

    question: str
    baseline: str
    candidate: str
    metric: str
    grads: Grads
    ratio: float | None
    interval: tuple[float, float] | None
    margin: float
    p_adjusted: float | None
    outcome: Outcome
    reason: str
    p_wilcoxon: float | None = None
    processes: int = 0
    smallest_effect: float | None = None
    outcome_without_contaminated: Outcome | None = None


class BenchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One `multiback bench` run, self-sufficient."""

    schema: str
    environment: Environment
    run: Run
    problem: ProblemFacts
    ways: list[WayFacts]
    samples: Samples
    verdicts: list[Verdict]
    control: Verdict | None
    growth: Growth | None = None
    memory_fault: str = ""


def encode(record: BenchRecord) -> bytes:
    """JSON of a record, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes, source: str) -> BenchRecord:
    """The record in `data`; RecordError, naming `source`, where it is none of this version."""
    try:
        head: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{source}: a record must be JSON; {error}. Give a file that bench --json wrote.") from error
    schema = head.get("schema") if isinstance(head, dict) else None
    if schema != BENCH_SCHEMA:
        raise RecordError(
            f"{source}: the record's schema must be {BENCH_SCHEMA!r}; got {schema!r}. "
            "Give a file that `multiback bench --json` or `multiback trace --output` of this version wrote."
        )
    try:
        record = msgspec.convert(head, BenchRecord)
    except msgspec.ValidationError as error:
        raise RecordError(f"{source}: the record is damaged: {error}. Run the bench again.") from error
    lengths = {len(getattr(record.samples, column)) for column in Samples.__struct_fields__}
    if len(lengths) != 1:
        raise RecordError(f"{source}: the sample columns must be equally long; got lengths {sorted(lengths)}.")
    return record


def load(path: Path) -> BenchRecord:
    """Read a record; RecordError where it is missing, unreadable or of another version."""
    return decode(read(path), str(path))


def read(path: Path) -> bytes:
    """A record's file as it is; RecordError where it is missing or unreadable."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror}). Give a record that exists.") from error


def check_writable(path: Path, *, force: bool) -> None:
    """Raise OutputError now, before any work, where `path` could not be written at the end."""
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise OutputError(
            f"{path.name[:40]}...: a file's name must be at most {_LONGEST_NAME} bytes. Choose a shorter one."
        )
    if path.is_dir():
        raise OutputError(f"{path}: an output must be a file, and this is a folder. Name a file in it.")
    if path.exists() and not path.is_file():
        raise OutputError(f"{path}: an output must be a regular file, and this is a device or pipe. Use - for a pipe.")
    if path.exists() and not force:
        raise OutputError(f"{path}: exists already and is kept. Add --force to overwrite it, or name another file.")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise OutputError(f"{path}: the folder {folder} does not exist. Create it first, or name another file.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OutputError(
            f"{path}: nothing can be written in {folder} ({error.strerror}). Name a file elsewhere."
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write all of `data` to `path` or nothing: a temporary file beside it, then one rename.

    A symbolic link stays one: the file that it names is written.
    """
    path = path.resolve()
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".multiback-", delete=False) as stream:
            try:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(stream.name, 0o666 & ~umask)
                os.replace(stream.name, path)
            except BaseException:
                os.unlink(stream.name)
                raise
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}). Name a file elsewhere.") from error
