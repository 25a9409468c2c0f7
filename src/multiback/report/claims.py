"""What the published answers claimed, judged by a record; and the one line that says what to do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from multiback.records import BenchRecord, Outcome, Phase, Verdict, WayFacts
from multiback.report import format as fmt

_SLOWER: tuple[Outcome, ...] = ("more", "small")


@dataclass(frozen=True)
class Claim:
    """A claim, whether it held in this run, and why."""

    text: str
    verdict: str
    because: str


def judge(record: BenchRecord) -> list[Claim]:
    """Every published claim on which this record holds evidence."""
    found = [rule(record) for rule in _RULES]
    return [claim for claim in found if claim is not None]


def _later_is_cheaper(record: BenchRecord) -> Claim | None:
    text = '"A second backward is cheaper, since the graph need not be computed again."'
    parts, outcomes = [], []
    for grads, words in (("none", "with .grad reset to None"), ("accumulate", "with .grad accumulating")):
        verdict = _find(record, "successive", "backward, call 1", "backward, call 2", grads)
        if verdict is not None and verdict.ratio:
            outcomes.append(verdict.outcome)
            parts.append(f"{words} call 2 takes {fmt.times(1 / verdict.ratio)} the time of call 1 ({_word(verdict)})")
    if not parts:
        return None
    held = "held" if outcomes and all(outcome == "less" for outcome in outcomes) else "did not hold"
    if all(outcome == "cannot-tell" for outcome in outcomes):
        held = "cannot tell"
    because = (
        "; ".join(parts)
        + ". No backward computes the forward graph again: the first call walks the same nodes as the second. A call "
        "that finds .grad filled must also add to it, and 202 +- 4 against 216 +- 27 us, averages over accumulating "
        "calls, shows neither."
    )
    return Claim(text, held, because)


def _first_is_slow_by_caching(record: BenchRecord) -> Claim | None:
    verdict = _find(record, "cold", "backward, warm", "backward, cold", "none")
    if verdict is None or not verdict.ratio:
        return None
    cold = _median(record, "cold", "backward", "minor_faults", "cold")
    warm = _median(record, "cold", "backward", "minor_faults", "warm")
    start = _median(record, "cold", "thread start", "seconds", "cold")
    start_text = "" if start is None else f" and the first parallel operation takes {fmt.seconds(start)}"
    because = (
        f"the first backward of a process takes {fmt.times(1 / verdict.ratio)} a warm one ({_word(verdict)}), with "
        f"{fmt.count(cold)} page faults against {fmt.count(warm)}{start_text}: fresh pages and thread start-up are what "
        "is seen, no cached computation. The published table without warm-up contradicts the explanation itself: its "
        "worst call is func4's 0.1793 s, in the last function, not the first function's 0.1579 s."
    )
    return Claim('"The first backward is slower because computations are cached."', "cause not seen", because)


def _summing_forwards_is_slower(record: BenchRecord) -> Claim | None:
    verdict = _find(record, "combine", "func1", "func2", None)
    first, second = _way(record, "combine", "func1"), _way(record, "combine", "func2")
    if verdict is None or not verdict.ratio or first is None or second is None:
        return None
    held = {"more": "held", "small": "held", "less": "did not hold", "same": "did not hold"}
    faults = [_median(record, "combine", name, "minor_faults", "warm") for name in ("func1", "func2")]
    because = (
        f"func2 takes {fmt.times(1 / verdict.ratio)} func1's time ({_word(verdict)}), but not because of the sum: its one "
        f"traversal walks two graphs, whose buffers and weight gradients are alive at once (peak {fmt.size(second.peak_bytes)} "
        f"against {fmt.size(first.peak_bytes)}, {fmt.count(faults[1])} page faults against {fmt.count(faults[0])}), where func1 "
        "frees one before it makes the other. Losses summed over one forward are another matter, see combine."
    )
    return Claim(
        '"Summing the losses of two forwards is slower than separate backwards."',
        held.get(verdict.outcome, "cannot tell"),
        because,
    )


def _retained_grows(record: BenchRecord) -> Claim | None:
    fact = _way(record, "successive", "backward")
    last = _find(record, "successive", "backward, call 1", "backward, call 4", "none")
    if record.growth is not None:
        steps = [step.nodes for step in record.growth.steps if step.way == "one graph, retained"]
        if steps:
            because = (
                f"{steps[0]} nodes at the first call and {steps[-1]} at the last of {len(steps)} on one retained graph."
            )
            verdict = "did not hold" if steps[0] == steps[-1] else "held"
            return Claim('"A retained graph grows bigger and slower."', verdict, because)
    if fact is None or last is None or not last.ratio:
        return None
    because = (
        f"within one forward it does not: every call walks the same {fact.nodes} nodes with "
        f"{fmt.size(fact.saved_bytes)} saved, and call 4 takes {fmt.times(1 / last.ratio)} the time of call 1 ({_word(last)}). "
        "Across steps a graph grows only where something carries it over (--question growth shows which)."
    )
    return Claim('"A retained graph grows bigger and slower with every backward."', "did not hold", because)


def _retain_does_not_matter(record: BenchRecord) -> Claim | None:
    verdict = _find(record, "retain", "retain_graph=False", "retain_graph=True", None)
    kept, freed = _way(record, "retain", "retain_graph=True"), _way(record, "retain", "retain_graph=False")
    if verdict is None or not verdict.ratio or kept is None or freed is None:
        return None
    if kept.held_bytes is None or freed.held_bytes is None or kept.peak_bytes is None or freed.peak_bytes is None:
        return None
    because = (
        f"the call takes {fmt.times(1 / verdict.ratio)} the time ({_word(verdict)}); {fmt.size(kept.held_bytes - freed.held_bytes)} "
        f"stay held after it, and the peak rises by {fmt.size(kept.peak_bytes - freed.peak_bytes)}. It matters where "
        "that is large, as with large batches."
    )
    outcome = "held in time" if verdict.outcome in ("same", "small") else "did not hold in time"
    outcome = "cannot tell in time" if verdict.outcome == "cannot-tell" else outcome
    return Claim('"retain_graph does nothing but occupy memory."', outcome, because)


def _loop_sum_is_slower(record: BenchRecord) -> Claim | None:
    verdict = _find(record, "slices", "reduction=sum", "loss summed in the loop", None)
    retained = _find(record, "slices", "retained loop", "reduction=sum", None)
    if verdict is None or not verdict.ratio:
        return None
    held = {"more": "held", "small": "held", "less": "did not hold", "same": "did not hold"}
    because = f"summing in the loop takes {fmt.times(1 / verdict.ratio)} the time of one call on the batch ({_word(verdict)})."
    if retained is not None and retained.ratio:
        because += (
            f" Both are far from the retained loop, which takes {fmt.times(retained.ratio)} the time of one summed "
            "traversal and gives the same numbers"
            + ("." if retained.outcome != "not-comparable" else ", or so it is said: here they differ.")
        )
    return Claim(
        '"A summed loop is slower than one call on the batch."', held.get(verdict.outcome, "cannot tell"), because
    )


def _mean_differs_slightly(record: BenchRecord) -> Claim | None:
    fact = _way(record, "slices", "reduction=mean")
    if fact is None or fact.factor is None:
        return None
    because = (
        f"they differ by the factor {fmt.number(1 / fact.factor)} and by nothing else: the mean's gradients are "
        f"{fmt.number(fact.factor)} times the sum's, with B = {record.problem.num_rows} rows."
    )
    return Claim('"With the loss\'s mean the gradients differ slightly."', "did not hold", because)


_RULES: tuple[Callable[[BenchRecord], Claim | None], ...] = (
    _later_is_cheaper,
    _first_is_slow_by_caching,
    _summing_forwards_is_slower,
    _retained_grows,
    _retain_does_not_matter,
    _loop_sum_is_slower,
    _mean_differs_slightly,
)


# ---- advice ------------------------------------------------------------------------------------

_CODE = {
    "one-forward summed": "run one forward, add the losses up and call backward() once",
    "multiback": "run one forward and call torch.autograd.backward(losses) once",
    "reduction=sum": 'give the whole batch to the loss with reduction="sum" and call backward() once',
    "loss summed in the loop": "add the losses up in the loop and call backward() once after it",
    "one-forward retained": "run one forward and keep its graph with retain_graph=True until the last backward()",
    "func1": "keep a forward and a backward() for each loss",
    "forward per slice": "run a forward and a backward() for each slice",
}


def advice(record: BenchRecord) -> str:
    """What to do, in one line, from the verdicts that stand."""
    for question, baseline in (("combine", "func1"), ("slices", "retained loop")):
        better = [v for v in record.verdicts if _saves(v, question, baseline)]
        if better:
            # the reference's own verdict has the simplest code; others are only preferred where clearly faster
            best = max(better, key=lambda v: (v.interval or (0.0, 0.0))[0])
            plain = [v for v in better if v.candidate in ("one-forward summed", "reduction=sum")]
            if plain and plain[0].interval and best.ratio and plain[0].interval[1] >= best.ratio:
                best = plain[0]
            code = _CODE.get(best.candidate, best.candidate)
            return f"{code}: {fmt.times(best.ratio or 1.0)} faster here than {baseline}, same gradients."
        if any(v.question == question and v.metric == "seconds" for v in record.verdicts):
            return f"nothing measured here is surely faster than {baseline}; see {question} for what could not be told."
    if record.growth is not None:
        return growth_finding(record)
    verdict = _find(record, "retain", "retain_graph=False", "retain_graph=True", None)
    if verdict is not None:
        return (
            "call backward() without retain_graph wherever the graph is not needed again; it costs memory, see retain."
        )
    return "time is decided by the gradient policy: reset .grad to None or write into kept buffers, see the table."


def _saves(verdict: Verdict, question: str, baseline: str) -> bool:
    return (
        (verdict.question, verdict.baseline, verdict.metric) == (question, baseline, "seconds")
        and verdict.outcome == "less"
        and verdict.ratio is not None
    )


def growth_finding(record: BenchRecord) -> str:
    """What the growth question showed, naming a tensor only where a walk of the graph proved it."""
    growth = record.growth
    if growth is None:
        return ""
    steps = [step for step in growth.steps if step.way == "a forward per step"]
    if len(steps) < 2:
        return "A forward per step was not measured, so growth over steps is not known."
    nodes, saved = per_step([step.nodes for step in steps]), per_step([step.saved_bytes for step in steps])
    if nodes <= 0:
        return f"Nothing grows: every step walks {steps[-1].nodes} nodes, and a retained graph within one forward stays as it is."
    size = f"The graph grows by {fmt.number(nodes)} nodes and {fmt.size(round(saved))} a step"
    if not growth.carried:
        return f"{size}; no attribute or buffer of the model carries it, so what does is not named."
    names = ", ".join(growth.carried)
    detached = [step.nodes for step in growth.steps if step.way == "carried tensors detached"]
    cured = "" if not detached or per_step(detached) > 0 else "; with it detached between steps nothing grows"
    return f"{size}: the next step's graph reaches the node that made {names}. Detach it between steps{cured}."


def per_step(values: Sequence[float]) -> float:
    """Mean change from one step to the next; exact for values that do not vary between runs."""
    return (values[-1] - values[0]) / (len(values) - 1) if len(values) > 1 else 0.0


# ---- look-ups ----------------------------------------------------------------------------------


def _find(record: BenchRecord, question: str, baseline: str, candidate: str, grads: str | None) -> Verdict | None:
    for verdict in record.verdicts:
        if (verdict.question, verdict.baseline, verdict.candidate) == (question, baseline, candidate):
            if verdict.metric == "seconds" and grads in (None, verdict.grads):
                return verdict
    return None


def _way(record: BenchRecord, question: str, way: str) -> WayFacts | None:
    return next((fact for fact in record.ways if (fact.question, fact.way) == (question, way)), None)


def _median(record: BenchRecord, question: str, way: str, column: str, phase: Phase) -> float | None:
    table = record.samples
    values = [
        value
        for value, asked, name, when in zip(getattr(table, column), table.question, table.way, table.phase, strict=True)
        if (asked, name, when) == (question, way, phase)
    ]
    return median(values) if values else None


def _word(verdict: Verdict) -> str:
    words = {
        "less": "faster",
        "more": "slower",
        "same": "no difference over the margin",
        "small": "real but small",
        "cannot-tell": "cannot tell",
        "not-comparable": "not the same gradients",
    }
    return words[verdict.outcome]
