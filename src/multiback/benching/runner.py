"""Runs a bench: examines, starts cold processes, measures interleaved rounds, judges; imports no torch."""

import contextlib
import dataclasses
import datetime
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from multiback.benching import questions
from multiback.benching.budgeting import Design, Limits, design
from multiback.benching.names import CARRIED_DETACHED
from multiback.benching.options import Options
from multiback.benching.processes import Log, Process, write_problem
from multiback.benching.protocol import Act, Cold, Dropped, Examine, Examined, Job, Measure, Rows, Source, Step
from multiback.errors import MultibackError, ProblemError
from multiback.measure import environment, statistics, verdicts
from multiback.records import BENCH_SCHEMA, BenchRecord, Run, Samples, Settings, WayFacts

PRECISION = 0.03
_DEAR_SHARE = 0.15  # of the budget: a way whose single run takes longer is not profiled as well
_PATIENCE = 3.0  # the least design may take this many budgets before the dearest ways are left out
_WAITING_COLD = 3  # fresh processes that wait for their job; each holds torch, some 200 MiB
_LAST_SECONDS = 1.5  # kept back for judging and writing

StoppedBy = Literal["precision", "budget", "plan", "interrupt"]


@dataclasses.dataclass(frozen=True)
class Status:
    """Where a run stands: a label, the share done (None while unknown), seconds left, interval so far."""

    label: str
    share: float | None = None
    seconds_left: float | None = None
    half_width: float | None = None


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What a run calls while it goes: `status` often, `save` with a partial record after every process."""

    status: Callable[[Status], None] = lambda _status: None
    save: Callable[[BenchRecord], None] = lambda _record: None


def run(options: Options, hooks: Hooks, *, pickled: bytes | None = None, debug: bool = False) -> BenchRecord:
    """Do the whole run and return its record, marked partial where Ctrl-C cut it short.

    Raises what `multiback.errors` lists for bad options, targets and problems, before anything is
    written, and KeyboardInterrupt where nothing had been measured yet.
    """
    log = Log(show=debug)
    try:
        with tempfile.TemporaryDirectory(prefix="multiback-") as folder:
            if pickled is not None:
                source = msgspec.structs.replace(options.source, pickled=write_problem(pickled, Path(folder)))
                options = dataclasses.replace(options, source=source)
            return _Runner(options, hooks, log).run()
    except MultibackError as error:
        error.details = "\n".join(part for part in (log.tail(), error.details) if part)
        raise
    finally:
        log.close()


class _Runner:
    def __init__(self, options: Options, hooks: Hooks, log: Log) -> None:
        self._options = options
        self._hooks = hooks
        self._log = log
        self._start = time.monotonic()
        self._started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._environment = environment.describe(threads=options.threads, device=options.source.device)
        self._acts = [
            act for question in options.questions for act in questions.acts_of(question, options.ways, options.grads)
        ]
        self._samples = Samples()
        self._source: Source = options.source
        self._examined: Examined | None = None
        self._design: Design | None = None
        self._control: Act | None = None
        self._measuring_since = self._start
        self._raised: dict[Act, str] = {}

    def run(self) -> BenchRecord:
        stopped_by: StoppedBy = "interrupt"
        try:
            with contextlib.ExitStack() as processes:
                server = processes.enter_context(Process("fork", self._log.stream))
                # these import torch while the problem is examined, when nothing is timed, and then wait
                waiting = [
                    processes.enter_context(Process("once", self._log.stream))
                    for _ in range(min(_WAITING_COLD, self._cold_count()))
                ]
                self._examine(server)
                self._start_cold(waiting)
                stopped_by = self._measure(server)
        except KeyboardInterrupt:
            if self._examined is None or not len(self._samples):
                raise
        return self._record(stopped_by)

    # ---- stages ----------------------------------------------------------------------------

    def _examine(self, server: Process) -> None:
        """Build the problem once, compare gradients, count bytes; find prices."""
        self._hooks.status(Status("importing torch"))
        budget = self._options.budget
        job = Examine(
            source=self._source,
            threads=self._options.threads,
            acts=self._acts,
            dear_seconds=float("inf") if budget is None else _DEAR_SHARE * budget,
        )
        for answer in server.run(job):
            if isinstance(answer, Step):
                self._hooks.status(Status(f"gradients and bytes of {answer.label}"))
            elif isinstance(answer, Examined):
                self._examined, self._source = answer, answer.source
        if self._examined is None:
            raise ProblemError("the examination of the problem must give facts; it gave none. Add --debug to see why.")
        self._keep_what_runs(self._examined)

    def _keep_what_runs(self, examined: Examined) -> None:
        """Time only what ran in the examination, and no detached twin where nothing is carried."""
        priced = {act for act, _ in examined.prices}
        carried = examined.growth.carried if examined.growth else []
        self._acts = [
            act
            for act in self._acts
            if act.question == "cold" or (act in priced and (act.way != CARRIED_DETACHED or carried))
        ]
        if not self._acts:
            notes = "; ".join(f"{fact.way}: {fact.note}" for fact in examined.ways) or "no way was asked for"
            raise ProblemError(f"{self._source.target}: at least one way must run; {notes}.")

    def _cold_count(self) -> int:
        asked = any(act.question == "cold" for act in self._acts)
        return self._options.defaults.cold_processes if asked else 0

    def _start_cold(self, waiting: list[Process]) -> None:
        """Time the first calls of fresh processes, those that wait already and then new ones."""
        count = self._cold_count()
        for number in range(count):
            self._hooks.status(Status(f"cold start {number + 1} of {count}"))
            job = Cold(source=self._source, threads=self._options.threads, process=number, shapes=self._shapes())
            if number < len(waiting):
                self._collect(waiting[number], job)
                continue
            with Process("once", self._log.stream) as process:
                self._collect(process, job)

    def _measure(self, server: Process) -> StoppedBy:
        examined = self._examined
        if examined is None:
            raise AssertionError("the problem is examined before it is measured")
        prices = dict(examined.prices)
        timed = {act: prices[act] for act in self._acts if act in prices}
        if not timed:
            return "plan"
        self._control = questions.control_of(list(timed))
        limits = self._limits(examined)
        self._design = plan = design(timed, self._control, limits)
        self._acts = [act for act in self._acts if act.question == "cold" or act in plan.acts]
        if self._control not in plan.acts:
            self._control = questions.control_of(plan.acts)
        for number in range(plan.processes):
            self._tell(number, plan)
            self._collect(server, self._measure_job(number, plan))
            done = number + 1
            self._hooks.save(self._record("interrupt"))
            if (reason := self._stop(done, plan)) is not None:
                return reason
        return "plan"

    def _limits(self, examined: Examined) -> Limits:
        options, defaults = self._options, self._options.defaults
        spent = time.monotonic() - self._start
        return Limits(
            available=None if options.budget is None else max(1.0, options.budget - spent - _LAST_SECONDS),
            patience=float("inf") if options.budget is None else _PATIENCE * options.budget,
            build_seconds=examined.build_seconds,
            warmup_rounds=sum(defaults.warmup) // 2,
            max_processes=defaults.max_processes,
            max_rounds=defaults.max_rounds,
            processes=options.processes,
            rounds=options.rounds,
        )

    def _measure_job(self, number: int, plan: Design) -> Measure:
        return Measure(
            source=self._source,
            threads=self._options.threads,
            acts=self._acts,
            control=self._control,
            rounds=plan.rounds,
            warmup=self._options.defaults.warmup,
            process=number,
            shapes=self._shapes(),
        )

    def _stop(self, done: int, plan: Design) -> StoppedBy | None:
        """Stop on precision or on budget, never on significance; a number of processes asked for is kept."""
        options = self._options
        if options.processes is not None or done < statistics.MIN_PROCESSES or done == plan.processes:
            return None
        if options.mode != "rigorous" and 0 <= self._widest() <= PRECISION:
            return "precision"
        if options.budget is not None:
            elapsed = time.monotonic() - self._start
            each = plan.seconds / plan.processes
            if elapsed + each + _LAST_SECONDS > options.budget:
                return "budget"
        return None

    # ---- bookkeeping -----------------------------------------------------------------------

    def _collect(self, process: Process, job: Job) -> None:
        for answer in process.run(job):
            if isinstance(answer, Rows):
                self._samples.extend(answer.samples)
            elif isinstance(answer, Dropped):
                self._raised[answer.act] = answer.reason

    def _tell(self, number: int, plan: Design) -> None:
        share = number / plan.processes
        now = time.monotonic()
        if not number:
            self._measuring_since = now
        each = (now - self._measuring_since) / number if number else plan.seconds / plan.processes
        left = each * (plan.processes - number)
        widest = self._widest()
        self._hooks.status(
            Status(f"process {number + 1} of {plan.processes}", share, left, widest if widest >= 0 else None)
        )

    def _widest(self) -> float:
        """The widest relative half-width of the ranked pairs so far; -1 before there is one."""
        evidence = self._evidence(statistics.EARLY_STOP_CONFIDENCE)
        pairs = [pair for pair in self._pairs() if pair.metric == "seconds" and pair.question != "cold"]
        found = verdicts.half_widths(evidence, pairs)
        return max(found.values(), default=-1.0)

    def _shapes(self) -> dict[str, list[int]]:
        return self._examined.problem.shapes if self._examined is not None else {}

    def _pairs(self) -> list[verdicts.Pair]:
        return [pair for question in self._options.questions for pair in questions.pairs_of(question, self._acts)]

    def _evidence(self, confidence: float) -> verdicts.Evidence:
        examined = self._examined
        if examined is None:
            raise AssertionError("verdicts need an examined problem")
        return verdicts.Evidence(self._samples, examined.ways, examined.growth, self._options.margin, confidence)

    def _record(self, stopped_by: StoppedBy) -> BenchRecord:
        """The record as it stands now."""
        examined, options = self._examined, self._options
        if examined is None:
            raise AssertionError("a record needs an examined problem")
        settings = self._settings(stopped_by)
        control = questions.control_pair(self._control) if self._control else None
        judged, judged_control = verdicts.judge(
            self._evidence(verdicts.confidence_of(settings)), self._pairs(), control
        )
        return BenchRecord(
            schema=BENCH_SCHEMA,
            environment=msgspec.structs.replace(self._environment, load_after=environment.load()),
            run=Run(
                argv=options.argv,
                started=self._started,
                seconds=time.monotonic() - self._start,
                partial=stopped_by == "interrupt",
                settings=settings,
            ),
            problem=examined.problem,
            ways=self._with_notes(examined),
            samples=self._samples,
            verdicts=judged,
            control=judged_control,
            growth=examined.growth,
            memory_fault=examined.memory_fault,
        )

    def _settings(self, stopped_by: StoppedBy) -> Settings:
        options, samples = self._options, self._samples
        timed = {p for p, q in zip(samples.process, samples.question, strict=True) if q != "cold"}
        return Settings(
            mode=options.mode,
            questions=options.questions,
            ways=options.ways,
            grads=options.grads,
            processes=len(timed),
            rounds=self._design.rounds if self._design else {},
            cold_processes=self._cold_count(),
            budget=options.budget,
            margin=options.margin,
            threads=options.threads,
            seed=options.source.seed,
            precision=PRECISION,
            stopped_by=stopped_by,
        )

    def _with_notes(self, examined: Examined) -> list[WayFacts]:
        """The facts on ways, with a word on those that were too dear to time."""
        prices = dict(examined.prices)
        notes = {
            act: f"not timed: one run takes {prices[act]:.1f} s, too long for the budget"
            for act in (self._design.dropped if self._design else [])
        }
        notes |= {act: f"raised while it was timed: {reason}" for act, reason in self._raised.items()}
        return [
            msgspec.structs.replace(fact, note=notes.get(Act(fact.question, fact.way, fact.grads), fact.note))
            for fact in examined.ways
        ]
