"""The command line: parse, call, render, exit."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import typer.core
from typing_extensions import override

from multiback._version import __version__
from multiback.errors import MultibackError, OptionError

INTERRUPTED = 130
FAILED, FAULT = 2, 70  # 70 is EX_SOFTWARE of sysexits.h
CLOSED_PIPE = 141  # as the shell reports a program that SIGPIPE ended

_UsageError: Any = typer.BadParameter.__base__  # of click, of which some versions of typer have a copy of their own

app = typer.Typer(
    name="multiback",
    help="What each way to back-propagate several losses costs, and what is wrong in a program's backward calls.",
    epilog="Try `multiback bench --quick`, `multiback bench FILE.py:FUNCTION`, `multiback trace train.py`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_EXAMPLES = """
Measure what each way to back-propagate several losses costs, and say so with intervals.

\b
TARGET is one of
  a preset              mlp (default), two-layer, slices, heads, transformer, recurrent
  file.py:function      a function that returns multiback.Problem(model, data, losses)
  package.module:name   the same from an importable module
  a saved model's file  with --input 1x40 and, since loading a pickle runs code, --trust-pickle

\b
Examples
  multiback bench                              the published net, under 130 s
  multiback bench slices --quick               one backward per image, or all at once
  multiback bench train.py:problem --json run.json
  multiback bench slices --kind rows           ways to per-sample gradients, peers included
  multiback bench net.pt --input 1x40 --trust-pickle
  multiback bench train.py:problem --question combine --fail-if "combine:func1/multiback<1.5"

Exit codes: 0 fine, 1 a --fail-if rule is true, 2 bad use or bad input, 3 a rule cannot be
decided, 130 Ctrl-C (what was measured is kept with --json, marked partial).
"""


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"multiback {__version__}")
        raise typer.Exit


@app.command(help=_EXAMPLES, short_help="Measure ways to back-propagate several losses.")
def bench(
    target: Annotated[str, typer.Argument(metavar="[TARGET]", show_default=True)] = "mlp",
    list_names: Annotated[
        bool, typer.Option("--list", help="List presets, questions and ways; measure nothing.")
    ] = False,
    question: Annotated[list[str] | None, typer.Option(help="Ask this question only; repeatable.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="each, rows, gram or norms: compare ways to that answer for the model's parameters."),
    ] = None,
    way: Annotated[list[str] | None, typer.Option(help="Run this way only; repeatable.")] = None,
    loss: Annotated[
        list[str] | None, typer.Option(help="file.py:function, a loss (output, data) -> tensor; repeatable.")
    ] = None,
    num_losses: Annotated[int | None, typer.Option(help="K, for targets that take it.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of data, for targets that take it.")] = None,
    input_shape: Annotated[str | None, typer.Option("--input", help="Shape of a saved model's input, as 1x40.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float64, bfloat16, ... for model and data.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Threads of torch; at most the cores there are.")] = None,
    grads: Annotated[
        str | None, typer.Option(help="none, accumulate or prealloc: what .grad holds before a run.")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Processes; intervals rest on their number.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Interleaved rounds in each process.")] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds to aim at; 110, or 35 with --quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About 35 s, or what 5 processes of 2 rounds take.")] = False,
    rigorous: Annotated[bool, typer.Option("--rigorous", help="20 processes of 30 rounds, however long.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and order.")] = 0,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Load a pickled model, which runs its code.")
    ] = False,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the record; - for standard output.")] = None,
    markdown: Annotated[str | None, typer.Option(metavar="FILE", help="Write the report as Markdown.")] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help='Fail if "QUESTION:CANDIDATE/BASELINE<RATIO": their seconds, judged by the interval; repeatable.',
        ),
    ] = None,
    margin: Annotated[float, typer.Option(help="Percent below which a difference does not matter.")] = 5.0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite output files.")] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Show no progress line.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and what the target prints.")] = False,
) -> None:
    """Parse, then hand over; see the help text."""
    from multiback.benching import command

    if list_names:
        typer.echo(command.listing())
        return
    arguments = command.BenchArguments(
        target=target, questions=question, kind=kind, ways=way, losses=loss or [], num_losses=num_losses, batch=batch,
        input_shape=input_shape, dtype=dtype, device=device, threads=threads, grads=grads, processes=processes,
        rounds=rounds, budget=budget, quick=quick, rigorous=rigorous, seed=seed, trust_pickle=trust_pickle,
        json=json, markdown=markdown, rules=fail_if or [], margin=margin, force=force,
        progress=False if no_progress else None, debug=debug,
    )  # fmt: skip
    raise typer.Exit(_guarded(lambda: command.bench(arguments), debug=debug))


_SHOW = """
Show a record again: of a bench, every verdict computed afresh from its samples, or of a trace.

\b
Examples
  multiback show run.json
  multiback show trace.json --markdown
"""


@app.command(help=_SHOW, short_help="Show a record of a bench or a trace again.")
def show(
    record: Annotated[str, typer.Argument(metavar="FILE", help="A record that bench --json or trace --output wrote.")],
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON, verdicts computed afresh.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the report as Markdown.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Read, judge again, render; imports no torch."""

    def run() -> int:
        if json and markdown:
            raise OptionError("--json, --markdown: show prints one form at a time; got both. Leave one out.")
        from multiback import showing
        from multiback.report import console
        from multiback.report.markdown import written

        found = showing.read(Path(record))
        if json:
            sys.stdout.write(found.json)
        elif markdown:
            sys.stdout.write(written(found.document))
        else:
            console.draw(found.document, console.make_console(sys.stdout))
        return 0

    raise typer.Exit(_guarded(run, debug=debug))


_TRACE = """
Run a program as it is, watch its backward calls, and report what is costly or silently wrong in them.

\b
Every backward(), autograd.grad and optimiser step is seen, in children and torchrun ranks too; the
report names the line, what it costs, and the edit that mends it. The program's output and exit code
stay its own; the report goes to standard error. What follows the script, or the module, is the program's.

\b
Examples
  multiback trace train.py --epochs 1
  multiback trace --output trace.json --max-steps 200 train.py
  multiback trace -m package.train --epochs 1
  multiback trace --sample-locals validate.py
  multiback show trace.json
"""


class _Running(typer.core.TyperCommand):
    """A command that runs a program: what follows the script, or `-m` and its module, is the program's."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Own options end at the module, as they do at the script."""
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] != "--":
            if args[place].startswith("-m"):
                end = place + (2 if args[place] == "-m" else 1)
                if end <= len(args):
                    args = [*args[:end], "--", *args[end:]]
                break
            place += 2 if args[place] in ("--output", "--max-steps") else 1
        return super().parse_args(ctx, args)


_PROGRAM: dict[str, Any] = {"allow_interspersed_args": False}
_Program = Annotated[list[str] | None, typer.Argument(metavar="PROGRAM", help="A script and its arguments.")]


@app.command(cls=_Running, help=_TRACE, short_help="Watch a program's backward calls.", context_settings=_PROGRAM)
def trace(
    program: _Program = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the record, as JSON, to a file that is not there yet.")
    ] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, not a script.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop recording after so many optimiser steps.")] = None,
    sample_locals: Annotated[
        bool,
        typer.Option(
            "--sample-locals", help="Look at what names hold as well: for graphs that grow without a backward."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Parse, then hand over; see the help text."""
    given = _Launch("trace", program or [], module, output, max_steps, force, sample_locals)
    raise typer.Exit(_launched(given, debug=debug))


_EXPLAIN = """
Run a program as it is, and explain autograd's errors: what was freed or changed, by which line, and the remedy.

\b
Examples
  multiback explain train.py
  multiback explain -m package.train --epochs 1
"""


@app.command(cls=_Running, help=_EXPLAIN, short_help="Explain autograd's errors.", context_settings=_PROGRAM)
def explain(
    program: _Program = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, not a script.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Parse, then hand over; see the help text."""
    raise typer.Exit(_launched(_Launch("explain", program or [], module), debug=debug))


class _Launch(NamedTuple):
    """What trace and explain were asked."""

    command: str
    program: list[str]
    module: str | None
    output: str | None = None
    max_steps: int | None = None
    force: bool = False
    sample_locals: bool = False


def _launched(given: _Launch, *, debug: bool) -> int:
    from multiback.report import console
    from multiback.report import trace as report
    from multiback.traces import TraceRecord
    from multiback.tracing import launcher

    def show(record: TraceRecord) -> None:
        document = report.build_errors(record) if given.command == "explain" else report.build(record)
        with suppress(OSError):  # nobody can read it; the program's exit code stands
            if sys.stderr is None:
                return
            console.draw(document, console.make_console(sys.stderr))

    arguments = launcher.TraceArguments(
        command=given.command,
        program=given.program if given.module is None else [given.module, *given.program],
        module=given.module is not None,
        output=None if given.output is None else Path(given.output),
        max_steps=given.max_steps,
        force=given.force,
        sample_locals=given.sample_locals,
    )
    return _guarded(lambda: launcher.run(arguments, show), debug=debug)


def _guarded(run: Callable[[], int], *, debug: bool) -> int:
    """The exit code of `run`; errors of ours become one sentence on standard error."""
    try:
        code = run()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except MultibackError as error:
        typer.echo(f"multiback: {error}", err=True)
        if debug and error.details:
            typer.echo(error.details, err=True)
        if debug:
            traceback.print_exc()
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except OSError as error:
        typer.echo(f"multiback: standard output: cannot be written ({error.strerror}).", err=True)
        return FAILED
    except KeyboardInterrupt:
        typer.echo("multiback: interrupted before anything was measured; nothing was written.", err=True)
        return INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        typer.echo(
            f"multiback: a fault of its own: {type(error).__name__}: {error}. Add --debug to see where.", err=True
        )
        return FAULT


def _interrupt(_number: int, _frame: object) -> None:
    """Stop once; further interrupts do not break into the cleaning up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _terminate(number: int, _frame: object) -> None:
    """End the measuring processes and remove temporary files before leaving, as for an interrupt."""
    raise SystemExit(128 + number)


def main() -> None:
    """Entry point of the `multiback` command."""
    for number, act in ((signal.SIGINT, _interrupt), (signal.SIGTERM, _terminate), (signal.SIGHUP, _terminate)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, or in the background
            signal.signal(number, act)
    try:
        code = app(standalone_mode=False)
    except _UsageError as error:  # one sentence, as every error of ours
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(FAILED)
        path = "multiback" if error.ctx is None else error.ctx.command_path
        said = error.format_message().rstrip(".")
        typer.echo(f"multiback: {said[:1].lower()}{said[1:]}. See `{path} --help`.", err=True)
        code = FAILED
    except typer.Abort:
        code = INTERRUPTED
    sys.exit(code)
