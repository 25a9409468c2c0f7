"""Infer all images once, then back-propagate slice by slice: the published loop, what it costs, and the ways around."""

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention
from torch import Tensor, nn
from typing_extensions import override

import multiback as mb
from multiback.benching.problems import tutorial_net

RECORD = 1 + 3 * 32 * 32  # a byte for the label, then red, green and blue, row by row
CLASSES = 10
WIDTH = 110


class DataError(Exception):
    """The images cannot be had; the message is one sentence."""


@dataclass(frozen=True)
class Answer:
    """Gradients of every image and of every parameter."""

    images: Tensor
    parameters: list[Tensor]


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage lines before it."""

    @override
    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 digits, 8x8 grey, enlarged to 3x32x32."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn; install it, or give --cifar a file of CIFAR-10") from error
    pixels, labels = load_digits(return_X_y=True)
    grey = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = F.interpolate(grey, size=(32, 32), mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
    return normalised(images), torch.as_tensor(labels, dtype=torch.int64)


def cifar(path: Path) -> tuple[Tensor, Tensor]:
    """CIFAR-10's binary version: one .bin file, or every one in a folder."""
    files = sorted(path.glob("*.bin")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"--cifar: a folder must hold .bin files of CIFAR-10's binary version; {path} has none")
    records = torch.cat([cifar_file(file) for file in files])
    images = records[:, 1:].reshape(-1, 3, 32, 32).to(torch.float32) / 255
    return normalised(images), records[:, 0].to(torch.int64)


def cifar_file(path: Path) -> Tensor:
    """The records of one file, a row of 3,073 bytes each."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"--cifar: {path} cannot be read ({error.strerror})") from error
    if not data or len(data) % RECORD:
        raise DataError(f"--cifar: a file must be whole records of {RECORD} bytes; {path} has {len(data)} bytes")
    records = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD).copy())
    if records[:, 0].max() >= CLASSES:
        raise DataError(f"--cifar: labels must be 0 to {CLASSES - 1}; {path} holds label {int(records[:, 0].max())}")
    return records


def normalised(images: Tensor) -> Tensor:
    """From 0..1 to -1..1, as in the tutorial."""
    return images * 2 - 1


class Slices:
    """One net, one batch of images, and an order that something outside decides."""

    def __init__(self, net: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.net, self.images, self.labels = net, images, labels
        with torch.no_grad():
            confidence = net(images).softmax(dim=1).amax(dim=1)
        self.order: list[int] = confidence.argsort().tolist()

    def leaf(self) -> Tensor:
        """The images as a fresh leaf, with nothing in any `.grad`."""
        self.net.zero_grad()
        return self.images.detach().clone().requires_grad_()

    def loss(self, outputs: Tensor, j: int) -> Tensor:
        """The cross-entropy of `outputs[j]` alone."""
        return F.cross_entropy(outputs[j : j + 1], self.labels[j : j + 1])

    def retained_loop(self) -> Answer:
        """The asker's loop: infer once, then a backward per slice, and read `inputs.grad[j]`."""
        inputs = self.leaf()
        outputs, read = self.net(inputs), torch.empty_like(inputs)
        for j in self.order:
            self.loss(outputs, j).backward(retain_graph=True)
            read[j] = gradient_of(inputs)[j]
        return self.answer(read)

    def one_traversal(self) -> Answer:
        """Infer once, one backward of all slices' losses summed."""
        inputs = self.leaf()
        F.cross_entropy(self.net(inputs), self.labels, reduction="sum").backward()
        return self.answer(gradient_of(inputs))

    def by_cut(self) -> Answer:
        """Infer once without a graph, then run each slice's row again for its gradient; of the images alone."""
        read = torch.empty_like(self.images)
        cut = mb.cut(self.net, self.images, keep="recompute")
        for j in self.order:
            read[j] = cut.grad_of(self.loss(cut.value, j)).values[0]
        return Answer(read, [])

    def answer(self, images: Tensor) -> Answer:
        """These image gradients with what the parameters hold now."""
        return Answer(images, [gradient_of(parameter) for parameter in self.net.parameters()])

    def second_time(self) -> str:
        """The first line of the error that the loop meets without `retain_graph=True`."""
        outputs = self.net(self.leaf())
        first, second = self.order[:2]
        self.loss(outputs, first).backward()
        try:
            self.loss(outputs, second).backward()
        except RuntimeError as error:
            return f"RuntimeError: {str(error).splitlines()[0]}"
        raise ArithmeticError("a second backward through a freed graph raised nothing")

    def one_slice(self, repetitions: int) -> tuple[float, float]:
        """Seconds for one slice's image gradient after the forward: by the retained graph, and by the cut."""
        inputs, j = self.leaf(), self.order[0]
        outputs, cut = self.net(inputs), mb.cut(self.net, self.images, keep="recompute")

        def retained() -> None:
            torch.autograd.grad(self.loss(outputs, j), inputs, retain_graph=True)

        def by_cut() -> None:
            cut.grad_of(self.loss(cut.value, j))

        retained_seconds, cut_seconds = fastest([retained, by_cut], repetitions)
        return retained_seconds, cut_seconds

    def repeated(self) -> tuple[list[float], float, list[float]]:
        """One slice twice: the factors read from the leaf, by `autograd.grad` after that, and by the cut."""
        inputs, j = self.leaf(), self.order[0]
        outputs = self.net(inputs)
        (right,) = torch.autograd.grad(self.loss(outputs, j), inputs, retain_graph=True)
        factors: list[float] = []
        for _ in range(2):
            self.loss(outputs, j).backward(retain_graph=True)
            factors.append(factor(gradient_of(inputs)[j], right[j]))
        (again,) = torch.autograd.grad(self.loss(outputs, j), inputs, retain_graph=True)
        cut = mb.cut(self.net, self.images, keep="recompute")
        by_cut = [factor(cut.grad_of(self.loss(cut.value, j)).values[0], right[j]) for _ in range(2)]
        return factors, factor(again[j], right[j]), by_cut


def gradient_of(leaf: Tensor) -> Tensor:
    """The leaf's gradient, which the backward just done must have filled."""
    if leaf.grad is None:
        raise ArithmeticError("backward left no gradient")
    return leaf.grad


def factor(found: Tensor, right: Tensor) -> float:
    """By how much `found` is too large."""
    return (found.norm() / right.norm()).item()


def require(statement: str, *, holds: bool) -> None:
    """Print a statement that holds; raise where it does not."""
    if not holds:
        raise ArithmeticError(f"does not hold: {statement}")
    print(f"  holds: {statement}")


def largest_difference(first: Tensor, second: Tensor) -> float:
    """Of any element."""
    return (first - second).abs().max().item()


def relative_difference(first: Answer, second: Answer) -> float:
    """The largest difference in the parameters' gradients, relative to each one's norm."""
    pairs = zip(first.parameters, second.parameters, strict=True)
    return max(((one - other).norm() / other.norm()).item() for one, other in pairs)


def fastest(ways: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """Seconds of each way, the least of some interleaved repetitions."""
    found = [float("inf")] * len(ways)
    for _ in range(repetitions):
        for index, way in enumerate(ways):
            start = time.perf_counter()
            way()
            found[index] = min(found[index], time.perf_counter() - start)
    return found


def show(slices: Slices, repetitions: int) -> None:
    """The error, the three ways, one slice alone, and what repeated slices read."""
    count = len(slices.order)
    print(f"Slices by external logic, least sure first: {', '.join(map(str, slices.order[:8]))}{', ...' * (count > 8)}")
    print("\nWithout retain_graph=True, at the second slice:")
    print(textwrap.fill(slices.second_time(), WIDTH, initial_indent="  ", subsequent_indent="  "))
    print("  The first backward freed what the nodes of the net had saved; `outputs` itself is still there.")
    show_ways(slices, repetitions)
    retained, cut = slices.one_slice(repetitions)
    print(f"\nSlice {slices.order[0]} alone after the forward, its image's gradient")
    print(f"  one traversal of the retained graph      {retained * 1e3:10.1f} ms")
    print(f"  cut.grad_of                              {cut * 1e3:10.1f} ms, ratio {retained / cut:.1f}")
    show_repeated(slices)


def show_ways(slices: Slices, repetitions: int) -> None:
    """Time and numbers of the loop, of the cut, and of one traversal."""
    answers: dict[str, Answer] = {}
    ways = {"loop": slices.retained_loop, "cut": slices.by_cut, "once": slices.one_traversal}

    def kept(name: str) -> None:
        answers[name] = ways[name]()

    loop, cut, once = fastest([lambda name=name: kept(name) for name in ways], repetitions)
    count = len(slices.order)
    print(f"\nThree ways to the gradient of all {count} images, least of {repetitions} interleaved repetitions")
    print(f"  one backward per slice, graph retained   {loop * 1e3:10.1f} ms")
    print(f"  cut.grad_of per slice, rows run again    {cut * 1e3:10.1f} ms, ratio {loop / cut:.1f}")
    print(f"  one backward of the summed losses        {once * 1e3:10.1f} ms, ratio {loop / once:.1f}")
    print("  ratio: how many times faster than the retained loop")
    images = largest_difference(answers["loop"].images, answers["once"].images)
    by_cut = largest_difference(answers["cut"].images, answers["loop"].images)
    parameters = relative_difference(answers["loop"], answers["once"])
    print(f"  same numbers: largest difference {images:.1e} in the images' gradients,")
    print(f"  {parameters:.1e} of the norm in the parameters' (added up in another order);")
    print(f"  {by_cut:.1e} between the cut and the loop in the images'")
    largest = answers["loop"].images.abs().max().item()
    require("the cut gives the loop's image gradients, but for rounding", holds=by_cut < 1e-4 * largest)
    print(f"  Each of the {count} backwards walks the whole batch, to fill one row of it, and adds to the")
    print("  parameters' gradients; the cut runs one row forward and back, for its image alone. One backward")
    print(
        "  needs all slices beforehand; where a slice's gradient decides which follows, only the first two ways serve."
    )


def show_repeated(slices: Slices) -> None:
    """What a slice reads that is asked for twice."""
    (first, second), again, (once, twice) = slices.repeated()
    print("\nReading inputs.grad[j] from a leaf that accumulates")
    print(f"  slice {slices.order[0]}, first backward: factor {first:.4f}; the same slice again: factor {second:.4f}")
    print("  Where slices overlap or repeat, inputs.grad[j] silently contains earlier slices' gradients. The same goes")
    print("  for a net that mixes rows, as batch normalization does in training.")
    print(f"  torch.autograd.grad(loss, inputs) reads each slice alone: factor {again:.4f}")
    print(f"  cut.grad_of: first factor {once:.4f}; the same slice again: factor {twice:.4f}")
    require("cut.grad_of of a slice is the same both times", holds=max(abs(once - 1), abs(twice - 1)) < 1e-4)


def bench(slices: Slices, budget: float | None) -> int:
    """The same question, with intervals; the exit code."""
    images = slices.leaf()
    problem = mb.Problem(slices.net, images, nn.CrossEntropyLoss(reduction="none"), targets=slices.labels)
    print("\nThe same by mb.bench, in fresh processes and with intervals:\n", flush=True)
    try:
        print(mb.bench(problem, questions=["slices"], mode="quick", budget=budget))
    except mb.MultibackError as error:
        print(f"slices.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parser() -> OneSentenceParser:
    """The options."""
    made = OneSentenceParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent("""
            examples:
              python examples/slices.py                            scikit-learn's digits, a minute or two
              python examples/slices.py --batch 32 --no-bench
              python examples/slices.py --cifar data_batch_1.bin   CIFAR-10's binary version
        """),
    )
    made.add_argument("--batch", type=int, default=128, metavar="B", help="images, one slice each (default 128)")
    made.add_argument("--cifar", type=Path, metavar="PATH", help="a .bin file of CIFAR-10, or a folder of them")
    made.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each way (default 3)")
    made.add_argument("--seed", type=int, default=0, help="of the net's weights (default 0)")
    made.add_argument("--budget", type=float, metavar="S", help="seconds for the bench at the end (default 35)")
    made.add_argument("--no-bench", action="store_true", help="leave out the bench at the end")
    return made


def main() -> int:
    """Parse, load, show, bench."""
    options = parser()
    given = options.parse_args()
    if given.batch < 2:
        options.error(f"--batch: must be 2 or more, since a second slice is the point; got {given.batch}")
    if given.repetitions < 1:
        options.error(f"--repetitions: must be 1 or more; got {given.repetitions}")
    if given.budget is not None and not 0 < given.budget < float("inf"):
        options.error(f"--budget: must be a positive number of seconds; got {given.budget:g}")
    if not 0 <= given.seed < 2**63:
        options.error(f"--seed: must be a whole number from 0 to 2^63 - 1; got {given.seed}")
    try:
        images, labels = digits() if given.cifar is None else cifar(given.cifar)
        if len(images) < given.batch:
            raise DataError(f"--batch: must be at most the {len(images)} images that there are; got {given.batch}")
    except DataError as error:
        options.error(str(error))
    name = "scikit-learn's digits" if given.cifar is None else f"CIFAR-10 from {given.cifar}"
    print(f"The CIFAR-10 tutorial's net, {given.batch} images of {name}")
    torch.manual_seed(given.seed)
    slices = Slices(tutorial_net(), images[: given.batch], labels[: given.batch])
    show(slices, given.repetitions)
    return 0 if given.no_bench else bench(slices, given.budget)


if __name__ == "__main__":
    sys.exit(main())
