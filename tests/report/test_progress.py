"""Progress goes to terminals only, and says what is left."""

import io
import sys
from dataclasses import dataclass

from rich.console import Console

from multiback.report import progress


@dataclass
class Status:
    label: str
    share: float | None = None
    seconds_left: float | None = None
    half_width: float | None = None


def test_nothing_is_shown_where_standard_error_is_no_terminal(capsys):
    with progress.showing(None) as update:
        update(Status("working"))
    assert capsys.readouterr().err == ""


def test_a_terminal_sees_the_label_the_time_left_and_the_interval_so_far(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=stream, force_terminal=True, width=150))
    with progress.showing(True) as update:
        update(Status("importing torch"))
        update(Status("process 3 of 10", 0.2, 63.0, 0.042))
    shown = stream.getvalue()
    assert "process 3 of 10, about 63 s left, widest interval so far ±4.2%" in shown


def test_progress_can_be_turned_off_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.showing(False) as update:
        update(Status("working"))
