"""`mb.gram` of one loss per row against TorchJD's autogram engine; the forward pass is part of every time."""

import sys

from torch import Tensor

import multiback as mb
from harness import Calls, Claim, Experiment, Mean, lazily, main
from nets import NETS
from peers import engine_gramian, loop_gramian, on_graph, sliced_case

BATCHES = (8, 64)
DEFAULT = "TorchJD / mb.gram"
ASSUMED = "TorchJD / mb.gram assumed"


def auto(losses: Tensor, parameters: tuple[Tensor, ...]) -> object:
    """`mb.gram` as it comes."""
    return mb.gram(losses, parameters)


def assumed(losses: Tensor, parameters: tuple[Tensor, ...]) -> object:
    """`mb.gram` where the caller vouches for the rows."""
    return mb.gram(losses, parameters, independence="assume")


def row_losses(net: str, batch: int) -> Experiment:
    """The Gramian of B losses of one row each."""

    def build() -> Calls:
        case = sliced_case(net, batch, batch)
        return {
            "loop": on_graph(case, loop_gramian),
            "TorchJD": lazily(lambda: engine_gramian(case)),
            "mb.gram": on_graph(case, auto),
            "mb.gram assumed": on_graph(case, assumed),
        }

    claims = [Claim("TorchJD", "mb.gram", group=DEFAULT), Claim("TorchJD", "mb.gram assumed", group=ASSUMED)]
    return Experiment(f"{net}, B = {batch}", build, claims, reference="loop", smoke=batch == 8)


EXPERIMENTS = [row_losses(net, batch) for net in NETS for batch in BATCHES]

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", EXPERIMENTS, [Mean(DEFAULT, 5.0), Mean(ASSUMED, 5.0)]))
