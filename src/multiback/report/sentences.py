"""Verdicts as plain sentences; the figures come from the verdict, the words from here."""

from multiback.records import BenchRecord, Verdict, WayFacts
from multiback.report import format as fmt

METRICS = {
    "peak_bytes": "peak memory",
    "held_bytes": "memory held afterwards",
    "saved_bytes": "bytes saved for backward",
    "nodes": "graph nodes",
}


def sentence(verdict: Verdict, record: BenchRecord) -> str:
    """One verdict as one sentence, with its interval where it has one."""
    if verdict.outcome == "not-comparable":
        return f"{verdict.candidate}: {not_the_same(verdict, record)}, so it is not ranked."
    if verdict.metric != "seconds":
        return f"{verdict.candidate} {_exact(verdict)}."
    return f"{verdict.candidate} {_timed(verdict, record)}{_disturbed(verdict)}."


def _timed(verdict: Verdict, record: BenchRecord) -> str:
    ratio, interval = verdict.ratio or 1.0, verdict.interval
    base, margin = verdict.baseline, fmt.percent(verdict.margin)
    if verdict.outcome == "cannot-tell" or interval is None:
        return f"against {base}: cannot tell; {_spread(interval)}{_remedy(verdict)}"
    low, high = interval
    if verdict.outcome == "less":
        return f"is {fmt.times(ratio)} faster than {base} ({_level(record)} CI {_pair(low, high)}){_by_flops(verdict, record)}"
    if verdict.outcome == "more":
        return (
            f"is {fmt.times(1 / ratio)} slower than {base} "
            f"({_level(record)} CI {_pair(1 / high, 1 / low)}){_by_flops(verdict, record)}"
        )
    if verdict.outcome == "small":
        return (
            f"is {fmt.percent(_change(ratio))} {_word(ratio)} than {base} ({_level(record)} CI "
            f"{_small_interval(low, high)}): real but small, it may be under your margin of {margin}"
        )
    return f"shows no difference over {margin} against {base} ({_level(record)} CI: {_spread(interval)})"


def _exact(verdict: Verdict) -> str:
    noun = METRICS[verdict.metric]
    if verdict.outcome == "same":
        return f"takes the {noun} of {verdict.baseline} (within {fmt.percent(verdict.margin)})"
    if not verdict.ratio:
        return f"takes {'no' if verdict.outcome == 'less' else 'some'} {noun}, unlike {verdict.baseline}"
    return f"takes {fmt.times(1 / verdict.ratio)} the {noun} of {verdict.baseline}"


def not_the_same(verdict: Verdict, record: BenchRecord) -> str:
    """Why two ways may not be ranked: how far apart their gradients are, and by which factor."""
    sides = (verdict.candidate, verdict.baseline)
    facts = [fact for fact in record.ways if fact.question == verdict.question and fact.way in sides]
    worst = next((fact for fact in facts if not fact.comparable), None)
    return "not the same gradients" if worst is None else difference(worst, record)


def difference(fact: WayFacts, record: BenchRecord) -> str:
    """How a way's gradients differ from the reference's."""
    if fact.difference_from_reference is None:
        return fact.note or "not the same gradients"
    if fact.factor is not None:
        return f"not the same gradients: {fmt.number(fact.factor)} times the reference's{_by_rows(fact.factor, record)}"
    text = f"not the same gradients (max relative difference {fmt.number(fact.difference_from_reference)})"
    return f"{text}; {fact.note}" if fact.note else text


def _by_rows(factor: float, record: BenchRecord) -> str:
    for value, name in ((record.problem.num_losses, "losses"), (record.problem.num_rows, "rows")):
        if value > 1 and abs(factor * value - 1) < 1e-3:
            return f", which is 1/{value}, one over the number of {name}"
    return ""


def _disturbed(verdict: Verdict) -> str:
    without = verdict.outcome_without_contaminated
    if without is None or without == verdict.outcome or verdict.reason == "control-differs":
        return ""
    return f" (without the calls that were disturbed from outside it reads {without.replace('-', ' ')})"


def _remedy(verdict: Verdict) -> str:
    if verdict.reason == "control-differs":
        return "; the A/A control differs, so no outcome of this run stands"
    if verdict.reason == "no-use":
        return "; more processes would not tell on this machine as it is now"
    if verdict.reason.startswith("processes="):
        needed = int(verdict.reason.removeprefix("processes="))
        return f"; about {needed - verdict.processes} more processes would tell: --processes {needed}"
    return ""


def _by_flops(verdict: Verdict, record: BenchRecord) -> str:
    """What counting floating-point operations would have said, where it says something else."""
    counts = {fact.way: fact.flops for fact in record.ways if fact.question == verdict.question}
    first, second = counts.get(verdict.baseline), counts.get(verdict.candidate)
    if not first or not second:
        return ""
    ratio = first / second if verdict.outcome == "less" else second / first
    return f"; by FLOPs {fmt.times(ratio)}"


def _level(record: BenchRecord) -> str:
    return "97 %" if record.run.settings.stopped_by == "precision" else "95 %"


def _pair(low: float, high: float) -> str:
    return f"{fmt.times(low)[:-1]}-{fmt.times(high)[:-1]}"


def _change(ratio: float) -> float:
    """The candidate's seconds relative to the baseline's, as a difference."""
    return 1 / ratio - 1


def _word(ratio: float) -> str:
    return "faster" if ratio > 1 else "slower"


def _small_interval(low: float, high: float) -> str:
    ends = sorted(abs(_change(value)) for value in (low, high))
    return f"{fmt.percent(ends[0])[:-2]}-{fmt.percent(ends[1])}"


def _spread(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return "one process gives no interval"
    low, high = interval
    ends = [f"{fmt.percent(_change(value))} {_word(value)}" for value in (high, low)]
    return f"between {ends[0]} and {ends[1]}"
