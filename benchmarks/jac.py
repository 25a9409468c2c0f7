"""`mb.jac` with respect to parameters: K dense losses against the usual ways, and K disjoint slices against the loop.

Dense losses: the forward pass is part of every time, since torch.func cannot do without it.
Slices: the backward alone, on a graph that is there.
"""

import sys

from torch import Tensor

import multiback as mb
from harness import Calls, Claim, Experiment, Mean, Prepare, lazily, main
from nets import NETS
from peers import (
    Case,
    batched,
    dense_case,
    functional_jacobian,
    loop,
    on_graph,
    sliced_case,
    torchjd_jac,
)

COUNTS = (2, 8, 32)
BATCH = {"perceptron": 64, "conv net": 64, "transformer": 16}
SLICED_BATCH = 64
PEERS = ("loop", "is_grads_batched", "torch.func", "TorchJD")
AUTO = "best of the usual ways / mb.jac"
TORCHJD = "TorchJD / mb.jac"


def auto(losses: Tensor, parameters: tuple[Tensor, ...]) -> object:
    """`mb.jac`, which chooses for itself."""
    return mb.jac(losses, parameters)


def tuned(case: Case) -> Prepare:
    """`mb.jac` by a plan that was measured beforehand."""
    plan = mb.tune(case.losses(), case.parameters, kind="each")
    return on_graph(case, lambda losses, parameters: mb.jac(losses, parameters, method=plan))


def dense(net: str, count: int) -> Experiment:
    """K losses that each depend on the whole batch."""

    def build() -> Calls:
        case = dense_case(net, BATCH[net], count)
        return {
            "loop": on_graph(case, loop),
            "is_grads_batched": on_graph(case, batched),
            "torch.func": lazily(lambda: functional_jacobian(case)),
            "TorchJD": on_graph(case, torchjd_jac),
            "mb.jac": on_graph(case, auto),
            "mb.jac tuned": lazily(lambda: tuned(case)),
        }

    claims = [
        Claim(PEERS, "mb.jac", 0.85, group=AUTO),
        Claim(PEERS, "mb.jac tuned", 0.95),
        Claim("TorchJD", "mb.jac", group=TORCHJD),
    ]
    return Experiment(f"{net}, K = {count}", build, claims, reference="loop", smoke=count == 8)


def sliced(net: str, count: int) -> Experiment:
    """K losses of disjoint slices of the batch."""

    def build() -> Calls:
        case = sliced_case(net, SLICED_BATCH, count)
        return {
            "retained loop": on_graph(case, loop, forward=False),
            "mb.jac": on_graph(case, auto, forward=False),
        }

    name = f"{net}, {count} slices of {SLICED_BATCH // count}"
    claims = [Claim("retained loop", "mb.jac", 0.6 * count)]
    return Experiment(name, build, claims, reference="retained loop", smoke=count == 8)


EXPERIMENTS = [make(net, count) for make in (dense, sliced) for net in NETS for count in COUNTS]

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", EXPERIMENTS, [Mean(AUTO, 1.0), Mean(TORCHJD, 1.3)]))
