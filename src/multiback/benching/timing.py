"""Times acts inside one process: interleaved shuffled rounds, and the first calls of a fresh process."""

import dataclasses
import random
from collections.abc import Callable

import torch
from torch import Tensor

from multiback.benching.bound import Bound
from multiback.benching.protocol import Act, Cold, Measure
from multiback.benching.questions import COLD_CALLS, COLD_WARMUP_CALLS, THREAD_START
from multiback.benching.targets import first_line
from multiback.benching.ways import way_of
from multiback.measure import clock
from multiback.measure.statistics import levelled
from multiback.measure.verdicts import CONTROL_SUFFIX
from multiback.methods import contract
from multiback.records import Phase, Samples

Emit = Callable[[Samples], None]
Drop = Callable[[Act, str], None]


def measure(bound: Bound, job: Measure, emit: Emit, drop: Drop = lambda _act, _reason: None) -> None:
    """Warm up, then run the rounds of every question; `emit` gets the samples of each round.

    In a round every act of the question runs once, in an order shuffled anew from the run's seed,
    so that drift of the machine falls on all of them alike. Warm-up ends once times and page
    faults of two successive rounds agree, or at the job's limit. A way that raises is told to
    `drop` and left out from then on; the others go on.
    """
    _ = bound.num_losses  # counted by a forward, which must not fall into a timed call
    contract.agrees_with_autograd()  # tried once a process, for the same reason
    shuffle = random.Random(f"{job.source.seed}/{job.process}")
    for question in dict.fromkeys(act.question for act in job.acts if act.question != "cold"):
        acts = [(act, act.way) for act in job.acts if act.question == question]
        if job.control is not None and job.control.question == question:
            acts.append((job.control, job.control.way + CONTROL_SUFFIX))
        rounds = _Rounds(bound, job.process, acts, shuffle, drop)
        _warm_up(rounds, job.warmup, emit)
        for number in range(job.rounds[question]):
            emit(rounds.run("warm", number))


def _warm_up(rounds: "_Rounds", limits: tuple[int, int], emit: Emit) -> None:
    fewest, most = limits
    previous: Samples | None = None
    for number in range(most):
        current = rounds.run("warmup", number)
        emit(current)
        if previous is not None and number + 1 >= fewest and len(previous) == len(current):
            before, after = _in_fixed_order(previous), _in_fixed_order(current)
            if levelled([row[0] for row in before], [row[0] for row in after]) and levelled(
                [row[1] + 100.0 for row in before], [row[1] + 100.0 for row in after]
            ):
                return
        previous = current


def _in_fixed_order(samples: Samples) -> list[tuple[float, float]]:
    """Seconds and faults of a round's calls, in an order that does not depend on the shuffle."""
    rows = sorted(
        zip(samples.way, samples.grads, samples.call_index, samples.seconds, samples.minor_faults, strict=True)
    )
    return [(seconds, float(faults)) for *_, seconds, faults in rows]


class _Rounds:
    """The rounds of one question in one process."""

    def __init__(
        self, bound: Bound, process: int, acts: list[tuple[Act, str]], shuffle: random.Random, drop: Drop
    ) -> None:
        self._bound = bound
        self._process = process
        self._acts = acts
        self._shuffle = shuffle
        self._drop = drop

    def run(self, phase: Phase, number: int) -> Samples:
        """Every act once, in an order of its own."""
        samples = Samples()
        for order, (act, name) in enumerate(self._shuffle.sample(self._acts, len(self._acts))):
            try:
                calls = self._time(act)
            except Exception as error:  # the user's model may raise anything
                self._bound.end()
                self._acts = [item for item in self._acts if item != (act, name)]
                self._drop(act, first_line(error))
                continue
            for index, figures in enumerate(calls, 1):
                _append(samples, act, name, phase, (index, self._process, number, order), figures)
        return samples

    def _time(self, act: Act) -> list[clock.Figures]:
        way = way_of(act.question, act.way)
        with clock.without_gc():
            self._bound.begin(act.grads)
            calls = way.calls(self._bound, act.grads)
            figures = [clock.time_call(next(calls), self._bound.device) for _ in range(way.num_calls)]
            calls.close()
            self._bound.end()
        return figures


def first_calls(bound: Bound, job: Cold, emit: Emit) -> None:
    """Time forward and backward from the process's first call on; call 1 is `cold`, the last few `warm`."""
    samples = Samples()
    for index in range(1, COLD_CALLS + 1):
        phase: Phase = "cold" if index == 1 else "warmup" if index <= 1 + COLD_WARMUP_CALLS else "warm"
        with clock.without_gc():
            bound.begin("none")
            forward, backward = _step(bound)
            bound.end()
        for order, (name, figures) in enumerate((("forward", forward), ("backward", backward))):
            _append(samples, Act("cold", name, "none"), name, phase, (index, job.process, index - 1, order), figures)
    emit(samples)


def _step(bound: Bound) -> tuple[clock.Figures, clock.Figures]:
    """Time one forward with its losses, then its backward."""
    held: list[Tensor] = []
    forward = clock.time_call(lambda: held.append(bound.total(bound.forward())), bound.device)
    return forward, clock.time_call(held[0].backward, bound.device)


def thread_start(process: int, emit: Emit) -> None:
    """Time the process's first parallel operation, which starts the threads, and the same one again."""
    samples = Samples()
    values = torch.ones(1 << 18)
    phases: tuple[Phase, ...] = ("cold", "warmup", "warm")
    for index, phase in enumerate(phases, 1):
        figures = clock.time_call(lambda: values.add_(1))
        _append(samples, Act("cold", THREAD_START, "none"), THREAD_START, phase, (index, process, 0, 0), figures)
    emit(samples)


def _append(
    samples: Samples, act: Act, name: str, phase: Phase, place: tuple[int, int, int, int], figures: clock.Figures
) -> None:
    """Add one call; `place` is (call index, process, round, order)."""
    index, process, number, order = place
    samples.append(
        question=act.question,
        way=name,
        phase=phase,
        grads=act.grads,
        call_index=index,
        process=process,
        round=number,
        order=order,
        **dataclasses.asdict(figures),
    )
