"""Everything about a way but its time: are its gradients right, what memory and work does it take."""

import gc
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from multiback.benching import kinds
from multiback.benching.bound import Bound
from multiback.benching.names import KINDS
from multiback.benching.protocol import Act, Examine, Examined, Source
from multiback.benching.questions import reference_of
from multiback.benching.targets import first_line
from multiback.benching.watching import Seen, watched
from multiback.benching.ways import Calls, Way, way_of
from multiback.errors import ProblemError
from multiback.measure import clock, memory, verdicts
from multiback.measure.agreement import FLOAT64_FLOOR, Compared, gap_between
from multiback.methods import contract
from multiback.records import Growth, GrowthStep, ProblemFacts, WayFacts

_USER_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)


class Examiner:
    """Examines the acts of a job; every question's reference gradient is computed once."""

    def __init__(self, bound: Bound, job: Examine) -> None:
        self._bound = bound
        self._job = job
        self._references: dict[str, list[list[Tensor]]] = {}
        self._double: Bound | None = None
        self._prices: list[tuple[Act, float]] = []
        self._ways: list[WayFacts] = []
        self._growth_steps: list[GrowthStep] = []
        self._carried: list[str] = []

    def run(
        self, problem: ProblemFacts, source: Source, build_seconds: float, report: Callable[[str], None]
    ) -> Examined:
        """Examine every act; `report` is told which one comes next.

        Raises `ProblemError` where the problem has not what a question is about.
        """
        kinds.check(self._bound, {act.question: act for act in self._job.acts}, source.target)
        # all of these set themselves up at first use, which must not fall into a figure
        fault = "" if self._bound.device.startswith("cuda") else memory.self_test()
        with FlopCounterMode(display=False):
            torch.ones(1).add(1)
        contract.agrees_with_autograd()  # its own small traversals are not the problem's
        gc.collect()
        gc.freeze()  # the modules that this imported, so that later collections stay cheap
        for act in self._job.acts:
            report(f"{act.question}: {act.way}")
            if act.question == "growth":
                self._examine_growth(act)
            elif act.question == "cold":
                continue
            else:
                self._examine(act)
        return Examined(
            problem=problem,
            source=source,
            ways=self._ways,
            prices=self._prices,
            build_seconds=build_seconds,
            growth=Growth(steps=self._growth_steps, carried=self._carried) if self._growth_steps else None,
            memory_fault=fault,
        )

    # ---- one way ---------------------------------------------------------------------------

    def _examine(self, act: Act) -> None:
        way = way_of(act.question, act.way)
        try:
            facts, seconds = self._agreement(act, way)
            if seconds > self._job.dear_seconds:  # one slow call must not leave a way out
                seconds = min(seconds, self._price(act, way))
        except _USER_ERRORS as error:
            self._bound.end()
            self._ways.append(_failed(act, error))
            return
        if way.num_calls > 1:
            pass  # a series of calls: what one of them takes in memory says nothing on the others
        elif seconds > self._job.dear_seconds:
            facts = msgspec.structs.replace(facts, note=f"one run takes {seconds:.1f} s: bytes and FLOPs left out")
        else:
            start = time.perf_counter()
            facts, seconds = self._bytes(act, way, facts, seconds)
            # of a kind torch cannot count all: work inside module hooks escapes its counter
            if act.question not in KINDS and time.perf_counter() - start <= 3 * self._job.dear_seconds:
                facts = msgspec.structs.replace(facts, flops=self._flops(act, way))
        self._ways.append(facts)
        self._prices.append((act, seconds))

    def _price(self, act: Act, way: Way) -> float:
        with self._run(way, act) as calls:
            start = time.perf_counter()
            _call_all(calls, way)
            return time.perf_counter() - start

    def _groups(self, question: str) -> list[list[Tensor]]:
        """The different gradients that the ways of a question gave so far, the reference way's first.

        Where the reference way does not run (a model that carries its graph refuses a second
        forward and backward), the first way that does takes its place.
        """
        if question not in self._references:
            self._references[question] = []
            name = reference_of(question)
            try:
                with self._run(way_of(question, name), Act(question, name, "none")) as calls:
                    next(calls)()
                    self._references[question].append([gradient.clone() for gradient in self._bound.gradients()])
            except _USER_ERRORS:
                self._bound.end()
        return self._references[question]

    def _agreement(self, act: Act, way: Way) -> tuple[WayFacts, float]:
        """Compare gradients after every call; count nodes and saved bytes on the way."""
        groups = self._groups(act.question)
        compared = Compared(groups[0] if groups else None, _floor(self._bound))
        state = torch.get_rng_state()
        with clock.without_gc() as freed, self._run(way, act) as calls, watched(self._bound) as seen:
            start = time.perf_counter()
            for index in range(1, way.num_calls + 1):
                next(calls)()
                compared.add(self._bound.gradients(), way.multiple(act.grads, index))
            seconds = time.perf_counter() - start - compared.seconds
            is_random = not torch.equal(torch.get_rng_state(), state)
            found = [gradient.clone() for gradient in self._bound.gradients()] if compared.unclear else []
        if compared.unclear:
            compared = self._in_float64(act, way, compared)
        group = self._group_of(act, way, compared, found)
        facts = WayFacts(
            question=act.question,
            way=act.way,
            grads=act.grads,
            comparable=group == 0,
            group=group,
            difference_from_reference=compared.gap.difference,
            factor=compared.factor,
            saved_bytes=seen.saved_bytes,
            nodes=seen.nodes,
            collected=freed[0],
            note=self._note(act.question, compared, group, seen, is_random=is_random),
        )
        return facts, seconds

    def _in_float64(self, act: Act, way: Way, compared: Compared) -> Compared:
        """The same comparison in float64, where rounding is told from a difference; else what was found.

        A tensor whose true gradient is zero differs from itself by any amount in lower precision.
        """
        try:
            if self._double is None:
                self._double = self._bound.in_float64()
            reference = Act(act.question, reference_of(act.question), "none")
            with self._run(way_of(act.question, reference.way), reference, self._double) as calls:
                next(calls)()
                expected = [gradient.clone() for gradient in self._double.gradients()]
            again = Compared(expected, FLOAT64_FLOOR)
            with self._run(way, act, self._double) as calls:
                for index in range(1, way.num_calls + 1):
                    next(calls)()
                    again.add(self._double.gradients(), way.multiple(act.grads, index))
        except Exception:  # a model that cannot be copied or converted is judged in its own precision
            return compared
        return again

    def _group_of(self, act: Act, way: Way, compared: Compared, found: list[Tensor]) -> int:
        """Which of the gradients seen so far this way gives, a new one included."""
        groups = self._groups(act.question)
        if not compared.finite:
            return verdicts.NO_GROUP
        if groups and compared.gap.agrees:
            return 0
        if not found or (way.num_calls > 1 and groups):
            return verdicts.NO_GROUP
        for number, known in enumerate(groups):
            if number and gap_between(found, known, floor=_floor(self._bound)).agrees:
                return number
        groups.append(found)
        return len(groups) - 1

    def _note(self, question: str, compared: Compared, group: int, seen: Seen, *, is_random: bool) -> str:
        if not compared.finite:
            return "gradients are not finite (NaN or infinite): check data and losses"
        if group == 0 or compared.factor is not None:
            notes = ["values behind saved-tensor hooks (checkpointing) are not counted"] * seen.hooked
            if seen.outside and question not in KINDS:  # those ask for the parameters alone
                notes.append(f"leaves outside model, losses and data are not compared ({seen.outside})")
            return "; ".join(notes)
        if is_random:
            return "every forward draws random numbers anew (dropout?): put the model in eval() to compare"
        if question in KINDS:
            return f"most in {kinds.name_of_part(question, self._bound, compared.gap.worst)}"
        self._bound.begin("none")
        name = self._bound.wrt_names()[compared.gap.worst]
        self._bound.end()
        return f"most in {name}"

    def _bytes(self, act: Act, way: Way, facts: WayFacts, seconds: float) -> tuple[WayFacts, float]:
        """Two memory passes, which must agree to the byte, and for the reference a third by the system."""
        passes: list[memory.Bytes] = []
        note = facts.note
        for _ in range(2):
            with self._run(way, act) as calls:
                start = time.perf_counter()
                passes.append(memory.live_bytes(lambda calls=calls: _call_all(calls, way), self._bound.device))
                elapsed = time.perf_counter() - start
            seconds = min(seconds, elapsed)
            if elapsed > self._job.dear_seconds:
                break  # profiling many small traversals costs a multiple of the call
        if passes[0] != passes[-1]:
            note = (
                f"two memory passes disagree: peak {passes[0].peak} and {passes[-1].peak}, "
                f"held {passes[0].held} and {passes[-1].held} bytes"
            )
        high_water = None
        if act.way == reference_of(act.question) and self._bound.device == "cpu":
            with memory.pinned_allocator(), self._run(way, act) as calls:
                high_water = memory.high_water_bytes(lambda: _call_all(calls, way))
        facts = msgspec.structs.replace(
            facts,
            peak_bytes=passes[-1].peak,
            held_bytes=passes[-1].held,
            high_water_bytes=high_water,
            note=note,
        )
        return facts, seconds

    def _flops(self, act: Act, way: Way) -> int | None:
        """Floating-point operations of one run, forward included; None where torch cannot count them."""
        try:
            with FlopCounterMode(display=False) as counter, self._run(way, act) as calls:
                _call_all(calls, way)
            return counter.get_total_flops()
        except Exception:  # the counter fails on some models, and its figure is optional
            return None

    @contextmanager
    def _run(self, way: Way, act: Act, other: Bound | None = None) -> Generator[Calls, None, None]:
        """One run from the same state as every other, put back afterwards."""
        bound = other or self._bound
        bound.begin(act.grads)
        bound.zero_grads()
        calls = way.calls(bound, act.grads)
        try:
            yield calls
        finally:
            calls.close()
            bound.end()

    # ---- growth ----------------------------------------------------------------------------

    def _examine_growth(self, act: Act) -> None:
        """The graph of every step, and which carried tensors the next step's graph really reaches."""
        way = way_of("growth", act.way)
        anew = act.way != reference_of("growth")  # on one graph every step reaches what the forward made
        seconds, proved, note = 0.0, dict[str, None](), ""
        steps: list[GrowthStep] = []
        with self._run(way, act) as calls:
            try:
                for step in range(1, way.num_calls + 1):
                    before = [(name, tensor.grad_fn) for name, tensor in self._bound.carried()] if anew else []
                    with watched(self._bound, candidates=before) as seen:
                        start = time.perf_counter()
                        next(calls)()
                        seconds += time.perf_counter() - start
                    proved.update(dict.fromkeys(seen.reached))
                    steps.append(
                        GrowthStep(way=act.way, step=step, nodes=seen.nodes or 0, saved_bytes=seen.saved_bytes or 0)
                    )
            except _USER_ERRORS as error:
                note = f"stopped at step {len(steps) + 1}: {first_line(error)}"
        self._carried.extend(name for name in proved if name not in self._carried)
        self._growth_steps.extend(steps)
        facts = WayFacts(question="growth", way=act.way, grads=act.grads, comparable=not note, note=note)
        self._ways.append(facts)
        if not note:
            self._prices.append((act, seconds))


def _floor(bound: Bound) -> float:
    """The floor under which gaps are rounding; known for float64 alone."""
    return FLOAT64_FLOOR if all(parameter.dtype == torch.float64 for parameter in bound.parameters) else 0.0


def _call_all(calls: Calls, way: Way) -> None:
    """Run every call of a way and stop short of its end, so that what it holds is still held."""
    for _ in range(way.num_calls):
        next(calls)()


def _failed(act: Act, error: BaseException) -> WayFacts:
    what = str(error) if isinstance(error, ProblemError) else f"{type(error).__name__}: {first_line(error)}"
    if "second time" in what:
        what = f"{what}. If the model carries state from call to call, --question growth shows it"
    return WayFacts(
        question=act.question,
        way=act.way,
        grads=act.grads,
        comparable=False,
        group=verdicts.NO_GROUP,
        note=f"does not run here: {what}",
    )
