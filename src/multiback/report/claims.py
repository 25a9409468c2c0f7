"""What the published answers claimed, judged by a record; and the one line that says what to do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from multiback.records import BenchRecord, Verdict
from multiback.report import conduct
from multiback.report import format as fmt
from multiback.report.lookup import KINDS, answer_of, find_verdict, find_way, median_of, verdicts_of
from multiback.report.sentences import OUTCOMES, POLICIES, share_in_words


@dataclass(frozen=True)
class Claim:
    """A claim, whether it held in this run, and why."""

    text: str
    verdict: str
    because: str

    def __str__(self) -> str:
        return f"{self.text} {self.verdict.capitalize()}: {self.because}"


def judge(record: BenchRecord) -> list[Claim]:
    """Every published claim on which this record holds evidence."""
    found = [rule(record) for rule in _RULES]
    return [claim for claim in found if claim is not None]


def _verdict(
    record: BenchRecord, question: str, baseline: str, candidate: str, grads: str | None = None
) -> Verdict | None:
    """The verdict on a pair, where the two may be compared at all."""
    found = find_verdict(record, question, baseline, candidate, grads)
    return found if found is not None and found.ratio and found.outcome != "not-comparable" else None


def _later_is_cheaper(record: BenchRecord) -> Claim | None:
    parts: list[str] = []
    found: list[Verdict] = []
    for grads in ("none", "accumulate"):
        verdict = _verdict(record, "successive", "backward, call 1", "backward, call 2", grads)
        if verdict is not None:
            found.append(verdict)
            parts.append(f"with {POLICIES[grads]} call 2 takes {_share_of_time(verdict)} of call 1")
    if not parts:
        return None
    held = "cannot tell"
    if any(_is_slower(verdict) or verdict.outcome == "same" for verdict in found):
        held = "did not hold"
    elif all(_is_faster(verdict) for verdict in found):
        held = "held"
    because = (
        "; ".join(parts) + ". No backward computes the forward again: the first call walks the same nodes as the "
        "second. A call that finds .grad filled must also add to it. 202 +- 4 against 216 +- 27 us, averages over "
        "accumulating calls, shows neither."
    )
    return Claim('"A second backward is cheaper, since the graph need not be computed again."', held, because)


def _first_is_slow_by_caching(record: BenchRecord) -> Claim | None:
    verdict = _verdict(record, "cold", "backward, warm", "backward, cold", "none")
    if verdict is None:
        return None
    cold = median_of(record, "minor_faults", question="cold", way="backward", phase="cold")
    warm = median_of(record, "minor_faults", question="cold", way="backward")
    start = median_of(record, "seconds", question="cold", way="thread start", phase="cold")
    started = "" if start is None else f", and a process's first parallel operation takes {fmt.seconds(start)}"
    because = (
        f"the first backward takes {_share_of_time(verdict)} of a warm one, with {fmt.count(cold)} page faults against "
        f"{fmt.count(warm)}{started}: fresh pages and thread start-up are what is seen, and no computation is cached. "
        "The published table without warm-up contradicts the explanation itself: its worst call is func4's 0.1793 s, "
        "in the last function, not the first function's 0.1579 s."
    )
    held = "slower, but not by caching" if _is_slower(verdict) else "not seen to be slower, nor any caching"
    return Claim('"The first backward is slower because computations are cached."', held, because)


def _summing_forwards_is_slower(record: BenchRecord) -> Claim | None:
    verdict = _verdict(record, "combine", "func1", "func2")
    first, second = find_way(record, "combine", "func1"), find_way(record, "combine", "func2")
    count = record.problem.num_losses
    if verdict is None or first is None or second is None or count == 1:
        return None
    faults = [median_of(record, "minor_faults", question="combine", way=name) for name in ("func1", "func2")]
    because = (
        f"func2 takes {_share_of_time(verdict)} of func1. The addition is not what costs: func2's one traversal walks "
        f"{count} graphs, whose buffers and weight gradients are alive at once "
        f"(peak {fmt.size(second.peak_bytes)} against {fmt.size(first.peak_bytes)}, "
        f"{fmt.count(faults[1])} page faults against {fmt.count(faults[0])}), where func1 frees one graph's before it "
        "makes the other's. Summing over one forward is another matter: see one-forward summed."
    )
    text = '"Summing the losses of two forwards is slower than separate backwards."'
    return Claim(text, _held_where_slower(verdict), because)


def _retained_grows(record: BenchRecord) -> Claim | None:
    text = '"A retained graph grows bigger and slower with every backward."'
    if record.growth is not None:
        nodes = [step.nodes for step in record.growth.steps if step.way == "one graph, retained"]
        if nodes:
            verdict = "did not hold" if nodes[0] == nodes[-1] else "held"
            because = f"{nodes[0]} nodes at the first and {nodes[-1]} at the last of {len(nodes)} calls on one graph."
            return Claim(text, verdict, because)
    fact = find_way(record, "successive", "backward")
    last = _verdict(record, "successive", "backward, call 1", "backward, call 4", "none")
    if fact is None or last is None:
        return None
    because = (
        f"within one forward every call walks the same {fact.nodes} nodes, {fmt.size(fact.saved_bytes)} saved, and "
        f"call 4 takes {_share_of_time(last)} of call 1. Across steps a graph grows only where something carries it "
        "over; --question growth shows whether something does."
    )
    held = "not bigger; whether slower, cannot tell" if last.outcome == "cannot-tell" else "did not hold"
    return Claim(text, "slower here, but not bigger" if _is_slower(last) else held, because)


def _retain_does_not_matter(record: BenchRecord) -> Claim | None:
    verdict = _verdict(record, "retain", "retain_graph=False", "retain_graph=True")
    kept, freed = (find_way(record, "retain", f"retain_graph={value}") for value in (True, False))
    if verdict is None or kept is None or freed is None:
        return None
    if kept.held_bytes is None or freed.held_bytes is None or kept.peak_bytes is None or freed.peak_bytes is None:
        return None
    because = (
        f"with it the call takes {_share_of_time(verdict)} of the call without; "
        f"{fmt.size(kept.held_bytes - freed.held_bytes)} more stay held after it, "
        f"and the peak rises by {fmt.size(kept.peak_bytes - freed.peak_bytes)}. "
        "The memory is what matters, where batches are large."
    )
    outcome = {"same": "held in time", "small": "held in time, nearly", "cannot-tell": "cannot tell in time"}
    return Claim(
        '"retain_graph does nothing but occupy memory, so it does not matter."',
        outcome.get(verdict.outcome, "did not hold in time"),
        because,
    )


def _loop_sum_is_slower(record: BenchRecord) -> Claim | None:
    verdict = _verdict(record, "slices", "reduction=sum", "loss summed in the loop")
    retained = _verdict(record, "slices", "retained loop", "reduction=sum")
    if verdict is None:
        return None
    because = f"summing in the loop takes {_share_of_time(verdict)} of one call on the batch."
    if retained is not None:
        because += (
            f" Both are far from the retained loop: it takes {fmt.times(retained.ratio or 1.0)} the time of one summed "
            "traversal, which gives the same numbers."
        )
    text = '"A summed loop is slower than one call on the batch."'
    return Claim(text, _held_where_slower(verdict), because)


def _mean_differs_slightly(record: BenchRecord) -> Claim | None:
    fact = find_way(record, "slices", "reduction=mean")
    if fact is None or fact.factor is None:
        return None
    because = (
        f"the sum's gradients are {fmt.number(1 / fact.factor)} times the mean's{share_in_words(fact.factor, record)}, "
        "and differ by nothing else."
    )
    return Claim('"With the loss\'s mean the gradients differ slightly."', "did not hold", because)


def _is_slower(verdict: Verdict) -> bool:
    """Whether the candidate surely takes longer, by however little."""
    return verdict.outcome == "more" or (verdict.outcome == "small" and (verdict.ratio or 1.0) < 1)


def _is_faster(verdict: Verdict) -> bool:
    """Whether the candidate surely takes less time, by however little."""
    return verdict.outcome == "less" or (verdict.outcome == "small" and (verdict.ratio or 1.0) > 1)


def _held_where_slower(verdict: Verdict) -> str:
    """Of a claim that the candidate is slower."""
    if _is_slower(verdict):
        return "held"
    return "did not hold" if _is_faster(verdict) or verdict.outcome == "same" else "cannot tell"


def _share_of_time(verdict: Verdict) -> str:
    return f"{fmt.times(1 / (verdict.ratio or 1.0))} the time ({OUTCOMES[verdict.outcome]})"


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
    "multiback": "run one forward and call multiback.backward(losses) once",
    "reduction=sum": 'give the whole batch to the loss with reduction="sum" and call backward() once',
    "loss summed in the loop": "add the losses up in the loop and call backward() once after it",
    "one-forward retained": "run one forward and keep its graph with retain_graph=True until the last backward()",
    "func1": "keep a forward and a backward() for each loss",
    "func2": "run a forward for each loss, add the losses up and call backward() once",
    "func3": "keep a forward and a backward() for each loss",
    "func4": "run a forward for each loss, add the losses up and call backward() once",
    "forward per slice": "run a forward and a backward() for each slice",
    "multiback cut": "cut the graph at the output with multiback.cut and call backward() on each slice of cut.value",
    "batched": "give torch.autograd.grad all losses at once, with is_grads_batched=True",
    **{way: f"use {way}" for way in ("torch.func", "TorchJD", "Opacus", "BackPACK")},
}
_CALLS = {"each": "jac", "rows": "rows", "gram": "gram", "norms": "norms"}  # of multiback, by kind of answer
_ADVISING = (("combine", "func1"), ("slices", "retained loop"), *((kind, "loop") for kind in KINDS))
_PLAINEST = ("one-forward summed", "reduction=sum")


def advice(record: BenchRecord) -> str:
    """What to do, in one line, from the verdicts that stand."""
    timed = any(verdicts_of(record, question) for question, _ in _ADVISING)
    if record.growth is not None and not timed:
        return growth_finding(record)  # nodes and bytes are exact, whatever the times are worth
    if conduct.differs(record.control):
        return "run again on a quieter machine: one way differed from itself, so no difference in time can be believed."
    for question, baseline in _ADVISING:
        if verdicts_of(record, question):
            return _best_way(record, question, baseline)
    if verdicts_of(record, "retain"):
        return "call backward() without retain_graph wherever the graph is not needed again, see retain for its cost."
    return "see the verdicts below; --question combine compares ways to back-propagate several losses."


def _best_way(record: BenchRecord, question: str, baseline: str) -> str:
    """The fastest way whose verdict against the usual code stands; the plainest of those that tie."""
    if record.problem.num_losses == 1 and question == "combine":
        return "there is one loss and nothing to combine; see retain for what keeping the graph costs."
    timed = verdicts_of(record, question)
    judged = [verdict for verdict in timed if verdict.baseline == baseline]
    fact = find_way(record, question, baseline)
    if not judged and fact is not None and fact.note.startswith("not timed"):
        return f"leave the {baseline} ({fact.note}); the ways marked same give the same {answer_of(question)}."
    comparable = [verdict for verdict in timed if verdict.outcome != "not-comparable"]
    if not comparable:
        return f"none of these ways can be recommended: their gradients differ, see {question}."
    if not any(verdict.baseline == baseline for verdict in comparable):
        # the usual code gives other gradients, or was not run: compare what can be compared
        baseline = comparable[0].baseline
    better = [
        verdict
        for verdict in comparable
        if verdict.baseline == baseline and verdict.outcome == "less" and verdict.ratio and verdict.interval
    ]
    if not better:
        return f"nothing measured here is surely faster than {baseline}; {question} says what could not be told."
    best = max(better, key=lambda verdict: verdict.ratio or 0.0)
    for verdict in better:
        if verdict.candidate in _PLAINEST and verdict.interval and verdict.interval[1] >= (best.ratio or 0.0):
            best = verdict
            break
    code = _CODE.get(best.candidate, best.candidate)
    if best.candidate == "multiback" and question in _CALLS:
        code = f"call multiback.{_CALLS[question]}(losses, parameters)"
    return f"{code}: {fmt.times(best.ratio or 1.0)} faster here than {baseline}, same {answer_of(question)}."


def growth_finding(record: BenchRecord) -> str:
    """What the growth question showed, naming a tensor only where a walk of the graph proved it."""
    growth = record.growth
    if growth is None:
        return ""
    steps = [step for step in growth.steps if step.way == "a forward per step"]
    if len(steps) < 2:
        return "A forward per step was not measured, so growth over steps is not known."
    nodes, saved = per_step([step.nodes for step in steps]), per_step([step.saved_bytes for step in steps])
    if nodes <= 0 and saved > 0:
        return (
            f"The graph keeps its {steps[-1].nodes} nodes and holds {fmt.size(round(saved))} more a step: what the "
            "model feeds in or saves grows, without a graph of its own."
        )
    if nodes <= 0:
        return f"The graph does not grow: every step walks {steps[-1].nodes} nodes, retained or not."
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
