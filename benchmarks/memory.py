"""Exact peak bytes above those alive when a call starts: of `mb.backward`, and of K = 32 gradients of P bytes each.

`mb.backward` is held against torch's own traversal of the same losses; the gradients against P, on perceptrons,
whose parameters outweigh all that passes between their layers; and `mb.jac` against the budget that it is given.
Every figure is taken in several processes; the interval runs from the smallest to the largest.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

import multiback as mb
from answers import message_of
from harness import Design, Table, in_child, options
from multiback.measure import memory
from nets import NETS, perceptron
from peers import dense_case

COUNT = 32
BATCHES = (1, 256, 8192)
BUDGETS = (1.1, 1.5, 3.0)  # of the K x P bytes of the result
DENSE_BATCH = 16
PROCESSES = 2

Gradient = Literal["existing", "None"]
Losses = Tensor | list[Tensor]
Work = Callable[[Losses, tuple[nn.Parameter, ...]], object]


@dataclass(frozen=True)
class Figure:
    """`measure` gives peak bytes and the bytes to hold them against, of which they may be `target` times as many."""

    name: str
    measure: Callable[[], tuple[int, int]]
    target: float
    smoke: bool = True
    may_refuse: bool = False


@dataclass(frozen=True)
class Fault:
    """Why a figure could not be taken."""

    reason: str
    refused: bool


def published_net() -> nn.Sequential:
    """The 1024-4096-4096-1024 ReLU net."""
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024))


def both_traversals(batch: int, gradient: Gradient) -> tuple[int, int]:
    """The peaks of `mb.backward` and of `torch.autograd.backward` on two losses of the published net."""
    found: list[int] = []
    for traverse in (mb.backward, torch.autograd.backward):
        model, data = published_net(), torch.rand(batch, 1024)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if gradient == "existing" else None
        losses = two_losses(model(data), data)
        found.append(memory.live_bytes(partial(traverse, losses)).peak)
    return found[0], found[1]


def two_losses(output: Tensor, data: Tensor) -> list[Tensor]:
    """The two published losses."""
    return [(output * (0.5 - data)).sum(), (output * (1 - data)).sum()]


def per_loss(make: Callable[[], nn.Module], width: int, work: Work) -> tuple[int, int]:
    """The peak of work on 32 losses of two rows, and P."""
    model = make()
    parameters = tuple(model.parameters())
    output = model(torch.rand(2, width))
    losses: Losses = [(output * torch.randn(output.shape)).sum() for _ in range(COUNT)]
    del output
    return memory.live_bytes(lambda: work(losses, parameters)).peak, bytes_of(parameters)


def within_budget(net: str, share: float) -> tuple[int, int]:
    """The peak of `mb.jac` on dense losses, and the budget that it was given."""
    case = dense_case(net, DENSE_BATCH, COUNT)
    losses, parameters = case.losses(), case.parameters
    budget = int(share * COUNT * bytes_of(parameters))
    return memory.live_bytes(lambda: mb.jac(losses, parameters, budget=budget)).peak, budget


def bytes_of(parameters: tuple[nn.Parameter, ...]) -> int:
    """P, in bytes."""
    return sum(parameter.nbytes for parameter in parameters)


def each(losses: Losses, parameters: tuple[nn.Parameter, ...]) -> None:
    """The gradients one after another, each let go when the next one has come."""
    for _ in mb.each(losses, parameters):
        pass


def each_reused(losses: Losses, parameters: tuple[nn.Parameter, ...]) -> None:
    """The same in one set of buffers."""
    for _ in mb.each(losses, parameters, reuse=True):
        pass


def norms(losses: Losses, parameters: tuple[nn.Parameter, ...]) -> object:
    """The K norms."""
    return mb.norms(losses, parameters)


def figures() -> Iterator[Figure]:
    """Everything that is measured."""
    gradients: tuple[Gradient, ...] = ("existing", "None")
    for batch in BATCHES:
        for gradient in gradients:
            name = f"published net, batch {batch}, .grad {gradient}: mb.backward / autograd.backward"
            yield Figure(name, partial(both_traversals, batch, gradient), 1.05, smoke=batch == 1)
    ways: tuple[tuple[str, Work, float], ...] = (
        ("mb.each", each, 2.2),
        ("mb.each(reuse=True)", each_reused, 1.2),
        ("mb.norms", norms, 1.2),
    )
    for net, make, width in (("published net", published_net, 1024), ("perceptron", perceptron, 256)):
        for way, work, target in ways:
            measure = partial(per_loss, make, width, work)
            yield Figure(f"{net}, K = {COUNT}: {way} / P", measure, target, smoke=make is perceptron)
    for net in NETS:
        for share in BUDGETS:
            name = f"{net}, K = {COUNT}: mb.jac / its budget of {share} K P"
            yield Figure(name, partial(within_budget, net, share), 1.0, may_refuse=True)


def take(figure: Figure, design: Design, table: Table) -> str:
    """Add a figure to the table; a line with the bytes themselves, or with the reason why there are none."""

    def measure() -> tuple[int, int] | Fault:
        torch.manual_seed(0)
        try:
            return figure.measure()
        except Exception as error:
            return Fault(message_of(error), isinstance(error, mb.MultibackError))

    found = [in_child(measure, figure.name) for _ in range(design.processes)]
    faults = [item for item in found if isinstance(item, Fault)]
    if faults:
        if not (figure.may_refuse and faults[0].refused):
            table.fail(figure.name, faults[0].reason)
        return f"{figure.name}: no figure: {faults[0].reason}"
    pairs = [item for item in found if not isinstance(item, Fault)]
    ratios = sorted(peak / base for peak, base in pairs)
    table.add(figure.name, ratios[len(ratios) // 2], (ratios[0], ratios[-1]), figure.target, most=True)
    return f"{figure.name}: {pairs[0][0]:,} / {pairs[0][1]:,} bytes."


def conduct(description: str, figures: Iterator[Figure], *, processes: int = PROCESSES) -> int:
    """Take the figures and print a Markdown table; 1 where a target is missed."""
    design = options(description, processes=processes, rounds=None)
    fault = in_child(memory.self_test, "self-test")
    if fault:
        raise SystemExit(f"Bytes cannot be counted here: {fault}.")
    table = Table()
    chosen = [figure for figure in figures if design.only in figure.name and (figure.smoke or not design.smoke)]
    notes = [take(figure, design, table) for figure in chosen]
    print("\n" + "\n".join(f"- {note}" for note in notes))
    return table.status(smoke=design.smoke)


if __name__ == "__main__":
    sys.exit(conduct(__doc__ or "", figures()))
