"""Commands shown in README and docs parse, so that no page names an option that does not exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from multiback.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
COMMANDS = sorted(
    {
        line
        for page in PAGES
        for block in CONSOLE.findall(page.read_text())
        for line in block.splitlines()
        if line.startswith("multiback ")
    }
)


def parse(command):
    _, name, *arguments = shlex.split(command.partition("#")[0])
    command = typer.main.get_command(app).commands[name]
    return command.make_context(name, arguments, resilient_parsing=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_parses(command):
    assert parse(command).params


def test_commands_were_found():
    assert len(COMMANDS) >= 4


def test_a_command_with_an_unknown_option_does_not_parse():
    with pytest.raises(Exception, match="No such option"):
        parse("multiback bench --no-such-option")
