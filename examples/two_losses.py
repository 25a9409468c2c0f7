"""Are several `loss.backward` calls cheap? The published experiment as its authors wrote it, then the bench."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from torch import Tensor, nn
from typing_extensions import override

WIDTH = 110
CELL = 8
FULL_WIDTHS = (1024, 4096, 4096, 1024)
SMALL_WIDTHS = (64, 256, 256, 64)
FUNCTIONS = ("func1", "func2", "func3", "func4")
STARTS = {"with": "With one warm-up (forward, loss1, backward)", "without": "Without a warm-up"}
SMALL_BENCH = ["--processes", "2", "--rounds", "2", "--question", "combine"]

# Per function: seconds (mean, min, max), then bytes of RSS (mean, min, max).
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "with": {
        "func1": (0.1165, 0.1138, 0.1297, 383_456_419.84, 365_731_840, 384_438_272),
        "func2": (0.1270, 0.1233, 0.1376, 400_914_759.68, 399_638_528, 434_044_928),
        "func3": (0.1167, 0.1136, 0.1272, 400_424_468.48, 399_577_088, 401_223_680),
        "func4": (0.1263, 0.1226, 0.1340, 400_815_964.16, 399_556_608, 434_307_072),
    },
    "without": {
        "func1": (0.1208, 0.1136, 0.1579, 350_157_455.36, 349_331_456, 350_978_048),
        "func2": (0.1297, 0.1232, 0.1499, 393_928_540.16, 350_052_352, 401_854_464),
        "func3": (0.1197, 0.1152, 0.1547, 350_787_338.24, 349_982_720, 351_629_312),
        "func4": (0.1335, 0.1229, 0.1793, 382_819_123.20, 349_929_472, 401_776_640),
    },
}

WHY_NOT = """
Why this design cannot answer: each function runs as one block, so whatever drifts meanwhile (clock rate,
allocator, other programs) is counted as a difference between functions, and one process is one sample; RSS is
what the system has given the process, so it need not fall when memory is freed and misses what was needed in
between; and gradients are never reset, so every call also adds to a full .grad.
"""
INSTEAD = """
What `multiback bench` does instead: it runs the ways interleaved, in fresh processes, with .grad in a stated
condition; counts the bytes that are live rather than reading RSS; compares the gradients before the times; and
judges each difference by an interval over processes, or says that it cannot tell.
"""


@dataclass(frozen=True)
class Columns:
    """What one function took: seconds of each repetition, and bytes of RSS after it."""

    seconds: list[float]
    rss: list[int]

    def figures(self) -> tuple[float, ...]:
        """The published six: mean, min and max of the time, then of the RSS."""
        return tuple(
            figure
            for column in (self.seconds, self.rss)
            for figure in (statistics.mean(column), min(column), max(column))
        )


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage lines before it."""

    @override
    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


class Experiment:
    """The published net, losses and four functions."""

    def __init__(self, widths: Sequence[int]) -> None:
        first, second, third, last = widths
        self.width = first
        self.net = relu_mlp(first, second, third, last)

    def loss1(self, x: Tensor) -> Tensor:
        """The first loss, of a forward of its own."""
        return (self.net(x) * (0.5 - x.clamp(0, 1))).sum()

    def loss2(self, x: Tensor) -> Tensor:
        """The second loss, of a forward of its own."""
        return (self.net(x) * (1 - x.clamp(0, 1))).sum()

    def new_input(self) -> Tensor:
        """One random row, with gradient as in the question."""
        return torch.rand(1, self.width, requires_grad=True)

    def separately(self, *, retain_graph: bool) -> None:
        """func1 and func3: each loss has a forward and a backward of its own."""
        x = self.new_input()
        self.loss1(x).backward(retain_graph=retain_graph)
        self.loss2(x).backward(retain_graph=retain_graph)

    def summed(self, *, retain_graph: bool) -> None:
        """func2 and func4: two forwards, one backward of the sum."""
        x = self.new_input()
        (self.loss1(x) + self.loss2(x)).backward(retain_graph=retain_graph)

    def functions(self) -> dict[str, Callable[[], None]]:
        """The four, by their published names."""
        return {
            "func1": lambda: self.separately(retain_graph=False),
            "func2": lambda: self.summed(retain_graph=False),
            "func3": lambda: self.separately(retain_graph=True),
            "func4": lambda: self.summed(retain_graph=True),
        }


def relu_mlp(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def measure(widths: Sequence[int], repetitions: int, *, warm_up: bool) -> dict[str, Columns]:
    """The four functions in blocks; gradients are never reset, as published."""
    experiment, process = Experiment(widths), psutil.Process()
    if warm_up:
        experiment.loss1(experiment.new_input()).backward()
    found: dict[str, Columns] = {}
    for name, function in experiment.functions().items():
        columns = found[name] = Columns([], [])
        for _ in range(repetitions):
            start = time.perf_counter()
            function()
            columns.seconds.append(time.perf_counter() - start)
            columns.rss.append(process.memory_info().rss)
    return found


def measure_afresh(start: str, repetitions: int, *, small: bool) -> dict[str, Columns]:
    """`measure` in a process of its own, so that nothing before it has warmed anything up."""
    command = [sys.executable, __file__, "--measure", start, "--repetitions", str(repetitions)]
    answer = subprocess.run(command + ["--small"] * small, stdout=subprocess.PIPE, check=True, text=True).stdout
    return {name: Columns(**columns) for name, columns in json.loads(answer).items()}


def table(published: dict[str, tuple[float, ...]], today: dict[str, tuple[float, ...]], *, small: bool) -> str:
    """Both 4 x 6 tables, published on the left and today's on the right."""
    half = 6 * CELL
    net = f"today, {'-'.join(map(str, SMALL_WIDTHS))} net (not comparable)" if small else "today, the same net"
    quantities = f"{'time, ms':>{half // 2}}{'RSS, MB':>{half // 2}}"
    heads = "".join(f"{head:>{CELL}}" for head in ("mean", "min", "max") * 2)
    lines = [
        f"{'':5}{'published':>{half}} |{net:>{half}}",
        f"{'':5}{quantities} |{quantities}",
        f"{'':5}{heads} |{heads}",
    ]
    for name in FUNCTIONS:
        left, right = ("".join(map(cell, figures, range(6))) for figures in (published[name], today[name]))
        lines.append(f"{name}{left} |{right}")
    return "\n".join(lines)


def cell(figure: float, column: int) -> str:
    """Seconds as milliseconds in the first three columns, bytes as megabytes in the others."""
    value = figure * 1e3 if column < 3 else figure / 1e6
    decimals = 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:{CELL}.{decimals}f}"


def first_call(columns: Columns) -> str:
    """What a block's mean hides about its first call."""
    first, *others = (1e3 * second for second in columns.seconds)
    if not others:
        return "One repetition: the first call is all there is."
    return (
        f"The first call of func1 took {first:.3g} ms, the median of the others {statistics.median(others):.3g} ms: "
        "a first call happens once per process, so this is one sample, and the mean buries it."
    )


def show_published(repetitions: int, *, small: bool) -> None:
    """The published experiment, twice, beside what was published."""
    for start, title in STARTS.items():
        found = measure_afresh(start, repetitions, small=small)
        print(f"{title}; {repetitions} repetitions of each function in blocks (published: 100)")
        print(table(PUBLISHED[start], {name: columns.figures() for name, columns in found.items()}, small=small))
        if start == "without":
            print(textwrap.fill(first_call(found["func1"]), WIDTH))
        print()
    print(textwrap.fill(WHY_NOT.strip(), WIDTH), textwrap.fill(INSTEAD.strip(), WIDTH), sep="\n", end="\n\n")


def bench(title: str, model: nn.Sequential, width: int, folder: Path, *, small: bool) -> int:
    """Save the whole model as the asker did, and give the file to the command line tool; its exit code."""
    path = folder / "model.pytorch"
    torch.save(model, path)
    arguments = [
        "bench",
        str(path),
        "--input",
        f"1x{width}",
        "--trust-pickle",
        *(SMALL_BENCH if small else ["--quick"]),
    ]
    print("=" * WIDTH, title, f"$ multiback {' '.join(arguments)}", sep="\n", end="\n\n", flush=True)
    tool = [sys.executable, "-c", "from multiback.cli import main; main()"]
    code = subprocess.run(tool + arguments, check=False).returncode
    print(flush=True)
    return code


def parser() -> OneSentenceParser:
    """The options."""
    made = OneSentenceParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent("""
            examples:
              python examples/two_losses.py                      about two minutes
              python examples/two_losses.py --repetitions 100    as many as published
              python examples/two_losses.py --small              a small net, about 20 s
              python examples/two_losses.py --folder models      keep the saved models
        """),
    )
    made.add_argument("--repetitions", type=int, metavar="N", help="of each function (default 20, with --small 2)")
    made.add_argument("--small", action="store_true", help="a small net and a short bench, to see the form of it all")
    made.add_argument("--folder", type=Path, help="keep the saved models there (default: a temporary folder)")
    made.add_argument("--no-bench", action="store_true", help="only the published experiment")
    made.add_argument("--measure", choices=tuple(STARTS), help=argparse.SUPPRESS)
    return made


def folders_for_models(options: argparse.ArgumentParser, folder: Path) -> tuple[Path, Path]:
    """A folder for each net; a model that is there already is kept."""
    two_layer, mlp = folder / "two-layer", folder / "mlp"
    for path in (two_layer, mlp):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            options.error(f"--folder: must be a folder that can be written to; {path}: {error.strerror}")
        if (path / "model.pytorch").exists():
            options.error(f"--folder: {path / 'model.pytorch'} exists already and is kept, name another folder")
    return two_layer, mlp


def main() -> int:
    """Parse, measure, show, bench."""
    options = parser()
    given = options.parse_args()
    small: bool = given.small
    repetitions: int = (2 if small else 20) if given.repetitions is None else given.repetitions
    widths = SMALL_WIDTHS if small else FULL_WIDTHS
    if repetitions < 1:
        options.error(f"--repetitions: must be 1 or more; got {repetitions}")
    if given.measure is not None:
        found = measure(widths, repetitions, warm_up=given.measure == "with")
        print(json.dumps({name: asdict(columns) for name, columns in found.items()}))
        return 0
    if given.no_bench:
        show_published(repetitions, small=small)
        return 0
    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        two_layer, mlp = folders_for_models(options, folder)
        show_published(repetitions, small=small)
        code = bench("The asker's two-layer net", relu_mlp(40, 40, 40), 40, two_layer, small=small)
        return code or bench("The answer's net", relu_mlp(*widths), widths[0], mlp, small=small)


if __name__ == "__main__":
    sys.exit(main())
