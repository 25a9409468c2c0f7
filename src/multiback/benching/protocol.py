"""What the runner and its measuring processes say to each other: jobs one way, answers the other."""

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal, TypeAlias

import msgspec

from multiback.records import Grads, Growth, ProblemFacts, Samples, WayFacts


@dataclass(frozen=True)
class Act:
    """One way of one question under one `.grad` policy: the unit that is run and timed."""

    question: str
    way: str
    grads: Grads


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a problem comes from, so that any process can build it afresh.

    `pickled` holds the path of a cloudpickle file of a `Problem`, for problems given in Python.
    """

    target: str
    pickled: str | None = None
    batch: int | None = None
    num_losses: int | None = None
    losses: list[str] = msgspec.field(default_factory=list)
    input_shape: list[int] | None = None
    dtype: str | None = None
    device: str = "cpu"
    trust_pickle: bool = False
    seed: int = 0
    search_path: list[str] = msgspec.field(default_factory=list)
    saved_losses: Literal["published", "random"] | None = None


class Examine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Build the problem; compare gradients, count bytes and FLOPs; price each act; time nothing else."""

    source: Source
    threads: int
    acts: list[Act]
    dear_seconds: float


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Build the problem and time every act: warm-up rounds, then `rounds` shuffled rounds per question."""

    source: Source
    threads: int
    acts: list[Act]
    control: Act | None
    rounds: dict[str, int]
    warmup: tuple[int, int]
    process: int
    shapes: dict[str, list[int]] = msgspec.field(default_factory=dict)


class Cold(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """In a fresh process: time the first forward and backward, then a few warm ones."""

    source: Source
    threads: int
    process: int
    shapes: dict[str, list[int]] = msgspec.field(default_factory=dict)


Job: TypeAlias = Examine | Measure | Cold


class Step(msgspec.Struct, frozen=True, tag=True):
    """Progress inside a job."""

    label: str


class Rows(msgspec.Struct, frozen=True, tag=True):
    """Timed calls, sent round by round so that an interrupted run keeps them."""

    samples: Samples


class Examined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that an `Examine` job found; prices are seconds per run of an act, preparation included.

    `source` is the job's, with what had to be decided by a forward filled in.
    """

    problem: ProblemFacts
    source: Source
    ways: list[WayFacts]
    prices: list[tuple[Act, float]]
    build_seconds: float
    growth: Growth | None
    memory_fault: str


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A way that raised while it was timed, and runs no more in this process."""

    act: Act
    reason: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job ended in an error; `kind` names a class of `multiback.errors`."""

    kind: str
    message: str
    details: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The job ended well."""


Answer: TypeAlias = Step | Rows | Examined | Dropped | Failed | Done

_JOB = msgspec.msgpack.Decoder(Job)
_ANSWER = msgspec.msgpack.Decoder(Answer)


def send(connection: Connection, message: Job | Answer) -> None:
    """Send one message."""
    connection.send_bytes(msgspec.msgpack.encode(message))


def receive_job(connection: Connection) -> Job:
    """The next job; EOFError when the runner has gone."""
    return _JOB.decode(connection.recv_bytes())


def receive_answer(connection: Connection) -> Answer:
    """The next answer; EOFError when the process has gone."""
    return _ANSWER.decode(connection.recv_bytes())
