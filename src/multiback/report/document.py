"""A report as tables and sentences, before any renderer: built from a record and nothing else."""

from multiback.records import BenchRecord
from multiback.report import claims, conduct, sections
from multiback.report.blocks import Document, Section
from multiback.report.lookup import KINDS

_CLAIMS_TITLE = "What a published answer to these questions (func1 to func4, 100 repetitions each) claimed"


def build(record: BenchRecord) -> Document:
    """The report of a record: what to do, a section per question, the claims, how it was measured."""
    parts = [sections.build(record, question) for question in record.run.settings.questions]
    if is_published(record) and (judged := claims.judge(record)):
        parts.append(Section(_CLAIMS_TITLE, None, [str(claim) for claim in judged]))
    parts.append(conduct.build(record))
    problem = record.problem
    title = (
        f"multiback bench {problem.target}: K = {problem.num_losses} losses, "
        f"P = {problem.num_parameters:,} parameters, B = {problem.num_rows} rows"
    )
    advice = [claims.advice(record), _hint(record), conduct.busy_line(record)]
    return Document(title, " ".join(filter(None, advice)), [part for part in parts if part is not None])


def is_published(record: BenchRecord) -> bool:
    """Whether the run is on a preset or on the published losses: what the published claims are about."""
    return record.problem.losses.startswith("the preset's") or "published losses" in record.problem.losses


def _hint(record: BenchRecord) -> str:
    """The question that this problem has and the run did not ask."""
    problem, asked = record.problem, record.run.settings.questions
    known = "slices" in asked or all(question in KINDS for question in asked)
    if problem.num_losses != problem.num_rows or problem.num_rows == 1 or known:
        return ""
    return "There is one loss per row: --question slices compares backwards slice by slice with one for all."
