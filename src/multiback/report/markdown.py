"""The report as GitHub-flavoured Markdown."""

from multiback.records import BenchRecord
from multiback.report.blocks import Document, Section, Table
from multiback.report.document import build


def render(record: BenchRecord) -> str:
    """The report of a bench."""
    return written(build(record))


def written(document: Document) -> str:
    """A whole report, one heading per section."""
    parts = [f"# {_plain(document.title)}", f"**What to do:** {_plain(document.advice)}"]
    parts += [_section(section) for section in document.sections]
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> str:
    parts = [f"## {_plain(section.title)}"]
    if section.table is not None and section.table.rows:
        parts.append(_table(section.table))
    if section.sentences:
        parts.append("\n".join(f"- {_plain(line)}" for line in section.sentences))
    return "\n\n".join(parts)


def _table(table: Table) -> str:
    lines = [table.head, ["---", *["---:"] * (len(table.head) - 1)], *table.rows]
    return "\n".join("| " + " | ".join(map(_plain, line)) + " |" for line in lines)


def _plain(text: str) -> str:
    """Text in which Markdown finds nothing to format."""
    for character in "\\`*_|<>":
        text = text.replace(character, "\\" + character)
    return text
