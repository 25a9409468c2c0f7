"""Separate backwards, accumulated backwards and one summed loss give the same gradients: shown and checked."""

import argparse
import sys
import textwrap
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention
from torch import Tensor, nn
from typing_extensions import override

INPUTS = [
    [0.4593, 0.3410, 0.1009, 0.9787],
    [0.1128, 0.0678, 0.9341, 0.3584],
    [0.7076, 0.9282, 0.0573, 0.6657],
    [0.0960, 0.1055, 0.6877, 0.0406],
]
WEIGHT = [-0.0999, 0.2665, -0.1506, 0.4214]
PUBLISHED_WEIGHT_GRADIENT = [1.3757, 1.4424, 1.7801, 2.0434]

# Four inputs and their sum were each printed with four decimals, so each adds up to half a unit of the last one.
PRINTED_TOLERANCE = 5 * 0.5e-4
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Gradients:
    """The gradients of one way: of every input row, and of the weight."""

    inputs: Tensor
    weight: Tensor


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage lines before it."""

    @override
    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def require(statement: str, *, holds: bool) -> None:
    """Print a statement that holds; raise where it does not."""
    if not holds:
        raise ArithmeticError(f"does not hold: {statement}")
    print(f"  holds: {statement}")


def published_layer(dtype: torch.dtype) -> nn.Linear:
    """The published `nn.Linear(4, 1)`; no gradient depends on its bias."""
    layer = nn.Linear(4, 1, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([WEIGHT]))
        layer.bias.zero_()
    return layer


def separate(layer: nn.Linear, inputs: Tensor) -> Gradients:
    """A forward and a backward per input, each into fresh gradients, added up by hand."""
    rows: list[Tensor] = []
    total = torch.zeros_like(layer.weight)
    for row in inputs.detach():
        layer.zero_grad()
        leaf = row.clone().requires_grad_()
        layer(leaf).backward()
        rows.append(gradient_of(leaf))
        total += gradient_of(layer.weight)
    return Gradients(torch.stack(rows), total)


def accumulated(layer: nn.Linear, inputs: Tensor) -> Gradients:
    """One forward; a backward per input, all into the same `.grad`."""
    layer.zero_grad()
    leaf = inputs.detach().clone().requires_grad_()
    for output in layer(leaf):
        output.backward(retain_graph=True)
    return Gradients(gradient_of(leaf), gradient_of(layer.weight))


def summed(layer: nn.Linear, inputs: Tensor) -> Gradients:
    """One forward; one backward of the sum."""
    layer.zero_grad()
    leaf = inputs.detach().clone().requires_grad_()
    layer(leaf).sum().backward()
    return Gradients(gradient_of(leaf), gradient_of(layer.weight))


def gradient_of(leaf: Tensor) -> Tensor:
    """The leaf's gradient, which the backward just done must have filled."""
    if leaf.grad is None:
        raise ArithmeticError("backward left no gradient")
    return leaf.grad.clone()


def show_linear(dtype: torch.dtype) -> None:
    """The published example, in all three ways."""
    layer, inputs = published_layer(dtype), torch.tensor(INPUTS, dtype=dtype)
    weight = layer.weight.detach()
    ways = {way.__name__: way(layer, inputs) for way in (separate, accumulated, summed)}
    print("Linear(4, 1), four inputs; the gradient of each way")
    for name, found in ways.items():
        print(f"{name:>12}: weight {rounded(found.weight[0])}; inputs {rounded(found.inputs[0])} in every row")
    for name, found in ways.items():
        require(
            f"{name}: every input's gradient is the weight, to the last bit",
            holds=torch.equal(found.inputs, weight.expand_as(inputs)),
        )
    for name, found in ways.items():
        require(
            f"{name}: the weight's gradient is the inputs' column sum",
            holds=close(found.weight[0], inputs.sum(dim=0)),
        )
    published = torch.tensor(PUBLISHED_WEIGHT_GRADIENT, dtype=dtype)
    difference = (ways["summed"].weight[0] - published).abs().max().item()
    require(
        f"the weight's gradient is the published {rounded(published)}, to what four printed decimals can tell "
        f"(difference {difference:.4f})",
        holds=difference <= PRINTED_TOLERANCE,
    )


def cross_entropy(inputs: Tensor, reduction: str) -> Gradients:
    """A cross-entropy over four classes, row j of class j, on a fixed `nn.Linear(4, 4)`."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, dtype=inputs.dtype)
    leaf = inputs.clone().requires_grad_()
    F.cross_entropy(layer(leaf), torch.arange(len(inputs)), reduction=reduction).backward()
    return Gradients(gradient_of(leaf), gradient_of(layer.weight))


def show_reductions(dtype: torch.dtype) -> None:
    """`mean` against `sum`, for a B that is a power of two and for one that is not."""
    for rows in (4, 3):
        inputs = torch.tensor(INPUTS[:rows], dtype=dtype)
        of_sum, of_mean = cross_entropy(inputs, "sum"), cross_entropy(inputs, "mean")
        print(f"Cross-entropy on Linear(4, 4), B = {rows}")
        for name, whole, part in (
            ("inputs", of_sum.inputs, of_mean.inputs),
            ("weight", of_sum.weight, of_mean.weight),
        ):
            factor = ((whole * part).sum() / (part * part).sum()).item()
            rest = distance(whole, factor * part)
            print(f"{name:>12}: sum is {factor:.6f} times mean; what remains is {rest:.0e} of its norm")
            # A division by a power of two loses no bit; by 3, each of the two results is rounded on its own.
            exact = rows == 4
            require(
                f"{name}: the gradient of `sum` is {rows} times that of `mean`, "
                + ("to the last bit" if exact else "but for rounding"),
                holds=torch.equal(whole, rows * part) if exact else close(whole, rows * part),
            )
    print(
        "So `mean` differs from `sum` by the factor B and by nothing else: not slightly, and not by another direction."
    )


def distance(first: Tensor, second: Tensor) -> float:
    """How far apart two tensors are, in norms of the first."""
    return ((first - second).norm() / first.norm()).item()


def close(first: Tensor, second: Tensor) -> bool:
    """Equal but for the rounding of a few operations."""
    return distance(first, second) <= 8 * torch.finfo(first.dtype).eps


def rounded(values: Tensor) -> str:
    """Four decimals, as published."""
    return "[" + " ".join(f"{value:.4f}" for value in values.tolist()) + "]"


def main() -> int:
    """Parse and show."""
    options = OneSentenceParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent("""
            examples:
              python examples/equivalence.py
              python examples/equivalence.py --dtype float64    what remains is rounding
        """),
    )
    options.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of all tensors (default float32)")
    dtype = DTYPES[options.parse_args().dtype]
    show_linear(dtype)
    show_reductions(dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
