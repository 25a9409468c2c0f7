"""A progress line with time left on standard error, for terminals only."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from multiback.report import format as fmt


class Status(Protocol):
    """Where a run stands."""

    @property
    def label(self) -> str:
        """What is being done."""

    @property
    def share(self) -> float | None:
        """The share done, None while unknown."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds left, None while unknown."""

    @property
    def half_width(self) -> float | None:
        """The widest relative half-width of an interval so far."""


@contextmanager
def showing(wanted: bool | None) -> Generator[Callable[[Status], None], None, None]:
    """Show what the run reports; `wanted` None means where standard error is a terminal."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _status: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def update(status: Status) -> None:
            text = status.label
            if status.seconds_left is not None:
                text += f", about {max(1.0, status.seconds_left):.0f} s left"
            if status.half_width is not None and status.half_width < 10:
                text += f", widest interval so far ±{fmt.percent(status.half_width)}"
            bar.update(task, description=text, total=None if status.share is None else 1.0, completed=status.share or 0)

        yield update
