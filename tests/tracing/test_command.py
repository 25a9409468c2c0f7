"""What of a command line is multiback's, and what the program's; every mistake is one sentence."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from multiback import cli
from multiback.tracing import launcher


@pytest.mark.parametrize(
    ("typed", "program", "module", "steps"),
    [
        (["-m", "pkg", "--output", "x", "--help"], ["pkg", "--output", "x", "--help"], True, None),
        (["-m", "pkg", "--foo", "-m"], ["pkg", "--foo", "-m"], True, None),
        (["--max-steps", "3", "-m", "pkg", "--max-steps", "9"], ["pkg", "--max-steps", "9"], True, 3),
        (["--max-steps=3", "-mpkg", "--", "x"], ["pkg", "--", "x"], True, 3),
        (["--max-steps", "3", "a.py", "--max-steps", "9", "-m"], ["a.py", "--max-steps", "9", "-m"], False, 3),
    ],
)
def test_what_follows_the_program_is_the_program_s(typed, program, module, steps, monkeypatch):
    given = []
    monkeypatch.setattr(launcher, "run", lambda arguments, _show: given.append(arguments) or 0)
    assert CliRunner().invoke(cli.app, ["trace", *typed]).exit_code == 0
    (found,) = given
    assert (found.program, found.module, found.max_steps, found.output) == (program, module, steps, None)


@pytest.mark.parametrize(
    "typed",
    [
        ["trace", "--output"],
        ["trace", "-m"],
        ["trace", "--bogus", "x.py"],
        ["trace", "--max-steps", "x", "a.py"],
        ["trace", "--output=", "a.py"],
        ["trace", "--output", "-", __file__],
        ["explain"],
        ["show"],
        ["nonsense"],
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(typed):
    command = [sys.executable, "-c", "from multiback.cli import main; main()", *typed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("multiback: ")
    assert done.stderr.count("\n") == 1
