"""Per-sample gradient norms and the exact diagonal Fisher by `mb.rows`, and what train-mode batch norm does to them."""

import argparse
import sys
import textwrap
import warnings
from typing import NoReturn

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention
from torch import Tensor, nn
from typing_extensions import override

import multiback as mb

SIDE, CLASSES = 12, 5
WIDTH = 110


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage lines before it."""

    @override
    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def conv_net(*, batch_norm: bool = False) -> nn.Sequential:
    """Two convolutions and a linear layer; with a batch norm after the first convolution where asked."""
    first = [nn.Conv2d(1, 4, 3), *([nn.BatchNorm2d(4)] if batch_norm else []), nn.ReLU()]
    rest = [nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES)]
    net = nn.Sequential(*first, *rest)
    with torch.no_grad():
        net.eval()(torch.zeros(1, 1, SIDE, SIDE))  # lets the last layer take its shape
    return net.train()


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """[K, P], one gradient a row."""
    return torch.cat([part.flatten(1) for part in gradients.values()], dim=1)


def per_sample(losses: Tensor, net: nn.Module) -> Tensor:
    """Every loss's gradient [B, P], by one traversal where rows are independent; the graph is kept."""
    return flat(mb.rows(losses, net, retain_graph=True))


def looped(losses: Tensor, net: nn.Module) -> Tensor:
    """The same by a traversal of the whole batch's graph per loss."""
    parameters = list(net.parameters())
    found = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    return torch.stack([torch.cat([part.reshape(-1) for part in parts]) for parts in found])


def alone(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The same by a forward and a backward of every image on its own."""
    batches = zip(images.split(1), labels.split(1), strict=True)
    return torch.cat([looped(F.cross_entropy(net(image), label).reshape(1), net) for image, label in batches])


def true_fisher(outputs: Tensor, net: nn.Module) -> Tensor:
    """Diagonal of the Fisher [P]: over images the mean, over classes the model's own expectation, of squares."""
    log_likelihoods = outputs.log_softmax(dim=1)
    likelihoods = log_likelihoods.detach().exp()
    total = torch.zeros(sum(parameter.numel() for parameter in net.parameters()))
    for label in range(CLASSES):
        gradients = per_sample(log_likelihoods[:, label], net)
        total += (likelihoods[:, label, None] * gradients.square()).mean(0)
    return total


def require(statement: str, *, holds: bool) -> None:
    """Print a statement that holds; raise where it does not."""
    if not holds:
        raise ArithmeticError(f"does not hold: {statement}")
    print(f"  holds: {statement}")


def close(first: Tensor, second: Tensor) -> bool:
    """Equal but for rounding, relative to the norm."""
    return distance(first, second) < 1e-4


def distance(first: Tensor, second: Tensor) -> float:
    """How far apart two tensors are, in norms of the second."""
    return ((first - second).norm() / second.norm()).item()


def show_norms(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Norms of every image's own gradient, and what they equal."""
    losses = F.cross_entropy(net(images), labels, reduction="none")
    gradients = per_sample(losses, net)
    norms = gradients.norm(dim=1)
    plan = mb.plan(losses, net, kind="rows")
    print(f"{len(images)} images, {gradients.shape[1]} parameters; method {plan.method}, rows {plan.independence}")
    print(f"Norms of the per-sample gradients: least {norms.min():.3g}, most {norms.max():.3g}")
    require("rows equal a loop over the losses of the batch", holds=close(gradients, looped(losses, net)))
    require("rows equal every image on its own", holds=close(gradients, alone(net, images, labels)))
    require(
        "mb.norms gives the same norms without forming the gradients together",
        holds=close(mb.norms(losses, net), norms),
    )


def show_fisher(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    """The diagonal Fisher, by squares of gradients and by the square of the mean gradient."""
    outputs = net(images)
    losses = F.cross_entropy(outputs, labels, reduction="none")
    exact = per_sample(losses, net).square().mean(0)
    shortcut = flat({name: part[None] for name, part in mb.grad(losses.mean(), net, retain_graph=True).items()})[0]
    print("\nDiagonal Fisher with the given labels: the mean of squared per-sample gradients")
    require(
        "it equals squares taken image by image (batch size 1)",
        holds=close(exact, alone(net, images, labels).square().mean(0)),
    )
    error, part = distance(shortcut.square(), exact), (shortcut.square().sum() / exact.sum()).item()
    print(f"  The square of the mean gradient is off by {error:.1%} of its norm: its trace is {part:.1%} of the exact.")
    fisher = true_fisher(outputs, net)
    print(f"  With labels as the model expects them, one mb.rows per class on one graph: trace {fisher.sum():.4g},")
    print(f"  where the given labels make it {exact.sum():.4g}.")


def show_batch_norm(images: Tensor, labels: Tensor) -> None:
    """Batch norm in train mode: the warning, what the answer still is, and what eval mode changes."""
    net = conv_net(batch_norm=True)
    data = images.clone().requires_grad_()
    losses = F.cross_entropy(net(data), labels, reduction="none")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", mb.CoupledRowsWarning)
        gradients = per_sample(losses, net)
    print("\nBatch norm in train mode")
    for message in [str(one.message) for one in caught if issubclass(one.category, mb.CoupledRowsWarning)]:
        print(textwrap.fill(message, WIDTH, initial_indent="  warning: ", subsequent_indent="  "))
    require("a row is still its loss's full gradient", holds=close(gradients, looped(losses, net)))
    whole = mb.jac(losses, data)
    others = whole.clone()
    others[range(len(images)), range(len(images))] = 0
    share = (others.norm() / whole.norm()).item()
    print(f"  Of the losses' gradients with respect to the images, {share:.1%} (of the norm) lies in images")
    print("  of other losses.")
    net.eval()
    losses = F.cross_entropy(net(images), labels, reduction="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error", mb.CoupledRowsWarning)
        gradients = per_sample(losses, net)
    require("in eval mode rows equal every image on its own", holds=close(gradients, alone(net, images, labels)))


def parser() -> OneSentenceParser:
    """The options."""
    made = OneSentenceParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent("""
            examples:
              python examples/per_sample.py
              python examples/per_sample.py --batch 64
        """),
    )
    made.add_argument("--batch", type=int, default=16, metavar="B", help="random images (default 16)")
    made.add_argument("--seed", type=int, default=0, help="of weights, images and labels (default 0)")
    return made


def main() -> int:
    """Parse and show."""
    options = parser()
    given = options.parse_args()
    if given.batch < 2:
        options.error(f"--batch: must be 2 or more, since samples are compared; got {given.batch}")
    torch.manual_seed(given.seed)
    images, labels = torch.randn(given.batch, 1, SIDE, SIDE), torch.randint(CLASSES, (given.batch,))
    net = conv_net()
    show_norms(net, images, labels)
    show_fisher(net, images, labels)
    show_batch_norm(images, labels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
