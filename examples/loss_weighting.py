"""Three losses weighted by the norms of their gradients at the shared layer, which `mb.norms` reads on the way."""

import argparse
import sys
import textwrap
from typing import NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import override

import multiback as mb

ROWS, INPUTS, WIDTH = 64, 8, 16
SCALES = (1.0, 6.0, 0.02)


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage lines before it."""

    @override
    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


class Tasks:
    """A trunk whose last layer is shared by three heads; the losses' scales are far apart."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.trunk = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), self.shared, nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in SCALES)
        self.data = torch.randn(ROWS, INPUTS)
        self.targets = [(self.data @ torch.randn(INPUTS, 1)).tanh() for _ in SCALES]
        self.parameters = [*self.trunk.parameters(), *self.heads.parameters()]
        self.optimiser = torch.optim.Adam(self.parameters, lr=0.01)

    def losses(self) -> list[Tensor]:
        """One forward through the trunk, one loss per head."""
        hidden = self.trunk(self.data)
        parts = zip(SCALES, self.heads, self.targets, strict=True)
        return [scale * (head(hidden) - target).square().mean() for scale, head, target in parts]

    def fresh(self) -> None:
        """Nothing in any `.grad`."""
        self.optimiser.zero_grad()


def weights_for(norms: Tensor, progress: Tensor, alpha: float) -> Tensor:
    """Weights, K in sum, with which every norm is the mean norm times the loss's relative pace to the power alpha.

    These are GradNorm's aims (Chen et al. 2018, arXiv:1711.02257). It nears them by gradient steps on
    the weights; since a norm is proportional to its loss's weight, they can be met at once.
    """
    pace = progress / progress.mean()
    weights = pace**alpha / norms
    return weights * len(weights) / weights.sum()


def separate(tasks: Tasks) -> Tensor:
    """Norms by a traversal of its own for every loss."""
    losses, layer = tasks.losses(), tuple(tasks.shared.parameters())
    found = [torch.autograd.grad(loss, layer, retain_graph=True) for loss in losses]
    return torch.stack([length(list(gradients)) for gradients in found])


def accumulating(tasks: Tasks) -> Tensor:
    """The mistake: `.grad` read after each `backward()`, where it holds the sum of all losses so far."""
    tasks.fresh()
    found = []
    for loss in tasks.losses():
        loss.backward(retain_graph=True)
        found.append(length([gradient_of(parameter) for parameter in tasks.shared.parameters()]))
    tasks.fresh()
    return torch.stack(found)


def gradient_of(leaf: Tensor) -> Tensor:
    """The leaf's gradient, which the backward just done must have filled."""
    if leaf.grad is None:
        raise ArithmeticError("backward left no gradient")
    return leaf.grad


def length(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of several tensors together."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).norm()


def step(tasks: Tasks, first: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """One weighted step of training; the norms at the shared layer, and the weights."""
    losses = tasks.losses()
    norms = mb.norms(losses, tasks.shared, retain_graph=True)  # of the graph that the step needs anyway
    weights = weights_for(norms, torch.stack(losses).detach() / first, alpha)
    tasks.fresh()
    mb.backward(losses, weights=weights)
    tasks.optimiser.step()
    return norms, weights


def plain_step(tasks: Tasks) -> None:
    """The same with all weights one."""
    tasks.fresh()
    mb.backward(tasks.losses())
    tasks.optimiser.step()


def require(statement: str, *, holds: bool) -> None:
    """Print a statement that holds; raise where it does not."""
    if not holds:
        raise ArithmeticError(f"does not hold: {statement}")
    print(f"  holds: {statement}")


def show_norms(tasks: Tasks) -> None:
    """Clean norms, and the ones that an accumulating `.grad` shows."""
    losses = tasks.losses()
    clean = mb.norms(losses, tasks.shared)
    wrong = accumulating(tasks)
    print("Norms of the three losses' gradients at the shared layer")
    print(f"  mb.norms                            {numbers(clean)}")
    print(f"  .grad after each backward()         {numbers(wrong)}")
    require(
        "mb.norms gives the norm of each loss's own gradient",
        holds=torch.allclose(clean, separate(tasks), rtol=1e-4),
    )
    require(
        "an accumulating .grad is right for the first loss alone",
        holds=torch.allclose(clean[:1], wrong[:1], rtol=1e-4) and not torch.allclose(clean, wrong, rtol=0.1),
    )
    require(
        "norms grow with their loss, so that those of losses scaled by a gradient scaler are divided by its scale",
        holds=torch.allclose(mb.norms([1024 * loss for loss in tasks.losses()], tasks.shared) / 1024, clean, rtol=1e-4),
    )


def show_training(seed: int, steps: int, alpha: float) -> None:
    """Weights, weighted norms and losses of both ways."""
    weighted, plain = Tasks(seed), Tasks(seed)
    first = torch.stack(weighted.losses()).detach()
    print(f"\n{steps} steps with weights from the norms")
    for number in range(steps):
        norms, weights = step(weighted, first, alpha)
        plain_step(plain)
        if number in (0, steps - 1):
            print(f"  step {number + 1}: norms {numbers(norms)}, weights {numbers(weights)}")
            print(f"  {'':{len(str(number + 1)) + 6}}weighted norms {numbers(weights * norms)}")
    print("Each loss after them, as a part of what it was before")
    for name, tasks in (("weighted", weighted), ("plain sum", plain)):
        print(f"  {name:>9}: {numbers(torch.stack(tasks.losses()).detach() / first)}")


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
              python examples/loss_weighting.py
              python examples/loss_weighting.py --alpha 0    the same norm for every loss
        """),
    )
    made.add_argument("--steps", type=int, default=50, metavar="N", help="steps of training (default 50)")
    made.add_argument("--alpha", type=float, default=1.5, help="how much slow losses are favoured (default 1.5)")
    made.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    return made


def main() -> int:
    """Parse and show."""
    options = parser()
    given = options.parse_args()
    if given.steps < 1:
        options.error(f"--steps: must be 1 or more; got {given.steps}")
    if not 0 <= given.alpha < float("inf"):
        options.error(f"--alpha: must be 0 or a positive number; got {given.alpha:g}")
    show_norms(Tasks(given.seed))
    show_training(given.seed, given.steps, given.alpha)
    return 0


if __name__ == "__main__":
    sys.exit(main())
