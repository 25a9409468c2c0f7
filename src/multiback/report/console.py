"""The report on a terminal, by rich; plain where NO_COLOR is set or the output is no terminal."""

import io
from typing import TextIO

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text
from typing_extensions import override

from multiback.records import BenchRecord
from multiback.report.blocks import Document, Section, Table
from multiback.report.document import build

_PLAIN_WIDTH = 100


def render(record: BenchRecord, console: Console) -> None:
    """Print the report of a bench."""
    draw(build(record), console)


def draw(document: Document, console: Console) -> None:
    """Print a report."""
    console.print(Text(document.title, style="bold"))
    console.print(Text(f"What to do: {document.advice}", style="bold green"))
    for section in document.sections:
        _section(section, console)


def text_of(document: Document, width: int = _PLAIN_WIDTH) -> str:
    """A report as plain text."""
    stream = io.StringIO()
    draw(document, Console(file=stream, width=width, no_color=True, force_terminal=False))
    return stream.getvalue()


def to_text(record: BenchRecord, width: int = _PLAIN_WIDTH) -> str:
    """The report as plain text."""
    stream = io.StringIO()
    render(record, Console(file=stream, width=width, no_color=True, force_terminal=False))
    return stream.getvalue()


def make_console(file: TextIO) -> Console:
    """A console for `file`; where it is no terminal the width is fixed, so that pipes get the same text."""
    return _Console(file=file) if file.isatty() else _Console(file=file, width=_PLAIN_WIDTH, no_color=True)


class _Console(Console):
    """Leaves a closed pipe to the caller, where rich would exit with 1, which means something else here."""

    @override
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _section(section: Section, console: Console) -> None:
    console.print()
    console.print(Text(section.title, style="bold cyan"))
    if section.table is not None and section.table.rows:
        # a table keeps its shape: where the terminal is narrower, its lines wrap, not its cells
        console.print(_table(section.table), soft_wrap=True)
    for line in section.sentences:
        console.print(Text("- ").append(line), soft_wrap=False, highlight=False)


def _table(table: Table) -> RichTable:
    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    for column, head in enumerate(table.head):
        drawn.add_column(Text(head), justify="right" if column else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
