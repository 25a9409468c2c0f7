"""`mb.rows`: every image's own gradient against the loop, and per-sample parameter gradients against the usual ways.

`static` is the default, which on these nets proves the rows independent by looking; `assumed` takes the caller's
word; `certified` has losses behind an operation that says nothing about itself, so that an extra traversal is run.
For images the backward alone is timed, on a graph that is there; for parameters the forward pass is part of
every time, since the usual ways cannot do without it.
"""

import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

import multiback as mb
from harness import Calls, Claim, Experiment, Mean, Prepare, lazily, main
from multiback.benching.problems import tutorial_net
from nets import NETS
from peers import Case, backpack_rows, functional_rows, loop, on_graph, opacus_rows, sliced_case

IMAGES = 128
BATCHES = (8, 64)
PEERS = ("torch.func", "Opacus", "BackPACK")
STATIC = "best of the usual ways / mb.rows static"
ASSUMED = "best of the usual ways / mb.rows assumed"
CERTIFIED = "best of the usual ways / mb.rows certified"


class Opaque(torch.autograd.Function):
    """Gives its input; nothing can be known of it without running it."""

    generate_vmap_rule = True

    @override
    @staticmethod
    def forward(*args: Any, **_options: Any) -> Tensor:
        """Copy the value."""
        return args[0].clone()

    @override
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save nothing."""

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Pass the gradient on."""
        return gradients[0]


def opaque(losses: Tensor) -> Tensor:
    """The losses behind an operation that no static proof reaches through."""
    found: Any = Opaque.apply(losses)
    return found


def ours(case: Case, mode: Literal["certify", "assume"], *, behind: bool = False) -> Prepare:
    """`mb.rows` on the parameters of a case."""

    def answer(losses: Tensor, parameters: tuple[Tensor, ...]) -> object:
        return mb.rows(opaque(losses) if behind else losses, parameters, independence=mode)

    return on_graph(case, answer)


def per_sample(net: str, batch: int) -> Experiment:
    """The gradient of every row's loss with respect to the parameters."""

    def build() -> Calls:
        case = sliced_case(net, batch, batch)
        return {
            "loop": on_graph(case, loop),
            "torch.func": lazily(lambda: functional_rows(case)),
            "Opacus": lazily(lambda: opacus_rows(case)),
            "BackPACK": lazily(lambda: backpack_rows(case)),
            "mb.rows static": ours(case, "certify"),
            "mb.rows assumed": ours(case, "assume"),
            "mb.rows certified": ours(case, "certify", behind=True),
        }

    claims = [
        Claim(PEERS, "mb.rows static", 1.0, group=STATIC),
        Claim(PEERS, "mb.rows assumed", 1.0, group=ASSUMED),
        Claim(PEERS, "mb.rows certified", 0.85, group=CERTIFIED),
    ]
    return Experiment(f"{net}, B = {batch}", build, claims, reference="loop", smoke=batch == 8)


def images() -> Experiment:
    """The gradient of every image's loss with respect to that image."""

    def build() -> Calls:
        model = tutorial_net()
        data = torch.rand(IMAGES, 3, 32, 32, requires_grad=True)
        targets = torch.randint(10, (IMAGES,))
        criterion = nn.CrossEntropyLoss(reduction="none")

        def retained(losses: Tensor) -> object:
            return [
                (torch.autograd.grad(loss, data, retain_graph=True)[0][j].clone(),) for j, loss in enumerate(losses)
            ]

        def summed(losses: Tensor) -> object:
            return torch.autograd.grad(losses.sum(), data)

        def prepared(answer: Callable[[Tensor], object]) -> Prepare:
            def prepare() -> Callable[[], object]:
                losses = criterion(model(data), targets)
                return lambda: answer(losses)

            return prepare

        return {
            "retained loop": prepared(retained),
            "one summed traversal": prepared(summed),
            "mb.rows static": prepared(lambda losses: mb.rows(losses, data)),
            "mb.rows assumed": prepared(lambda losses: mb.rows(losses, data, independence="assume")),
            "mb.rows certified": prepared(lambda losses: mb.rows(opaque(losses), data)),
        }

    claims = [
        Claim("retained loop", "mb.rows static", 100.0),
        Claim("mb.rows static", "one summed traversal", 1.1, most=True),
        Claim("mb.rows assumed", "one summed traversal", 1.1, most=True),
        Claim("mb.rows certified", "one summed traversal", 2.2, most=True),
    ]
    return Experiment(f"tutorial net, {IMAGES} images", build, claims, reference="one summed traversal")


EXPERIMENTS = [images(), *(per_sample(net, batch) for net in NETS for batch in BATCHES)]

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", EXPERIMENTS, [Mean(STATIC, 1.6), Mean(ASSUMED, 1.6), Mean(CERTIFIED, 1.2)]))
