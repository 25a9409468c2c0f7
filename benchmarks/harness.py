"""Interleaved comparisons for the scripts beside it: processes of shuffled rounds, ratios with intervals.

The design is that of `multiback bench` (docs/measuring.md): processes are forked from one that has
imported torch and run nothing; every round runs every way once in shuffled order; a process gives one
number per pair, the median log-ratio of its rounds; intervals are t-intervals across processes.
Where an experiment has a reference, a process of its own first holds every way's answer against it: a
way that fails or differs is named and left out, and a claim about it is missed.
"""

import argparse
import gc
import math
import os
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np
import torch

from answers import difference, message_of
from multiback.measure import clock, statistics
from multiback.measure.environment import describe

Prepare = Callable[[], Callable[[], object]]
Calls = dict[str, Prepare]
Times = dict[str, list[float]]
T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """`slow` must take at least `target` times the time of `fast`; with `most`, at most that.

    Of several slow ways the one with the smallest median counts. A claim with a `group` enters the mean
    of that name; one without a target does nothing else.
    """

    slow: str | tuple[str, ...]
    fast: str
    target: float | None = None
    most: bool = False
    group: str = ""

    @property
    def rivals(self) -> tuple[str, ...]:
        """The slow ways, of which the best counts."""
        return (self.slow,) if isinstance(self.slow, str) else self.slow

    @property
    def subject(self) -> str:
        """The way that the claim is about; the others are what it is held against."""
        return self.rivals[0] if self.most else self.fast


@dataclass(frozen=True)
class Mean:
    """The geometric mean over the claims of a group must be at least `target`."""

    group: str
    target: float


@dataclass(frozen=True)
class Experiment:
    """`build` makes, in a fresh process, a preparation for each way; preparing gives the call to time.

    `reference` names the way whose answer every other one's must equal; without it nothing is compared.
    Only ways that a claim names are timed. `smoke` says whether a smoke run has it too.
    """

    name: str
    build: Callable[[], Calls]
    claims: list[Claim]
    reference: str | None = None
    smoke: bool = True

    @property
    def subjects(self) -> set[str]:
        """The ways that a claim is about."""
        return {claim.subject for claim in self.claims}


@dataclass(frozen=True)
class Design:
    """How much to run."""

    processes: int
    rounds: int
    smoke: bool
    only: str

    @property
    def warm_up(self) -> int:
        """How many rounds are run first and not counted."""
        return 0 if self.smoke else 2


@dataclass
class Table:
    """The Markdown table of a run: prints each row as it comes, and remembers what was missed."""

    measure: str = "ratio"
    missed: bool = False
    broken: bool = False

    def __post_init__(self) -> None:
        print(
            f"| work | {self.measure} | target | 95% interval | verdict |\n| --- | --- | --- | --- | --- |", flush=True
        )

    def add(self, work: str, value: float, interval: tuple[float, float], target: float, *, most: bool = False) -> None:
        """A row; the verdict is sure only where the whole interval is on one side of the target."""
        low, high = interval
        met, missed = (high <= target, low > target) if most else (low >= target, high < target)
        verdict = "met" if met else "missed" if missed else "cannot tell"
        self.missed |= missed
        wanted = f"{'<=' if most else '>='} {target:.4g}"
        print(f"| {work} | {value:.3g} | {wanted} | {low:.3g}-{high:.3g} | {verdict} |", flush=True)

    def fail(self, work: str, reason: str) -> None:
        """A row about a way that gave no right answer."""
        self.missed = self.broken = True
        print(f"| {work} | none | any | {reason.replace('|', '/')} | missed |", flush=True)

    def status(self, *, smoke: bool) -> int:
        """The exit status: 1 where a target is surely missed; in a smoke run only where a way is broken."""
        return int(self.broken if smoke else self.missed)


@dataclass
class Run:
    """What a run has found so far: its table, effects of processes by group, and lines for below the table."""

    table: Table = field(default_factory=Table)
    groups: dict[str, list[np.ndarray]] = field(default_factory=dict)
    failed_groups: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def judge(self, experiment: Experiment, claim: Claim, times: list[Times], faults: dict[str, str]) -> None:
        """Add what `times`, one entry per process, say about a claim."""
        if claim.subject in faults:
            self.failed_groups.add(claim.group)
            return
        rivals = [name for name in claim.rivals if name not in faults]
        if not rivals or claim.fast in faults:
            self.notes.append(f"{experiment.name}: nothing is left to compare {claim.subject} with.")
            return
        slow = min(rivals, key=lambda name: overall(times, name))
        effects = statistics.process_effects([t[slow] for t in times], [t[claim.fast] for t in times])
        if claim.group:
            self.groups.setdefault(claim.group, []).append(effects)
        found = statistics.compare(effects)
        best = f" (best of {len(rivals)})" if len(claim.rivals) > 1 else ""
        if claim.target is not None:
            work = f"{experiment.name}: {slow}{best} / {claim.fast}"
            self.table.add(work, found.ratio, found.interval, claim.target, most=claim.most)
        else:
            low, high = found.interval
            self.notes.append(
                f"{experiment.name}: {slow}{best} / {claim.fast} is {found.ratio:.3g} ({low:.3g}-{high:.3g})."
            )

    def average(self, mean: Mean) -> None:
        """Add the geometric mean of a group, with the interval of the processes' own means."""
        if mean.group in self.failed_groups:
            self.table.fail(f"geometric mean, {mean.group}", "a way of it gave no right answer")
        elif mean.group not in self.groups:
            self.notes.append(f"geometric mean, {mean.group}: nothing is left to compare.")
        else:
            cells = self.groups[mean.group]
            found = statistics.compare(np.mean(cells, axis=0))
            self.table.add(f"geometric mean of {len(cells)}, {mean.group}", found.ratio, found.interval, mean.target)


def options(description: str, *, processes: int = 10, rounds: int | None = 30) -> Design:
    """What the command line asks for, and the heading of the run; without rounds a process makes one call."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--processes", type=int, default=processes)
    parser.add_argument("--rounds", type=int, default=rounds, help="of each process, where it has any")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the work whose name holds this text")
    parser.add_argument("--smoke", action="store_true", help="two processes of two rounds: does it run at all?")
    given = parser.parse_args()
    design = Design(given.processes, 1 if rounds is None else given.rounds, given.smoke, given.only)
    if given.smoke:
        design = replace(design, processes=2, rounds=min(2, design.rounds))
        torch.set_num_threads(1)  # threads that wait for one another take long on a busy machine
    environment = describe(threads=os.cpu_count() or 1, device="cpu")
    print(f"{description.strip()}\n\n{environment.cpu}, {environment.cores} cores, torch {torch.__version__},")
    shape = f"{design.processes} processes of {design.rounds} round{'s' if design.rounds > 1 else ''}"
    print(f"{shape}, load {environment.load_before[0]} before.\n", flush=True)
    return design


def main(description: str, experiments: Sequence[Experiment], means: Sequence[Mean] = ()) -> int:
    """Run the experiments and print a Markdown table; 1 where a target is surely missed."""
    design = options(description)
    run = Run()
    for experiment in experiments:
        if design.only in experiment.name and (experiment.smoke or not design.smoke):
            _conduct(run, experiment, design)
    for mean in means:
        run.average(mean)
    print("\n" + "\n".join(f"- {note}" for note in run.notes))
    return run.table.status(smoke=design.smoke)


def _conduct(run: Run, experiment: Experiment, design: Design) -> None:
    """Check the answers, take the times, judge the claims."""
    faults = in_child(partial(_faults, experiment), experiment.name)
    for name, fault in faults.items():
        if name in experiment.subjects:
            run.table.fail(f"{experiment.name}: {name}", fault)
        else:
            run.notes.append(f"{experiment.name}: {name} is left out: {fault}")
    wanted = {name for claim in experiment.claims for name in (*claim.rivals, claim.fast)} - set(faults)
    times = [
        in_child(partial(_measure, experiment, wanted, design, seed), experiment.name)
        for seed in range(design.processes)
    ]
    medians = (f"{name} {overall(times, name) * 1e3:.4g} ms" for name in sorted(wanted))
    run.notes.append(f"{experiment.name}: {', '.join(medians)}.")
    for claim in experiment.claims:
        run.judge(experiment, claim, times, faults)


def overall(times: list[Times], name: str) -> float:
    """The median over processes of a way's median over rounds, in seconds."""
    return median(median(process[name]) for process in times)


def lazily(setup: Callable[[], Prepare]) -> Prepare:
    """A preparation whose own setting up waits until it is first asked for."""
    made: list[Prepare] = []

    def prepare() -> Callable[[], object]:
        if not made:
            made.append(setup())
        return made[0]()

    return prepare


def in_child(work: Callable[[], T], name: str) -> T:
    """What `work` gives in a forked process; the run ends where that process fails."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            data = pickle.dumps(work())
            with os.fdopen(writing, "wb") as stream:
                stream.write(data)
            status = 0
        except Exception as error:
            print(f"{name}: {message_of(error)}", flush=True)
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"{name}: a measuring process failed.")
    return pickle.loads(data)


def _faults(experiment: Experiment) -> dict[str, str]:
    """What is wrong with each way whose answer is not the reference's."""
    if experiment.reference is None:
        return {}
    torch.manual_seed(0)
    calls = experiment.build()
    expected = calls[experiment.reference]()()
    found: dict[str, str] = {}
    for name, prepare in calls.items():
        if name != experiment.reference:
            try:
                fault = difference(prepare()(), expected)
            except Exception as error:
                fault = message_of(error)
            if fault:
                found[name] = fault
    return found


def _measure(experiment: Experiment, wanted: set[str], design: Design, seed: int) -> Times:
    """Seconds by way and round."""
    torch.manual_seed(0)
    shuffle = random.Random(seed)
    calls = experiment.build()
    names = [name for name in calls if name in wanted]
    times: Times = {name: [] for name in names}
    gc.freeze()  # what is there already need not be looked through before and after every call
    for number in range(design.rounds + design.warm_up):
        for name in shuffle.sample(names, len(names)):
            call = calls[name]()
            answers: list[object] = []  # so that no way's answer is freed while its time is taken
            with clock.without_gc():
                seconds = clock.time_call(lambda call=call, answers=answers: answers.append(call())).seconds
            if number >= design.warm_up:
                times[name].append(seconds)
    if not all(math.isfinite(value) for values in times.values() for value in values):
        raise AssertionError("a clock gave no number")
    return times
