"""Judges a record: every verdict follows from its samples and way facts, and from nothing else."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from multiback.measure import statistics
from multiback.records import BenchRecord, Grads, Growth, Outcome, Phase, Samples, Settings, Verdict, WayFacts

CONTROL_SUFFIX = " (again)"
NO_GROUP = -1  # of a way whose gradients are not finite or not known
GROWTH_METRICS = ("nodes", "saved_bytes")
_SIDE = re.compile(r"^(?P<way>.*?)(?:, (?:call|step) (?P<index>\d+))?(?:, (?P<phase>cold|warm))?$")


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a way, at one call index or any, in one phase."""

    way: str
    call_index: int | None = None
    phase: Phase | None = None

    def label(self, question: str) -> str:
        """As verdicts name it: "func1", "backward, call 2", "backward, cold"."""
        unit = "step" if question == "growth" else "call"
        index = "" if self.call_index is None else f", {unit} {self.call_index}"
        return self.way + index + (f", {self.phase}" if self.phase else "")

    @staticmethod
    def parse(label: str) -> "Side":
        """The side that `label` names."""
        found = _SIDE.match(label)
        if found is None:  # the pattern accepts any text
            raise ValueError(label)
        index, phase = found["index"], found["phase"]
        return Side(
            found["way"], int(index) if index else None, "cold" if phase == "cold" else "warm" if phase else None
        )


@dataclass(frozen=True)
class Pair:
    """What one verdict compares."""

    question: str
    baseline: Side
    candidate: Side
    grads: Grads
    metric: str = "seconds"


@dataclass(frozen=True)
class Evidence:
    """All that verdicts follow from."""

    samples: Samples
    ways: Sequence[WayFacts]
    growth: Growth | None
    margin: float
    confidence: float


def confidence_of(settings: Settings) -> float:
    """The confidence of a run's intervals: wider where the run itself decided when to stop."""
    early = settings.stopped_by == "precision"
    return statistics.EARLY_STOP_CONFIDENCE if early else statistics.FULL_CONFIDENCE


def judge_again(record: BenchRecord) -> BenchRecord:
    """The record with every verdict computed afresh from its samples and way facts."""
    settings = record.run.settings
    evidence = Evidence(record.samples, record.ways, record.growth, settings.margin, confidence_of(settings))
    pairs = [pair_of(verdict) for verdict in record.verdicts]
    control = None if record.control is None else pair_of(record.control)
    judged, judged_control = judge(evidence, pairs, control)
    return msgspec.structs.replace(record, verdicts=judged, control=judged_control)


def pair_of(verdict: Verdict) -> Pair:
    """The pair that a stored verdict compared, so that it can be judged again."""
    return Pair(
        verdict.question, Side.parse(verdict.baseline), Side.parse(verdict.candidate), verdict.grads, verdict.metric
    )


def judge(evidence: Evidence, pairs: Iterable[Pair], control: Pair | None) -> tuple[list[Verdict], Verdict | None]:
    """Judge every pair; where the A/A control reads "different" no outcome on time stands.

    Pairs without samples on both sides (an interrupted run) are left out.
    """
    tables = _Tables(evidence.samples)
    judged_control = None
    if control is not None:
        judged_control = next(iter(_judge_question(evidence, tables, [control])), None)
    by_question: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_question[pair.question].append(pair)
    verdicts = [verdict for group in by_question.values() for verdict in _judge_question(evidence, tables, group)]
    if judged_control is not None and judged_control.outcome in ("less", "more", "small"):
        verdicts = [_void(verdict) for verdict in verdicts]
    return verdicts, judged_control


def half_widths(evidence: Evidence, pairs: Iterable[Pair]) -> dict[Pair, float]:
    """Relative half-width of each pair's interval so far, for stopping on precision and for progress."""
    tables = _Tables(evidence.samples)
    found = {}
    for pair in pairs:
        effects = tables.effects(pair) if pair.metric == "seconds" else None
        if effects is not None and len(effects):
            comparison = statistics.compare(effects, confidence=evidence.confidence)
            found[pair] = float(np.expm1(comparison.half_width))
    return found


def _void(verdict: Verdict) -> Verdict:
    if verdict.metric != "seconds" or verdict.outcome == "not-comparable":
        return verdict
    return msgspec.structs.replace(verdict, outcome="cannot-tell", reason="control-differs")


def _judge_question(evidence: Evidence, tables: "_Tables", pairs: list[Pair]) -> list[Verdict]:
    """The verdicts of one question; p values are adjusted over its timed pairs together."""
    everything = _Judged.on(evidence, {pair: tables.effects(pair) for pair in pairs})
    clean = _Judged.on(evidence, {pair: tables.effects(pair, clean=True) for pair in pairs})
    verdicts = []
    for pair in pairs:
        if pair in everything.comparisons:
            verdicts.append(_timed_verdict(evidence, pair, everything, clean.outcomes.get(pair)))
        elif pair.metric != "seconds" and (values := _exact_values(evidence, pair)) is not None:
            verdicts.append(_exact_verdict(evidence, pair, *values))
    return verdicts


@dataclass(frozen=True)
class _Judged:
    """The effects of one question, their comparisons, adjusted p values and outcomes."""

    effects: dict[Pair, npt.NDArray[np.float64]]
    comparisons: dict[Pair, statistics.Comparison]
    adjusted: dict[Pair, float]
    outcomes: dict[Pair, Outcome]

    @staticmethod
    def on(evidence: Evidence, effects: dict[Pair, npt.NDArray[np.float64] | None]) -> "_Judged":
        known = {pair: values for pair, values in effects.items() if values is not None}
        comparisons = {
            pair: statistics.compare(values, confidence=evidence.confidence) for pair, values in known.items()
        }
        p_values = statistics.adjust([comparison.p_value for comparison in comparisons.values()])
        adjusted = dict(zip(comparisons, p_values, strict=True))
        outcomes = {
            pair: statistics.classify(
                comparison, adjusted[pair], margin=evidence.margin, confidence=evidence.confidence
            )
            for pair, comparison in comparisons.items()
        }
        return _Judged(known, comparisons, adjusted, outcomes)


def _timed_verdict(evidence: Evidence, pair: Pair, judged: _Judged, without: Outcome | None) -> Verdict:
    comparison, outcome, reason = judged.comparisons[pair], judged.outcomes[pair], ""
    if not _comparable(evidence.ways, pair):
        outcome, reason, without = "not-comparable", "gradients-differ", None
    elif outcome == "cannot-tell":
        needed = statistics.processes_to_tell(comparison, margin=evidence.margin)
        reason = "no-use" if needed is None else f"processes={needed}"
    known = comparison.processes > 1
    return _verdict(
        evidence,
        pair,
        ratio=comparison.ratio,
        interval=comparison.interval if known else None,
        p_adjusted=judged.adjusted[pair],
        outcome=outcome,
        reason=reason,
        p_wilcoxon=statistics.wilcoxon_p(judged.effects[pair]),
        processes=comparison.processes,
        smallest_effect=comparison.smallest_effect if known else None,
        outcome_without_contaminated=without,
    )


def _exact_verdict(evidence: Evidence, pair: Pair, baseline: int, candidate: int) -> Verdict:
    """A verdict on bytes or nodes, which are the same in every process and need no statistics."""
    ratio = 1.0 if baseline == candidate else baseline / candidate if candidate else None
    outcome: Outcome
    if not _comparable(evidence.ways, pair):
        outcome = "not-comparable"
    elif max(baseline, candidate) <= (1 + evidence.margin) * min(baseline, candidate):
        outcome = "same"
    else:
        outcome = "less" if candidate < baseline else "more"
    return _verdict(
        evidence,
        pair,
        ratio=ratio,
        interval=None if ratio is None else (ratio, ratio),
        p_adjusted=None,
        outcome=outcome,
        reason="gradients-differ" if outcome == "not-comparable" else "exact",
    )


def _verdict(evidence: Evidence, pair: Pair, **found: Any) -> Verdict:
    """What was found on a pair, with what the pair itself says."""
    return Verdict(
        question=pair.question,
        baseline=pair.baseline.label(pair.question),
        candidate=pair.candidate.label(pair.question),
        metric=pair.metric,
        grads=pair.grads,
        margin=evidence.margin,
        **found,
    )


def _facts(ways: Sequence[WayFacts], question: str, way: str, grads: Grads) -> WayFacts | None:
    name = way.removesuffix(CONTROL_SUFFIX)
    return next((f for f in ways if (f.question, f.way, f.grads) == (question, name, grads)), None)


def _comparable(ways: Sequence[WayFacts], pair: Pair) -> bool:
    """Whether both sides give the same finite gradients; a way always gives its own."""
    if pair.baseline.way == pair.candidate.way.removesuffix(CONTROL_SUFFIX):
        first = _facts(ways, pair.question, pair.baseline.way, pair.grads)
        return first is None or first.comparable or pair.candidate.way.endswith(CONTROL_SUFFIX)
    facts = [_facts(ways, pair.question, side.way, pair.grads) for side in (pair.baseline, pair.candidate)]
    # a fact at odds with itself comes from a record edited by hand
    groups = {fact.group if fact.comparable == (fact.group == 0) else NO_GROUP for fact in facts if fact is not None}
    return len(groups) < 2 and NO_GROUP not in groups


def _exact_values(evidence: Evidence, pair: Pair) -> tuple[int, int] | None:
    if pair.question == "growth" and pair.metric in GROWTH_METRICS and evidence.growth is not None:
        steps: dict[tuple[str, int | None], int] = {
            (step.way, step.step): getattr(step, pair.metric) for step in evidence.growth.steps
        }
        sides = [steps.get((side.way, side.call_index)) for side in (pair.baseline, pair.candidate)]
    else:
        facts = [_facts(evidence.ways, pair.question, side.way, pair.grads) for side in (pair.baseline, pair.candidate)]
        sides = [None if fact is None else getattr(fact, pair.metric) for fact in facts]
    first, second = sides
    return None if first is None or second is None else (first, second)


_Key = tuple[str, str, Grads, int, Phase]


class _Tables:
    """Samples indexed by what was timed, then by process and round."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._rows: dict[_Key, list[int]] = defaultdict(list)
        keys = zip(samples.question, samples.way, samples.grads, samples.call_index, samples.phase, strict=True)
        for row, key in enumerate(keys):
            self._rows[key].append(row)

    def effects(self, pair: Pair, *, clean: bool = False) -> npt.NDArray[np.float64] | None:
        """One log ratio per process, or None where a side has no samples; `clean` drops marked calls."""
        if pair.metric != "seconds":
            return None
        if pair.question == "growth" and pair.baseline.way == pair.candidate.way:
            return None if clean else self._slopes(pair)
        first, second = self._side(pair, pair.baseline, clean), self._side(pair, pair.candidate, clean)
        by_process = pair.question == "cold"
        baseline: list[list[float]] = []
        candidate: list[list[float]] = []
        for process in sorted(first.keys() & second.keys()):
            if by_process:
                baseline.append([float(np.median(list(first[process].values())))])
                candidate.append([float(np.median(list(second[process].values())))])
            elif rounds := sorted(first[process].keys() & second[process].keys()):
                baseline.append([first[process][number] for number in rounds])
                candidate.append([second[process][number] for number in rounds])
        return statistics.process_effects(baseline, candidate) if baseline else None

    def _side(self, pair: Pair, side: Side, clean: bool) -> dict[int, dict[tuple[int, int], float]]:
        """Seconds by process, then by (round, call index where the side fixes none)."""
        found: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
        for key, rows in self._rows.items():
            question, way, grads, index, phase = key
            if (question, way, grads, phase) != (pair.question, side.way, pair.grads, side.phase or "warm"):
                continue
            if side.call_index not in (None, index):
                continue
            dropped = self._contaminated(rows) if clean else frozenset()
            for row in rows:
                if row not in dropped:
                    number = self._samples.round[row], index if side.call_index is None else 0
                    found[self._samples.process[row]][number] = self._samples.seconds[row]
        return found

    def _contaminated(self, rows: list[int]) -> frozenset[int]:
        table = self._samples
        marks = statistics.contaminated(
            [table.seconds[row] for row in rows],
            [table.cpu_seconds[row] for row in rows],
            [table.involuntary_switches[row] for row in rows],
        )
        return frozenset(row for row, mark in zip(rows, marks, strict=True) if mark)

    def _slopes(self, pair: Pair) -> npt.NDArray[np.float64] | None:
        steps: dict[int, list[float]] = defaultdict(list)
        seconds: dict[int, list[float]] = defaultdict(list)
        for (question, way, grads, index, phase), rows in self._rows.items():
            if (question, way, grads, phase) == ("growth", pair.baseline.way, pair.grads, "warm"):
                for row in rows:
                    steps[self._samples.process[row]].append(index)
                    seconds[self._samples.process[row]].append(self._samples.seconds[row])
        processes = [process for process in sorted(steps) if len(set(steps[process])) > 1]
        if not processes:
            return None
        return statistics.slope_effects([steps[p] for p in processes], [seconds[p] for p in processes])
