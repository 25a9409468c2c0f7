"""Finds things in a record: a verdict, a way's facts, the median of a column."""

from statistics import median

from multiback.records import BenchRecord, Verdict, WayFacts

KINDS = ("each", "rows", "gram", "norms")  # the questions that compare ways to one kind of answer


def answer_of(question: str) -> str:
    """What the ways of a question must give alike."""
    return "answer" if question in ("gram", "norms") else "gradients"


def verdicts_of(record: BenchRecord, question: str, metric: str = "seconds") -> list[Verdict]:
    """The verdicts of a question on one metric, in order."""
    return [verdict for verdict in record.verdicts if (verdict.question, verdict.metric) == (question, metric)]


def find_verdict(
    record: BenchRecord, question: str, baseline: str, candidate: str, grads: str | None = None
) -> Verdict | None:
    """The verdict on time of one pair, under one policy or the first there is."""
    for verdict in verdicts_of(record, question):
        if (verdict.baseline, verdict.candidate) == (baseline, candidate) and grads in (None, verdict.grads):
            return verdict
    return None


def facts_of(record: BenchRecord, question: str) -> list[WayFacts]:
    """The facts on the ways of a question, in order."""
    return [fact for fact in record.ways if fact.question == question]


def find_way(record: BenchRecord, question: str, way: str, grads: str | None = None) -> WayFacts | None:
    """The facts on one way."""
    return next((fact for fact in facts_of(record, question) if fact.way == way and grads in (None, fact.grads)), None)


def median_of(
    record: BenchRecord,
    column: str,
    *,
    question: str,
    way: str,
    grads: str | None = None,
    call_index: int | None = None,
    phase: str = "warm",
) -> float | None:
    """The median of a sample column over a way's calls; None where there are none."""
    table = record.samples
    keys = zip(table.question, table.way, table.phase, table.grads, table.call_index, strict=True)
    values = [
        value
        for value, (asked, name, when, policy, index) in zip(getattr(table, column), keys, strict=True)
        if (asked, name, when) == (question, way, phase) and grads in (None, policy) and call_index in (None, index)
    ]
    return median(values) if values else None
