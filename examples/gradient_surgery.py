"""Two losses that pull one trunk apart: their Jacobian by `mb.jac`, combined by TorchJD's PCGrad and UPGrad."""

import argparse
import copy
import sys
import textwrap
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import override

import multiback as mb

ROWS, INPUTS, WIDTH = 64, 6, 4
Aggregator = Callable[[Tensor], Tensor]


class MissingError(Exception):
    """TorchJD cannot be had; the message is one sentence."""


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage lines before it."""

    @override
    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def aggregators(count: int) -> tuple[dict[str, Aggregator], Aggregator]:
    """Ways to make one direction of a Jacobian [K, P], and UPGrad's weights [K] of a Gramian [K, K].

    Where no two gradients conflict, all give the sum.
    """
    try:
        from torchjd.aggregation import PCGrad, UPGrad, UPGradWeighting
    except ImportError as error:
        raise MissingError('PCGrad and UPGrad come with TorchJD; pip install "torchjd[quadprog_projector]"') from error
    ones = torch.ones(count)
    ways: dict[str, Aggregator] = {
        "sum": lambda jacobian: jacobian.sum(0),
        "PCGrad": PCGrad(),
        "UPGrad": UPGrad(ones),
    }
    return ways, UPGradWeighting(ones)


class Tasks:
    """A trunk with one head per task; heads start alike, targets disagree in direction and in scale."""

    def __init__(self, count: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.trunk = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh())
        head = nn.Linear(WIDTH, 1)
        self.heads = nn.ModuleList(copy.deepcopy(head) for _ in range(count))
        self.data = torch.randn(ROWS, INPUTS)
        common = torch.randn(INPUTS, 1)
        wanted = [(-1) ** k * common + 0.5 * torch.randn(INPUTS, 1) for k in range(count)]
        self.targets = [2.0**k * (self.data @ direction).tanh() for k, direction in enumerate(wanted)]
        self.optimiser = torch.optim.SGD([*self.trunk.parameters(), *self.heads.parameters()], lr=0.01)

    def losses(self) -> list[Tensor]:
        """One forward through the trunk, one loss per head."""
        hidden = self.trunk(self.data)
        return [(head(hidden) - target).square().mean() for head, target in zip(self.heads, self.targets, strict=True)]

    def step(self, aggregate: Aggregator) -> None:
        """The trunk follows the aggregate of all gradients, each head its own loss."""
        losses = self.losses()
        direction = aggregate(jacobian(losses, self.trunk))
        self.optimiser.zero_grad()
        mb.backward(losses, wrt=self.heads)  # frees the graph that `jacobian` kept
        write(direction, self.trunk)
        self.optimiser.step()


def jacobian(losses: list[Tensor], module: nn.Module) -> Tensor:
    """The gradients of all losses as one matrix [K, P]; the graph is kept."""
    by_name = mb.jac(losses, module, retain_graph=True)
    return torch.cat([part.flatten(1) for part in by_name.values()], dim=1)


def write(direction: Tensor, module: nn.Module) -> None:
    """A vector [P] into `.grad`, in the order of `jacobian`."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    parts = direction.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.reshape(parameter.shape).clone()


def projected(first: Tensor, second: Tensor) -> Tensor:
    """PCGrad of two gradients by hand: each loses what points against the other, then they are added."""
    product = first @ second
    if product >= 0:
        return first + second
    return (first - product / (second @ second) * second) + (second - product / (first @ first) * first)


def require(statement: str, *, holds: bool) -> None:
    """Print a statement that holds; raise where it does not."""
    if not holds:
        raise ArithmeticError(f"does not hold: {statement}")
    print(f"  holds: {statement}")


def show_first_step(tasks: Tasks, ways: dict[str, Aggregator], weighting: Aggregator) -> None:
    """What each way would do to each loss, to first order, from the same point."""
    matrix = jacobian(tasks.losses(), tasks.trunk)
    norms = matrix.norm(dim=1)
    cosines = matrix @ matrix.T / (norms[:, None] * norms)
    print(f"Norms of the {len(matrix)} gradients at the trunk: {numbers(norms)}")
    for first, second in torch.combinations(torch.arange(len(matrix))).tolist():
        print(f"Cosine between gradients {first + 1} and {second + 1}: {cosines[first, second]:.3f}")
    print("How fast a small step along each direction lowers each loss (negative: the loss rises)")
    for name, way in ways.items():
        print(f"{name:>8}: {numbers(matrix @ way(matrix))}")
    slack = 1e-3 * float(norms.max()) ** 2  # UPGrad regularises the problem it solves
    require(
        "along UPGrad's direction no loss rises, to first order",
        holds=bool((matrix @ ways["UPGrad"](matrix) >= -slack).all()),
    )
    weights = weighting(mb.gram(tasks.losses(), tasks.trunk))
    require(
        "UPGrad's weights made of mb.gram give the same direction, with no Jacobian held",
        holds=torch.allclose(weights @ matrix, ways["UPGrad"](matrix), rtol=1e-3, atol=1e-3 * float(norms.max())),
    )
    if len(matrix) == 2:
        require(
            "PCGrad is the sum of the two gradients, each without what points against the other",
            holds=torch.allclose(ways["PCGrad"](matrix), projected(*matrix), rtol=1e-4, atol=1e-4 * float(norms.max())),
        )
        print("  With two losses UPGrad gives the same direction but for rounding; with three or more they differ.")


def show_training(count: int, seed: int, steps: int, ways: dict[str, Aggregator]) -> None:
    """The losses before and after some steps, each way from the same start."""
    print(f"\nThe losses before and after {steps} steps of SGD, from the same start")
    for name, way in ways.items():
        tasks = Tasks(count, seed)
        before = numbers(torch.stack(tasks.losses()).detach())
        for _ in range(steps):
            tasks.step(way)
        print(f"{name:>8}: {before} -> {numbers(torch.stack(tasks.losses()).detach())}")


def numbers(values: Tensor) -> str:
    """Four significant digits each."""
    return "[" + " ".join(f"{value:.4g}" for value in values.tolist()) + "]"


def parser() -> OneSentenceParser:
    """The options."""
    made = OneSentenceParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent("""
            examples:
              python examples/gradient_surgery.py
              python examples/gradient_surgery.py --losses 3    where PCGrad and UPGrad differ
        """),
    )
    made.add_argument("--losses", type=int, default=2, metavar="K", help="tasks on the trunk (default 2)")
    made.add_argument("--steps", type=int, default=10, metavar="N", help="steps of each way (default 10)")
    made.add_argument("--seed", type=int, default=2, help="of weights and data (default 2)")
    return made


def main() -> int:
    """Parse and show."""
    options = parser()
    given = options.parse_args()
    if given.losses < 2:
        options.error(f"--losses: must be 2 or more, since gradients are compared; got {given.losses}")
    if given.steps < 1:
        options.error(f"--steps: must be 1 or more; got {given.steps}")
    try:
        ways, weighting = aggregators(given.losses)
    except MissingError as error:
        options.error(str(error))
    show_first_step(Tasks(given.losses, given.seed), ways, weighting)
    show_training(given.losses, given.seed, given.steps, ways)
    return 0


if __name__ == "__main__":
    sys.exit(main())
