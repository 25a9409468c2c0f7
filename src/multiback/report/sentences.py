"""Verdicts as plain sentences; the figures come from the verdict, the words from here."""

from multiback.records import BenchRecord, Verdict, WayFacts
from multiback.report import format as fmt
from multiback.report.lookup import answer_of, facts_of, find_way

METRICS = {
    "peak_bytes": "peak memory",
    "held_bytes": "memory held afterwards",
    "saved_bytes": "bytes saved for backward",
    "nodes": "graph nodes",
}
POLICIES = {"none": ".grad reset to None", "accumulate": ".grad accumulating", "prealloc": ".grad zeroed in place"}
_PERCENT_UP_TO = 1.5
_HOPELESS = 1000.0  # an interval this wide is not worth its figures
OUTCOMES = {
    "less": "faster",
    "more": "slower",
    "same": "no difference over the margin",
    "small": "real, but maybe under the margin",
    "cannot-tell": "cannot tell",
    "not-comparable": "not the same gradients",
}


def sentence(verdict: Verdict, record: BenchRecord) -> str:
    """One verdict as one sentence, with its interval where it has one."""
    if verdict.outcome == "not-comparable":
        return f"{verdict.candidate}: {not_the_same(verdict, record)}, so it is not ranked against {verdict.baseline}."
    if verdict.metric != "seconds":
        return _memory(verdict, record)
    return f"{verdict.candidate} {_timed(verdict, record)}{_disturbed(verdict)}."


def ratio(verdict: Verdict | None) -> str:
    """A verdict's ratio with its interval, for a table; a dash where the two are not ranked."""
    if verdict is None or verdict.outcome == "not-comparable" or verdict.ratio is None:
        return "-"
    spread = "" if verdict.interval is None else f" ({_pair(*verdict.interval)})"
    return f"{fmt.times(verdict.ratio)}{spread}"


def _timed(verdict: Verdict, record: BenchRecord) -> str:
    ratio, interval, base = verdict.ratio or 1.0, verdict.interval, verdict.baseline
    if verdict.outcome == "cannot-tell" or interval is None:
        return f"against {base}: cannot tell, {_spread(interval)}{_adjusted(verdict)}{_remedy(verdict)}"
    (low, high), level = interval, _level(record)
    if verdict.outcome == "less":
        return f"is {fmt.times(ratio)} faster than {base} ({level} CI {_pair(low, high)}){_by_flops(verdict, record)}"
    if verdict.outcome == "more":
        spread = _pair(1 / high, 1 / low)
        return f"is {fmt.times(1 / ratio)} slower than {base} ({level} CI {spread}){_by_flops(verdict, record)}"
    margin = fmt.percent(verdict.margin)
    if verdict.outcome == "small":
        ends = sorted(abs(_change(end)) for end in (low, high))
        size = "real but small, " if abs(_change(ratio)) < 2 * verdict.margin else "real, but "
        under = f"{size}it may be under the margin of {margin}"
        if ends[1] <= verdict.margin:
            under = f"real, but under the margin of {margin}"
        return (
            f"is {fmt.percent(_change(ratio))} {_word(ratio)} than {base} "
            f"({level} CI {fmt.percent(ends[0])}-{fmt.percent(ends[1])}): {under}"
        )
    return f"shows no difference over {margin} against {base} ({level} CI: {_spread(interval)})"


def _memory(verdict: Verdict, record: BenchRecord) -> str:
    """Exact bytes beside one another."""
    noun = METRICS[verdict.metric]
    sides = (verdict.candidate, verdict.baseline)
    candidate, baseline = (
        getattr(find_way(record, verdict.question, side, verdict.grads), verdict.metric, None) for side in sides
    )
    if candidate is None or baseline is None:
        return f"{noun}: {verdict.candidate} against {verdict.baseline} was not counted."
    figures = f"{fmt.size(candidate)} for {verdict.candidate}, {fmt.size(baseline)} for {verdict.baseline}"
    if verdict.outcome == "same":
        more = candidate - baseline
        return f"{noun}: {figures} ({'+' if more >= 0 else ''}{fmt.size(more)})."
    return f"{noun}: {figures} ({fmt.times(candidate / baseline) if baseline else 'none'})."


def not_the_same(verdict: Verdict, record: BenchRecord) -> str:
    """Why two ways may not be ranked: how far apart their gradients are, and by which factor."""
    sides = (verdict.candidate, verdict.baseline)
    known = facts_of(record, verdict.question)
    named = [fact for side in sides for fact in known if fact.way == side or side.startswith(f"{fact.way}, ")]
    worst = next((fact for fact in named if not fact.comparable), None)
    return f"not the same {answer_of(verdict.question)}" if worst is None else difference(worst, record)


def difference(fact: WayFacts, record: BenchRecord) -> str:
    """How a way's gradients differ from the reference's."""
    not_the_same = f"not the same {answer_of(fact.question)}"
    if fact.difference_from_reference is None:
        return fact.note or not_the_same
    if "not finite" in fact.note:
        return fact.note
    if fact.factor is not None:
        return f"{not_the_same}, {fmt.number(fact.factor)} times the others'{share_in_words(fact.factor, record)}"
    text = f"{not_the_same} (max relative difference {fmt.number(fact.difference_from_reference)})"
    return f"{text}; {fact.note}" if fact.note else text


def share_in_words(factor: float, record: BenchRecord) -> str:
    """What a factor of one over the rows or the losses is; empty for any other."""
    for value, name in ((record.problem.num_rows, "rows B"), (record.problem.num_losses, "losses K")):
        if value > 1 and abs(factor * value - 1) < 1e-3:
            return f", that is 1/{value}, one over the number of {name}"
    return ""


def _disturbed(verdict: Verdict) -> str:
    without = verdict.outcome_without_contaminated
    if without is None or without == verdict.outcome or verdict.reason == "control-differs":
        return ""
    return f" (without the calls that were disturbed from outside: {OUTCOMES[without]})"


def _adjusted(verdict: Verdict) -> str:
    """Why an interval that excludes 1 does not settle a pair: it is one of several that were judged."""
    if verdict.interval is None or verdict.reason == "control-differs" or verdict.p_adjusted is None:
        return ""
    low, high = verdict.interval
    if low <= 1 <= high:
        return ""
    return f", which may be chance among the pairs of this question (adjusted p {verdict.p_adjusted:.2f})"


def _remedy(verdict: Verdict) -> str:
    if verdict.reason == "control-differs":
        return "; the A/A control differs, so no outcome of this run stands"
    if verdict.reason == "no-use":
        return "; more processes would not tell on this machine as it is now"
    if verdict.reason.startswith("processes="):
        needed = int(verdict.reason.removeprefix("processes="))
        more = needed - verdict.processes
        plural = "process" if more == 1 else "processes"
        return f"; about {more} more {plural} would tell: --processes {needed}"
    return ""


def _by_flops(verdict: Verdict, record: BenchRecord) -> str:
    """What counting floating-point operations alone would have said."""
    counts = {fact.way: fact.flops for fact in facts_of(record, verdict.question)}
    first, second = counts.get(verdict.baseline), counts.get(verdict.candidate)
    if not first or not second:
        return ""
    return f"; FLOPs alone say {fmt.times(first / second if verdict.outcome == 'less' else second / first)}"


def _level(record: BenchRecord) -> str:
    return "97%" if record.run.settings.stopped_by == "precision" else "95%"


def _pair(low: float, high: float) -> str:
    return f"{fmt.times(low)[:-1]}-{fmt.times(high)[:-1]}"


def _change(ratio: float) -> float:
    """The candidate's seconds relative to the baseline's, as a difference."""
    return 1 / ratio - 1


def _word(ratio: float) -> str:
    return "faster" if ratio > 1 else "slower"


def _spread(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return "one process gives no interval"
    low, high = interval
    if high / max(low, 1e-300) > _HOPELESS:
        return "far too noisy"
    return f"between {_end(high)} and {_end(low)}"


def _end(ratio: float) -> str:
    """One end of an interval: a percentage near 1, a factor further off."""
    if 1 / _PERCENT_UP_TO < ratio < _PERCENT_UP_TO:
        return f"{fmt.percent(_change(ratio))} {_word(ratio)}"
    return f"{fmt.times(max(ratio, 1 / ratio))} {_word(ratio)}"
