"""Runs a program as it is, in a process of its own with recording on, and gathers what its processes wrote.

The program is started as `python script.py args` or `python -m module args` would start it: same interpreter,
flags, folder, standard streams and environment, to which three variables are added. PYTHONPATH gets the
folder of a `sitecustomize` in front, through which every Python process of the program records itself (see
`entering`).
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from multiback import traces
from multiback.errors import OptionError, RecordError, TargetError
from multiback.records import check_writable, write_atomically
from multiback.traces import RUNNING, TraceRecord
from multiback.tracing import entering, findings

_HOOK = Path(__file__).parent / "sitecustomize"
_SECONDS_FOR_OTHERS = 5.0  # that processes which outlive the program get to write
_REACHES_THE_GROUP = (signal.SIGINT, signal.SIGQUIT)  # the terminal sends these to the program as well
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class TraceArguments:
    """The command line as typed: `command` is trace or explain, `program` a script or a module and its arguments."""

    program: list[str]
    module: bool
    output: Path | None
    max_steps: int | None
    force: bool
    command: str = "trace"
    sample_locals: bool = False


def run(arguments: TraceArguments, show: Callable[[TraceRecord], None]) -> int:
    """Run the program, write its record to `output`, hand it to `show`, and return the program's exit code.

    The code is 128 + n where signal n ended the program. SIGINT and SIGQUIT, which a terminal sends to the
    program too, are outlived; SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on. A program that SIGTERM ends
    before it can write loses what was recorded; one that Ctrl-C ends does not. Processes of the program that
    outlive it get at most 5 seconds to write. Where nothing was recorded, one sentence on standard error
    says so, and neither is anything written nor `show` called.

    Raises OptionError, TargetError and OutputError before the program starts, and OutputError after `show`
    where the record cannot be written after all.
    """
    _check(arguments)
    with tempfile.TemporaryDirectory(prefix="multiback-trace-", ignore_cleanup_errors=True) as folder:
        base = Path(folder) / "record"
        with _surviving_signals() as started:
            program = _start(arguments, base)
            started(program)
            code = program.wait()
            _wait_for_others(base)
        records, damaged = _read(base, program.pid)
    if not any(records.values()):
        sys.stderr.write(f"multiback: nothing was recorded: {damaged[0] if damaged else _why_nothing(code)}\n")
    else:
        record = _gathered(records, damaged, code, arguments)
        try:
            if arguments.output is not None:
                write_atomically(arguments.output, traces.encode(record))
        finally:
            show(record)
    return code if code >= 0 else 128 - code


def _check(arguments: TraceArguments) -> None:
    """Refuse, before anything runs, what could not work."""
    if not arguments.program:
        raise TargetError(
            f"{arguments.command}: takes a script or -m and a module; got nothing. Give what would follow `python`."
        )
    script = arguments.program[0]
    if not arguments.module and (script.startswith("-") or not Path(script).exists()):
        raise TargetError(
            f"{script}: a program must be a script that exists, and there is none. "
            "Give its path, or -m and the name of a module."
        )
    if arguments.output is not None and not arguments.output.name:
        raise OptionError("--output: must name a file; got nothing. Leave it out to show the report alone.")
    if arguments.output is not None and str(arguments.output) == "-":
        raise OptionError("--output: must name a file; got -, but standard output is the program's. Give a path.")
    if arguments.force and arguments.output is None:
        raise OptionError("--force: must go with --output, whose file it overwrites; got none. Leave it out.")
    if arguments.max_steps is not None and arguments.max_steps < 1:
        raise OptionError(f"--max-steps: must be 1 or more; got {arguments.max_steps}. Leave it out to record all.")
    if arguments.output is not None:
        check_writable(arguments.output, force=arguments.force)


def _start(arguments: TraceArguments, base: Path) -> subprocess.Popen[bytes]:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as multiprocessing passes them on
    if getattr(sys.__stdout__, "write_through", False):
        flags.append("-u")
    module = ["-m"] if arguments.module else []
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    command = [sys.executable, *flags, *module, *arguments.program]
    return subprocess.Popen(command, env=_environment(base, arguments))


def _environment(base: Path, arguments: TraceArguments) -> dict[str, str]:
    """The environment of the launcher, and what the program's processes need to record themselves."""
    environment = dict(os.environ)
    for name in (entering.FIRST, entering.MAX_STEPS, entering.SAMPLE_LOCALS):
        environment.pop(name, None)
    given = environment.get("PYTHONPATH", "")
    others = [entry for entry in given.split(os.pathsep) if entry != str(_HOOK)] if given else []
    environment["PYTHONPATH"] = os.pathsep.join([str(_HOOK), *others])
    environment[entering.OUTPUT] = str(base)
    if arguments.max_steps is not None:
        environment[entering.MAX_STEPS] = str(arguments.max_steps)
    if arguments.sample_locals:
        environment[entering.SAMPLE_LOCALS] = "1"
    return environment


@contextmanager
def _surviving_signals() -> Generator[Callable[[subprocess.Popen[bytes]], None]]:
    """Outlive or pass on signals; gives a function that takes the program once it runs.

    Handlers, unlike SIG_IGN, are not inherited by the program; signals that are ignored already, as under nohup, stay
    so.
    """
    programs: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def survive(_number: int, _frame: FrameType | None) -> None:
        pass

    def forward(number: int, _frame: FrameType | None) -> None:
        if programs:
            programs[0].send_signal(number)
        else:
            early.append(number)

    def started(program: subprocess.Popen[bytes]) -> None:
        programs.append(program)
        for number in early:
            program.send_signal(number)

    before: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int] = {}
    for handler, numbers in ((survive, _REACHES_THE_GROUP), (forward, _FORWARDED)):
        for number in numbers:
            old = signal.getsignal(number)
            if threading.current_thread() is threading.main_thread() and old not in (None, signal.SIG_IGN):
                before[number] = old
                signal.signal(number, handler)
    try:
        yield started
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _wait_for_others(base: Path) -> None:
    """Give processes that outlive the program a moment to write."""
    until = time.monotonic() + _SECONDS_FOR_OTHERS
    while time.monotonic() < until and any(_lives(path) for path in base.parent.glob(f"{base.name}.*.alive")):
        time.sleep(0.02)


def _lives(marker: Path) -> bool:
    try:
        return psutil.Process(int(marker.name.split(".")[-2])).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _read(base: Path, first: int) -> tuple[dict[bool, list[TraceRecord]], list[str]]:
    """The records that were written, the program's own under True; and why others cannot be read."""
    records: dict[bool, list[TraceRecord]] = {True: [], False: []}
    damaged: list[str] = []
    for path in sorted(base.parent.glob(f"{base.name}.*.part"), key=lambda path: path.stat().st_mtime_ns):
        try:
            records[path.name == f"{base.name}.{first}.part"].append(traces.load(path))
        except RecordError as error:
            damaged.append(f"a process's part was left out: {error}")
    return records, damaged


def _gathered(
    records: dict[bool, list[TraceRecord]], damaged: list[str], code: int, arguments: TraceArguments
) -> TraceRecord:
    """One record of all processes, judged."""
    merged = traces.merged([*records[True], *records[False]])
    cut_short = any(record.ended == RUNNING for record in [*records[True], *records[False]])
    unobserved = [
        *merged.unobserved,
        *(["what a process did in its last seconds, when it ended without a word"] * cut_short),
    ]
    merged = msgspec.structs.replace(
        merged,
        program=[*(["-m"] if arguments.module else []), *arguments.program],
        ended=_ended(merged.ended if records[True] else "exit 0", code),
        unobserved=unobserved,
        faults=[*merged.faults, *damaged],
    )
    merged.findings = findings.judge(merged)
    return merged


def _ended(said: str, code: int) -> str:
    """How the program ended: what its process said of itself where it cannot be told from outside."""
    if said == "stopped recording":
        return said
    raised = not said.startswith("exit ") and said != RUNNING
    if raised and (code == 1 or (code == -signal.SIGINT and said == "KeyboardInterrupt")):
        return said
    return f"exit {code}" if code >= 0 else f"signal {-code}"


def _why_nothing(code: int) -> str:
    if code < 0:
        return (
            f"signal {-code} ended the program before it could write, or before a call that came after its first two "
            "seconds; a handler that raises SystemExit, or Ctrl-C, lets it."
        )
    ignoring = [
        flag
        for flag, given in (
            ("-I", sys.flags.isolated),
            ("-E", sys.flags.ignore_environment and not sys.flags.isolated),
            ("-S", sys.flags.no_site),
        )
        if given
    ]
    if ignoring:
        return f"python ran with {' and '.join(ignoring)}, which keeps the recorder out; leave it away."
    return (
        "no process of the program imported torch and asked for gradients, or what did so left by os._exit or exec, or "
        "ran Python with -I, -E or -S."
    )
