"""A report as tables and sentences, before any renderer: built from a record and nothing else."""

from multiback.records import BenchRecord
from multiback.report import claims, conduct, sections
from multiback.report.blocks import Document, Section


def build(record: BenchRecord) -> Document:
    """The report of a record: what to do, a section per question, the claims, how it was measured."""
    parts = [sections.build(record, question) for question in record.run.settings.questions]
    if judged := claims.judge(record):
        parts.append(Section("What the published answers claimed", None, [str(claim) for claim in judged]))
    parts.append(conduct.build(record))
    problem = record.problem
    title = (
        f"multiback bench {problem.target}: K = {problem.num_losses} losses, "
        f"P = {problem.num_parameters:,} parameters, B = {problem.num_rows} rows"
    )
    return Document(title, claims.advice(record), [part for part in parts if part is not None])
