"""One section per question: its table and its verdicts."""

from collections.abc import Callable

from multiback.records import BenchRecord, WayFacts
from multiback.report import claims, sentences
from multiback.report import format as fmt
from multiback.report.blocks import Section, Table
from multiback.report.lookup import KINDS, answer_of, facts_of, find_verdict, median_of, verdicts_of
from multiback.report.sentences import POLICIES

_TITLES = {
    "successive": "successive: is a later backward on one graph cheaper than the first?",
    "cold": "cold: what do the first calls of a process cost?",
    "retain": "retain: what does retain_graph=True cost?",
    "combine": "combine: separate backwards, a summed loss, or one traversal?",
    "slices": "slices: one backward per slice, or all at once?",
    "growth": "growth: does a step get slower or bigger as steps go by?",
    "each": "each: the gradients of K losses, each its own",
    "rows": "rows: the gradient of every row's own loss",
    "gram": "gram: the inner products of K losses' gradients",
    "norms": "norms: the norms of K losses' gradients",
}


def build(record: BenchRecord, question: str) -> Section | None:
    """The section of a question; None where the record holds nothing on it."""
    if question not in record.samples.question and not facts_of(record, question):
        return None
    return _BUILDERS.get(question, _ways)(record, question)


def _ways(record: BenchRecord, question: str) -> Section:
    facts, timed = facts_of(record, question), verdicts_of(record, question)
    lines = list(dict.fromkeys(sentences.sentence(verdict, record) for verdict in timed))
    for metric in ("peak_bytes", "held_bytes"):
        judged = [v for v in verdicts_of(record, question, metric) if v.outcome != "same" or question == "retain"]
        lines += [sentences.sentence(verdict, record) for verdict in judged if verdict.outcome != "not-comparable"]
    lines += _remarks(record, question)
    if record.problem.num_losses == 1 and question == "combine":
        lines.append("There is one loss, so there is nothing to combine: the ways differ in nothing but retain_graph.")
    lines += _agreement(facts) + _smallest(record, question)
    head = ["way", "median", "peak", "held", "saved", "faults", "FLOP", "gradients"]
    title = f"{_TITLES[question]} ({POLICIES[facts[0].grads]})"
    return Section(title, Table(head, [_way_row(record, fact) for fact in facts]), lines)


def _remarks(record: BenchRecord, question: str) -> list[str]:
    """Why ways are not among the verdicts, and what else there is to say of those that are."""
    named = {side for verdict in verdicts_of(record, question) for side in (verdict.candidate, verdict.baseline)}
    lines = []
    for fact in facts_of(record, question):
        if not fact.comparable and fact.way not in named:
            lines.append(f"{fact.way}: {sentences.difference(fact, record)}.")
        elif fact.comparable and fact.note:
            lines.append(f"{fact.way}: {fact.note}.")
    return lines


def _way_row(record: BenchRecord, fact: WayFacts) -> list[str]:
    seconds, faults = (
        median_of(record, column, question=fact.question, way=fact.way, grads=fact.grads)
        for column in ("seconds", "minor_faults")
    )
    return [
        fact.way,
        fmt.seconds(seconds),
        fmt.size(fact.peak_bytes),
        fmt.size(fact.held_bytes),
        fmt.size(fact.saved_bytes),
        fmt.count(faults),
        fmt.flops(fact.flops),
        _alike(fact, "differ"),
    ]


def _alike(fact: WayFacts, otherwise: str) -> str:
    """Whether a way answers as the reference does; a dash where it does not answer."""
    return "same" if fact.comparable else "-" if fact.difference_from_reference is None else otherwise


def _kind(record: BenchRecord, question: str) -> Section:
    """Ways to one kind of answer; bytes stand in the table alone."""
    facts, timed = facts_of(record, question), verdicts_of(record, question)
    baseline = timed[0].baseline if timed else "loop"
    lines = [sentences.sentence(verdict, record) for verdict in timed]
    lines += [*_remarks(record, question), *_agreement(facts), *_smallest(record, question)]
    lines.append(
        "With respect to the model's parameters, from the data on: every way's figures hold one forward of its own. "
        "Held is what is alive after the call, its answer included."
    )
    rows = [
        [
            fact.way,
            fmt.seconds(median_of(record, "seconds", question=question, way=fact.way)),
            fmt.size(fact.peak_bytes),
            fmt.size(fact.held_bytes),
            sentences.ratio(find_verdict(record, question, baseline, fact.way)),
            _alike(fact, "differs"),
        ]
        for fact in facts
    ]
    head = ["way", "median", "peak", "held", f"{baseline} / way", "answer"]
    return Section(_TITLES[question], Table(head, rows), lines)


def _agreement(facts: list[WayFacts]) -> list[str]:
    """That the ranked ways give the same numbers, and how nearly."""
    gaps = [fact.difference_from_reference for fact in facts if fact.comparable]
    known = [gap for gap in gaps if gap is not None]
    if len(known) < 2:
        return []
    noun, gap = answer_of(facts[0].question), fmt.number(max(known))
    return [f"The {len(known)} ways marked same give the same {noun}: max relative difference {gap}."]


def _successive(record: BenchRecord, question: str) -> Section:
    facts, indexes = facts_of(record, question), sorted(_call_indexes(record, question))
    rows: list[list[str]] = []
    lines: list[str] = []
    for fact in facts:
        medians = [
            median_of(record, "seconds", question=question, way=fact.way, grads=fact.grads, call_index=index)
            for index in indexes
        ]
        returned = fact.way == "autograd.grad"  # keeps no .grad, so no policy applies to it
        name = fact.way if returned else f"{fact.way}, {POLICIES[fact.grads]}"
        rows.append([name, *map(fmt.seconds, medians), fmt.count(fact.nodes), fmt.size(fact.saved_bytes)])
        for verdict in verdicts_of(record, question):
            if verdict.grads == fact.grads and verdict.baseline.startswith(fact.way + ","):
                text = sentences.sentence(verdict, record)
                lines.append(text if returned else f"{POLICIES[fact.grads]}: {text}")
        if not fact.comparable:
            lines.append(f"{fact.way}: {sentences.difference(fact, record)}.")
    head = ["way", *[f"call {index}" for index in indexes], "nodes", "saved"]
    return Section(_TITLES[question], Table(head, rows), lines + _smallest(record, question))


def _call_indexes(record: BenchRecord, question: str) -> set[int]:
    table = record.samples
    return {index for index, asked in zip(table.call_index, table.question, strict=True) if asked == question}


def _cold(record: BenchRecord, question: str) -> Section:
    rows: list[list[str]] = []
    for way in ("forward", "backward", "thread start"):
        figures = {
            (column, phase): median_of(record, column, question=question, way=way, phase=phase)
            for column in ("seconds", "minor_faults")
            for phase in ("cold", "warm")
        }
        if figures["seconds", "cold"] is not None:
            times = [fmt.seconds(figures["seconds", phase]) for phase in ("cold", "warm")]
            faults = [fmt.count(figures["minor_faults", phase]) for phase in ("cold", "warm")]
            rows.append([way, *times, *faults])
    lines = [sentences.sentence(verdict, record) for verdict in verdicts_of(record, question)]
    lines.append(
        f"Cold figures are the first calls of {record.run.settings.cold_processes} fresh processes; the fewer, the "
        "wider the interval. Thread start is a process's first parallel operation, which starts the threads, "
        "against the same one later."
    )
    return Section(_TITLES[question], Table(["call", "cold", "warm", "faults cold", "faults warm"], rows), lines)


def _growth(record: BenchRecord, question: str) -> Section:
    rows: list[list[str]] = []
    lines: list[str] = []
    for fact in facts_of(record, question):
        steps = [step for step in record.growth.steps if step.way == fact.way] if record.growth else []
        if len(steps) < 2:
            lines.append(f"{fact.way}: {fact.note or 'not run'}.")
            continue
        ends = [
            median_of(record, "seconds", question=question, way=fact.way, grads=fact.grads, call_index=step.step)
            for step in (steps[0], steps[-1])
        ]
        rows.append(
            [
                fact.way,
                " -> ".join(map(fmt.seconds, ends)),
                f"{steps[0].nodes} -> {steps[-1].nodes}",
                fmt.number(claims.per_step([step.nodes for step in steps])),
                fmt.size(round(claims.per_step([step.saved_bytes for step in steps]))),
            ]
        )
        mine = [v for v in verdicts_of(record, question) if v.baseline.startswith(fact.way + ",")]
        lines += [sentences.sentence(verdict, record) for verdict in mine]
    lines.append(claims.growth_finding(record))
    head = ["way", "time, first -> last step", "nodes", "nodes/step", "saved/step"]
    return Section(_TITLES[question], Table(head, rows), lines)


_BUILDERS: dict[str, Callable[[BenchRecord, str], Section]] = {
    "successive": _successive,
    "cold": _cold,
    "growth": _growth,
    **dict.fromkeys(KINDS, _kind),
}


def _smallest(record: BenchRecord, question: str) -> list[str]:
    """The smallest difference that the run could have seen, over the question's pairs."""
    found = sorted(v.smallest_effect for v in verdicts_of(record, question) if v.smallest_effect is not None)
    if not found:
        return []
    ends = list(dict.fromkeys(fmt.percent(value) if value < 10 else "over 1000%" for value in (found[0], found[-1])))
    depending = ", depending on the pair" if len(ends) > 1 else ""
    return [f"Smallest difference that this run could have seen: {' to '.join(ends)}{depending}."]
