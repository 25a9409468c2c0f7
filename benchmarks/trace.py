"""`mb.trace`: what recording costs steps of about 50 ms, and what it holds after a million trivial ones.

All ways take the same steps on parameters of their own, in one process, in turn; the sampled step looks at what names
hold as well. The recorder walks the graph for the first calls of every place, and for later ones as a hundredth of the
recorded time allows; so a way first takes steps that are not timed, until the first walks have been made up for, and a
timed call is of several steps, enough for what walks are still made to fall into each. A recording stands still between
its calls, its clock too; starting it and finishing it is not timed. The memory is what the resident set grows by over
all steps, beyond what it grows by without a recording, as a share of 50 MiB.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import harness
from harness import Calls, Claim, Experiment, Prepare, Run, in_child, lazily, options
from memory import Figure, take
from multiback.tracing import recorder

SHARE = 1.05
FEWEST = 12  # steps before any is timed
TRIVIAL, TRIVIAL_SMOKE = 1_000_000, 20_000
ROOM = 50 * 2**20
PROCESSES = 2  # of the trivial steps

Answer = list[Tensor]
Step = Callable[[], Answer]


class Recorded:
    """A step that is recorded while it runs, and only then."""

    def __init__(self, step: Step, *, sample_locals: bool) -> None:
        self._step = step
        self._recording = recorder.start(sample_locals=sample_locals)
        self._stand_still()

    def _stand_still(self) -> None:
        self._recording.active = False
        self._stopped = time.perf_counter()

    def __call__(self) -> Answer:
        """Take the step."""
        outside = time.perf_counter() - self._stopped  # which affords neither walks nor looks
        self._recording._begun += outside
        self._recording._looks._begun += outside
        self._recording.active = True
        try:
            return self._step()
        finally:
            self._stand_still()

    def answer(self, found: Answer) -> Answer:
        """What was found, once the recording has ended without a fault."""
        self._recording.active = True
        record = self._recording.finish("measured")
        if record.faults or not record.sites:
            raise RuntimeError(f"the recording saw {len(record.sites)} places; faults: {record.faults}")
        return found


def experiment(name: str, make: Callable[[], Step], steps: int, warm_up: int) -> Experiment:
    """Calls of `steps` steps each, plain, traced and sampled, after `warm_up` steps of either."""

    def repeated(step: Step) -> Answer:
        for _ in range(steps - 1):
            step()
        return step()

    def plain() -> Prepare:
        step = make()
        for _ in range(warm_up):
            step()
        return lambda: partial(repeated, step)

    def traced(*, sample_locals: bool) -> Prepare:
        recorded = Recorded(make(), sample_locals=sample_locals)
        for _ in range(warm_up):
            recorded()

        def call() -> object:
            return partial(recorded.answer, repeated(recorded))

        return lambda: call

    def build() -> Calls:
        return {
            "plain step": lazily(plain),
            "traced step": lazily(partial(traced, sample_locals=False)),
            "sampled step": lazily(partial(traced, sample_locals=True)),
        }

    claims = [Claim(way, "plain step", SHARE, most=True) for way in ("traced step", "sampled step")]
    return Experiment(name, build, claims, reference="plain step")


def transformer() -> Step:
    """A training step of six encoder layers of width 128, on six sentences of 64 tokens, with AdamW."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(500, 128), encoder, nn.Linear(128, 500))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, labels = torch.randint(500, (6, 64)), torch.randint(500, (6 * 64,))

    def step() -> Answer:
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens).flatten(0, 1), labels)
        loss.backward()
        optimizer.step()
        return gradients(model)

    return step


def recurrent() -> Step:
    """A training step of a GRU cell called 187 times in turn, with a loss at each; its graph has about 3,000 nodes."""
    torch.manual_seed(0)
    cell, head = nn.GRUCell(64, 128), nn.Linear(128, 10)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sequence, labels = torch.randn(187, 16, 64), torch.randint(10, (187 * 16,))

    def step() -> Answer:
        optimizer.zero_grad()
        states = [torch.zeros(16, 128)]
        for entry in sequence:
            states.append(cell(entry, states[-1]))
        loss = cross_entropy(head(torch.cat(states[1:])), labels)
        loss.backward()
        optimizer.step()
        return gradients(model)

    return step


def five_heads() -> Step:
    """A training step of five heads on one trunk, with a backward each that keeps the graph."""
    torch.manual_seed(0)
    trunk = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())))
    heads = nn.ModuleList(nn.Linear(768, 10) for _ in range(5))
    model = nn.ModuleList([trunk, heads])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows, labels = torch.randn(160, 768), torch.randint(10, (160,))

    def step() -> Answer:
        optimizer.zero_grad()
        hidden = trunk(rows)
        for head in heads:
            cross_entropy(head(hidden), labels).backward(retain_graph=True)
        optimizer.step()
        return gradients(model)

    return step


def gradients(model: nn.Module) -> Answer:
    """The gradients that a step has left."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def growth(steps: int, *, traced: bool) -> int:
    """The bytes by which the resident set grows over that many trivial steps, a recording of them still being open."""
    w = torch.ones(4, requires_grad=True)
    before = resident()
    recording = recorder.start() if traced else None
    for _ in range(steps):
        (w * 2).sum().backward()
        w.grad = None
    after = resident()
    if recording is not None:
        record = recording.finish("measured")
        if record.faults or sum(site.calls for site in record.sites) != steps:
            raise RuntimeError(f"not all of {steps:,} steps were recorded; faults: {record.faults}")
    return after - before


def resident() -> int:
    """VmRSS, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def trivial(steps: int) -> tuple[int, int]:
    """How much more a traced run's resident set grows than a plain one's, and how much it may."""
    traced, plain = (in_child(partial(growth, steps, traced=one), "trivial steps") for one in (True, False))
    return max(0, traced - plain), ROOM


def experiments(*, smoke: bool) -> list[Experiment]:
    """The three kinds of step; in a smoke run each call is of one."""
    works = [
        ("training step of a transformer", transformer, 8, 40),
        ("recurrent step, 3,000 nodes", recurrent, 20, 100),
        ("five heads, a retaining backward each", five_heads, 4, FEWEST),
    ]
    return [
        experiment(name, make, 1 if smoke else steps, FEWEST if smoke else warm_up)
        for name, make, steps, warm_up in works
    ]


def main() -> int:
    """Run everything and print a Markdown table; 1 where a target is surely missed."""
    design = options(__doc__ or "")
    run = Run()
    for one in experiments(smoke=design.smoke):
        if design.only in one.name:
            harness._conduct(run, one, design)
    count = TRIVIAL_SMOKE if design.smoke else TRIVIAL
    figure = Figure(f"{count:,} trivial steps: growth traced, beyond plain / 50 MiB", partial(trivial, count), 1.0)
    if design.only in figure.name:
        few = replace(design, processes=min(PROCESSES, design.processes))
        run.notes.append(take(figure, few, run.table))
    print("\n" + "\n".join(f"- {note}" for note in run.notes))
    return run.table.status(smoke=design.smoke)


if __name__ == "__main__":
    sys.exit(main())
