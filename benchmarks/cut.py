"""`mb.cut`: the gradients of a few images of 512, by running them again, against a traversal of the retained graph.

The published slice question: all images have been inferred, and a slice's image gradients are wanted. The retained
way traverses the graph of all 512 for any slice, on as many threads as there are cores; the cut runs the slice's rows
again, which is no faster on more than one. Inference is not timed.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

import multiback as mb
from harness import Calls, Claim, Experiment, Prepare, main
from multiback.benching.problems import tutorial_net
from nets import NETS
from peers import sliced_case

IMAGES = 512
COUNTS = (1, 8, 64, 256)
SLICES = 16
GROWTH = 1.15  # times the number of rows


def images(count: int, smoke: int, *, in_turn: bool = False, threads: int | None = None) -> Experiment:
    """The image gradients of slices of several sizes."""

    def build() -> Calls:
        if threads is not None:
            torch.set_num_threads(threads)
        model, data = tutorial_net(), torch.rand(count, 3, 32, 32)
        targets = torch.randint(10, (count,))
        criterion = nn.CrossEntropyLoss(reduction="sum")

        def retained() -> Callable[[], object]:
            leaf = data.clone().requires_grad_()
            loss = criterion(model(leaf)[:1], targets[:1])
            return lambda: (torch.autograd.grad(loss, leaf, retain_graph=True)[0][:1],)

        def cut(rows: int, keep: Literal["recompute", "graph"]) -> Callable[[], object]:
            made = mb.cut(model, data, batch_size=count, keep=keep)
            loss = criterion(made.value[:rows], targets[:rows])
            return lambda: (made.grad_of(loss, retain_graph=True).values[:1],)

        def retained_slices() -> Callable[[], object]:
            leaf = data.clone().requires_grad_()
            output = model(leaf)

            def call() -> object:
                losses = [criterion(output[j : j + 1], targets[j : j + 1]) for j in range(SLICES)]
                return tuple(torch.autograd.grad(loss, leaf, retain_graph=True)[0][j] for j, loss in enumerate(losses))

            return call

        def cut_slices() -> Callable[[], object]:
            made = mb.cut(model, data, batch_size=count, keep="recompute")

            def call() -> object:
                losses = [criterion(made.value[j : j + 1], targets[j : j + 1]) for j in range(SLICES)]
                return tuple(made.grad_of(loss).values[0] for loss in losses)

            return call

        if in_turn:
            return {"retained loop": retained_slices, "mb.cut in a loop": cut_slices}
        calls: dict[str, Prepare] = {"retained graph": retained}
        calls |= {name_of(rows): partial(cut, rows, "recompute") for rows in COUNTS if rows < count}
        calls["mb.cut, 1 row, graph kept"] = partial(cut, 1, "graph")
        return calls

    if in_turn:
        claims = [Claim("retained loop", "mb.cut in a loop", 20.0)]
        name = f"tutorial net, {count} images, {SLICES} slices of one in turn{', one thread' * (threads == 1)}"
        return Experiment(name, build, claims, reference="retained loop", smoke=False)
    pairs = [(fewer, more) for fewer, more in itertools.pairwise(COUNTS) if more < count]
    claims = [
        Claim("retained graph", name_of(1), 20.0),
        *(Claim(name_of(more), name_of(fewer), GROWTH * more / fewer, most=True) for fewer, more in pairs),
    ]
    return Experiment(f"tutorial net, {count} images", build, claims, reference="retained graph", smoke=count == smoke)


def name_of(rows: int) -> str:
    """What a way is called."""
    return f"mb.cut, {rows} row{'s' * (rows > 1)}"


def training(net: str) -> Experiment:
    """Many losses on one forward, into `.grad` of all parameters: a backward each, or on a cut and one traversal."""

    def build() -> Calls:
        case = sliced_case(net, 64, 32)

        def losses(output: Tensor) -> list[Tensor]:
            return [part.square().mean() for part in output.chunk(32)]

        def retained() -> Callable[[], object]:
            output = case.net(case.data)

            def call() -> object:
                for parameter in case.parameters:
                    parameter.grad = None
                found = losses(output)
                for number, loss in enumerate(found, 1):
                    loss.backward(retain_graph=number < len(found))
                return [parameter.grad for parameter in case.parameters]

            return call

        def summed() -> Callable[[], object]:
            output = case.net(case.data)

            def call() -> object:
                for parameter in case.parameters:
                    parameter.grad = None
                torch.stack(losses(output)).sum().backward()
                return [parameter.grad for parameter in case.parameters]

            return call

        def by_hand() -> Callable[[], object]:
            output = case.net(case.data)

            def call() -> object:
                for parameter in case.parameters:
                    parameter.grad = None
                leaf = output.detach().requires_grad_()
                for loss in losses(leaf):
                    loss.backward()
                output.backward(leaf.grad)
                return [parameter.grad for parameter in case.parameters]

            return call

        def cut() -> Callable[[], object]:
            output = case.net(case.data)

            def call() -> object:
                for parameter in case.parameters:
                    parameter.grad = None
                with mb.cut(output) as made:
                    for loss in losses(made.value):
                        loss.backward()
                return [parameter.grad for parameter in case.parameters]

            return call

        return {
            "retained loop": retained,
            "one summed traversal": summed,
            "a detached leaf by hand": by_hand,
            "mb.cut(output)": cut,
        }

    claims = [
        Claim("retained loop", "mb.cut(output)", 5.0),
        Claim("mb.cut(output)", "one summed traversal", 2.0, most=True),
        Claim("mb.cut(output)", "a detached leaf by hand", 1.5, most=True),
    ]
    return Experiment(f"{net}, 32 slices of 64", build, claims, reference="one summed traversal", smoke=False)


EXPERIMENTS = [
    images(IMAGES, 16),
    images(IMAGES, 16, in_turn=True),
    images(IMAGES, 16, in_turn=True, threads=1),
    images(16, 16),
    *(training(net) for net in NETS),
]

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", EXPERIMENTS))
