"""What `multiback bench` does with its parsed arguments: check, run, write, print, exit code."""

import sys
from dataclasses import dataclass
from pathlib import Path

from multiback.benching import names, options, rules, runner
from multiback.benching.options import Mode, Options
from multiback.benching.protocol import Source
from multiback.errors import OptionError
from multiback.records import BenchRecord, check_writable, encode, write_atomically
from multiback.report import console, markdown
from multiback.report.progress import showing

FINE, RULE_TRUE, UNDECIDED, INTERRUPTED = 0, 1, 3, 130
_STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class BenchArguments:
    """The command line as typed."""

    target: str
    questions: list[str] | None
    kind: str | None
    ways: list[str] | None
    losses: list[str]
    num_losses: int | None
    batch: int | None
    input_shape: str | None
    dtype: str | None
    device: str
    threads: int | None
    grads: str | None
    processes: int | None
    rounds: int | None
    budget: float | None
    quick: bool
    rigorous: bool
    seed: int
    trust_pickle: bool
    json: str | None
    markdown: str | None
    rules: list[str]
    margin: float
    force: bool
    progress: bool | None
    debug: bool


def bench(arguments: BenchArguments) -> int:
    """Run the bench that `arguments` describe and return the exit code."""
    checked = _options(arguments)
    parsed = [rules.parse(text, checked) for text in arguments.rules]
    outputs = [name for name in (arguments.json, arguments.markdown) if name not in (None, _STANDARD_OUTPUT)]
    for name in outputs:
        check_writable(Path(name), force=arguments.force)
    if arguments.json == arguments.markdown == _STANDARD_OUTPUT:
        raise OptionError("--json, --markdown: standard output takes one of them; got both. Name a file for the other.")
    if len({Path(name).resolve() for name in outputs}) < len(outputs):
        raise OptionError(f"--json, --markdown: must be two files; got {outputs[0]!r} twice. Name another one.")
    with showing(arguments.progress) as status:
        hooks = runner.Hooks(status=status, save=lambda record: _save(record, arguments))
        record = runner.run(checked, hooks, debug=arguments.debug)
    _save(record, arguments)
    return _finish(record, arguments, parsed)


def listing() -> str:
    """Presets, questions and ways, with a line on each."""
    lines = ["Presets (questions they ask):"]
    lines += [
        f"  {name:<12} {text} ({', '.join(names.DEFAULT_QUESTIONS[name])})" for name, text in names.PRESETS.items()
    ]
    lines += ["", "Questions, and the ways that each compares; the last four are the kinds of --kind:"]
    for question, text in names.QUESTIONS.items():
        lines.append(f"  {question}: {text}")
        lines += [f"    {way:<26} {what}" for way, what in names.WAYS[question].items()]
    return "\n".join(lines)


def _options(arguments: BenchArguments) -> Options:
    if arguments.quick and arguments.rigorous:
        raise OptionError("--quick, --rigorous: a run has one mode; got both. Leave one out.")
    mode: Mode = "quick" if arguments.quick else "rigorous" if arguments.rigorous else "default"
    source = Source(
        target=arguments.target,
        batch=arguments.batch,
        num_losses=arguments.num_losses,
        losses=arguments.losses,
        input_shape=options.parse_shape(arguments.input_shape),
        dtype=arguments.dtype,
        device=arguments.device,
        trust_pickle=arguments.trust_pickle,
        seed=arguments.seed,
    )
    return options.make(
        source,
        questions=arguments.questions,
        kind=arguments.kind,
        ways=arguments.ways,
        grads=arguments.grads,
        threads=arguments.threads,
        processes=arguments.processes,
        rounds=arguments.rounds,
        budget=arguments.budget,
        margin_percent=arguments.margin,
        mode=mode,
        argv=[argument.encode(errors="backslashreplace").decode() for argument in sys.argv],
    )


def _save(record: BenchRecord, arguments: BenchArguments) -> None:
    """Keep the record so far, so that nothing measured is lost if the run is ended from outside."""
    if arguments.json not in (None, _STANDARD_OUTPUT):
        write_atomically(Path(arguments.json), encode(record))


def _finish(record: BenchRecord, arguments: BenchArguments, parsed: list[rules.Rule]) -> int:
    if arguments.markdown not in (None, _STANDARD_OUTPUT):
        write_atomically(Path(arguments.markdown), markdown.render(record).encode())
    to_stdout = [arguments.json, arguments.markdown].count(_STANDARD_OUTPUT)
    if arguments.json == _STANDARD_OUTPUT:
        sys.stdout.write(encode(record).decode())
    if arguments.markdown == _STANDARD_OUTPUT:
        sys.stdout.write(markdown.render(record))
    out = console.make_console(sys.stderr if to_stdout else sys.stdout)
    console.render(record, out)
    decisions = [(rule, *rules.decide(rule, record)) for rule in parsed]
    for rule, decision, figures in decisions:
        out.print(f"--fail-if {rule.text}: {decision} ({figures})", markup=False, highlight=False)
    if record.run.partial:
        out.print("Interrupted: the record is partial.", markup=False)
        return INTERRUPTED
    if any(decision == "true" for _, decision, _ in decisions):
        return RULE_TRUE
    return UNDECIDED if any(decision == "undecided" for _, decision, _ in decisions) else FINE
