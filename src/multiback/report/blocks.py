"""What a report is made of, whatever renders it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """Rows of text under column heads; the first column is left-aligned, the others right."""

    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Section:
    """A title, a table where there is one, and sentences."""

    title: str
    table: Table | None = None
    sentences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Document:
    """A whole report; `advice` comes first, since that is what a reader came for."""

    title: str
    advice: str
    sections: list[Section]
