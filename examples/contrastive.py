"""Contrastive training on a batch whose graph would not fit: `mb.cut` holds one chunk's graph at a time."""

import argparse
import math
import os
import sys
import textwrap
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention
from torch import Tensor, nn
from typing_extensions import override

import multiback as mb
from multiback.measure.memory import live_bytes

SIDE, WIDTH = 16, 64
TEMPERATURE = 0.1
CHECKED = 256  # rows on which gradients are compared
Views = tuple[Tensor, Tensor]
Way = Callable[[], Tensor]


class DataError(Exception):
    """The images cannot be had; the message is one sentence."""


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage lines before it."""

    @override
    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def digits(count: int) -> Tensor:
    """scikit-learn's 1,797 digits, 8x8 grey, enlarged to 1x16x16 and begun again until there are `count`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn; pip install scikit-learn") from error
    pixels, _ = load_digits(return_X_y=True)
    grey = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = F.interpolate(grey, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return images[torch.arange(count) % len(images)]


def view(images: Tensor) -> Tensor:
    """The images, each turned, moved and scaled a little, and noised."""
    count = len(images)
    angle, scale = 0.3 * torch.randn(count), 1 + 0.1 * torch.randn(count)
    sine, cosine = scale * angle.sin(), scale * angle.cos()
    moved = 0.15 * torch.randn(2, count)
    transform = torch.stack([cosine, -sine, moved[0], sine, cosine, moved[1]], dim=1).reshape(count, 2, 3)
    grid = F.affine_grid(transform, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False) + 0.1 * torch.randn_like(images)


class Encoder(nn.Module):
    """Unit vectors of two views, by the same convolutions, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        flat = 64 * (SIDE // 2) ** 2
        head = [nn.Linear(flat, 128), nn.ReLU(), nn.Linear(128, WIDTH)]
        self.net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), *head)

    @override
    def forward(self, first: Tensor, second: Tensor) -> Views:
        """A vector of length 1 for each row of each view."""
        return F.normalize(self.net(first), dim=1), F.normalize(self.net(second), dim=1)


def info_nce(vectors: Views) -> Tensor:
    """Each row must find its other view among all rows: the loss mixes the whole batch."""
    logits = vectors[0] @ vectors[1].T / TEMPERATURE
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def by_rows(vectors: Views, chunk: int) -> Tensor:
    """The same loss and its backward, `chunk` rows of logits at a time."""
    own, total = torch.arange(len(vectors[0])), torch.zeros(())
    for anchors, others in (vectors, vectors[::-1]):
        for rows in own.split(chunk):
            part = F.cross_entropy(anchors[rows] @ others.T / TEMPERATURE, rows, reduction="sum") / (2 * len(own))
            part.backward()
            total += part.detach()
    return total


def by_whole(encoder: Encoder, views: Views) -> Tensor:
    """One forward of the whole batch, with its graph, and one backward."""
    loss = info_nce(encoder(*views))
    loss.backward()
    return loss.detach()


def by_cut(encoder: Encoder, views: Views, chunk: int) -> Tensor:
    """Vectors of all rows without a graph, the loss of the whole batch, then each chunk's graph in turn."""
    cut = mb.cut(encoder, views, batch_size=chunk, keep="recompute")
    loss = info_nce(cut.value)
    loss.backward()
    cut.backward()
    return loss.detach()


def by_cut_and_rows(encoder: Encoder, views: Views, chunk: int) -> Tensor:
    """The same, with the logits in chunks of rows too."""
    with mb.cut(encoder, views, batch_size=chunk, keep="recompute") as cut:
        return by_rows(cut.value, chunk)


def chunks_of(views: Views, chunk: int) -> list[Views]:
    """Both views of `chunk` rows at a time."""
    return list(zip(views[0].split(chunk), views[1].split(chunk), strict=True))


def by_kept_chunks(encoder: Encoder, views: Views, chunk: int) -> Tensor:
    """The chunks' forwards with all their graphs kept: dropout draws as it does for the cut."""
    found = [encoder(*pair) for pair in chunks_of(views, chunk)]
    loss = info_nce((torch.cat([first for first, _ in found]), torch.cat([second for _, second in found])))
    loss.backward()
    return loss.detach()


def by_hand(encoder: Encoder, views: Views, chunk: int) -> Tensor:
    """A gradient cache as often written: it runs chunks again without the random state of their first run."""
    with torch.no_grad():
        found = [encoder(*pair) for pair in chunks_of(views, chunk)]
    leaves = tuple(torch.cat(parts).requires_grad_() for parts in zip(*found, strict=True))
    loss = info_nce((leaves[0], leaves[1]))
    first, second = torch.autograd.grad(loss, leaves)
    for pair, ours in zip(chunks_of(views, chunk), chunks_of((first, second), chunk), strict=True):
        torch.autograd.backward(list(encoder(*pair)), list(ours))
    return loss.detach()


def gradient(encoder: Encoder, way: Way, seed: int) -> Tensor:
    """What a way writes into `.grad`, all of it in a row, from the random state of `seed`."""
    encoder.zero_grad()
    torch.manual_seed(seed)
    way()
    found = [parameter.grad for parameter in encoder.parameters()]
    encoder.zero_grad()
    return torch.cat([part.reshape(-1) for part in found if part is not None])


def require(statement: str, *, holds: bool) -> None:
    """Print a statement that holds; raise where it does not."""
    if not holds:
        raise ArithmeticError(f"does not hold: {statement}")
    print(f"  holds: {statement}")


def distance(first: Tensor, second: Tensor) -> float:
    """How far apart two tensors are, in norms of the second."""
    return ((first - second).norm() / second.norm()).item()


def show_gradients(encoder: Encoder, views: Views, chunk: int, seed: int) -> None:
    """The cut's gradient against ordinary ones, without and with dropout, and a gradient cache by hand."""

    def found(way: Callable[[Encoder, Views, int], Tensor]) -> Tensor:
        return gradient(encoder, lambda: way(encoder, views, chunk), seed)

    print(f"Gradients of {len(views[0])} rows in chunks of {chunk}")
    encoder.eval()
    right = gradient(encoder, lambda: by_whole(encoder, views), seed)
    require("without dropout the cut gives the gradient of one big batch", holds=distance(found(by_cut), right) < 1e-4)
    require("and so it does with the logits in chunks", holds=distance(found(by_cut_and_rows), right) < 1e-4)
    encoder.train()
    right, cut, hand = found(by_kept_chunks), found(by_cut), found(by_hand)
    require(
        "with dropout it gives that of chunks whose graphs are all kept, from the same random state",
        holds=distance(cut, right) < 1e-4,
    )
    print(
        f"  The cut is off by {distance(cut, right):.1e} of the norm. A gradient cache by hand that lets dropout draw"
    )
    print(f"  anew as it runs chunks again is off by {distance(hand, right):.1%}.")


def show_memory(encoder: Encoder, views: Views, chunk: int) -> None:
    """The peak of one step's gradient, by the whole batch's graph and by the cut."""
    ways: dict[str, Way] = {
        "the whole batch's graph": lambda: by_whole(encoder, views),
        "the cut": lambda: by_cut(encoder, views, chunk),
        "the cut, logits in chunks": lambda: by_cut_and_rows(encoder, views, chunk),
    }
    print(f"\nPeak of the memory that tensors take, {len(views[0])} rows in chunks of {chunk}")
    peaks: list[int] = []
    for name, way in ways.items():
        encoder.zero_grad()
        peaks.append(live_bytes(way).peak)
        print(f"  {name:<26}{peaks[-1] / 2**20:9.1f} MiB{peaks[0] / peaks[-1]:9.1f}")
    print("  The last column is how many times less than the first way. By the cut the encoder's graph grows with the")
    print("  chunk alone; the logits, each row against every other, grow with the batch's square unless chunked too.")


def show_training(encoder: Encoder, images: Tensor, chunk: int, steps: int) -> None:
    """The loss of every step, each on new views of the same images."""
    print(f"\nTraining by the cut: {len(images)} rows a step; a guess has loss {math.log(len(images)):.3f}")
    optimiser = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    for step in range(steps):
        optimiser.zero_grad()
        loss = by_cut(encoder, (view(images), view(images)), chunk)
        optimiser.step()
        print(f"  step {step + 1}: loss {loss:.3f}")


def parser() -> OneSentenceParser:
    """The options."""
    made = OneSentenceParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent("""
            examples:
              python examples/contrastive.py
              python examples/contrastive.py --batch 1024 --chunk 128 --steps 20
        """),
    )
    made.add_argument("--batch", type=int, default=4096, metavar="B", help="pairs of views (default 4096)")
    made.add_argument("--chunk", type=int, default=256, metavar="C", help="pairs run at once (default 256)")
    made.add_argument("--steps", type=int, default=5, metavar="N", help="of the optimiser (default 5)")
    made.add_argument("--seed", type=int, default=0, help="of weights, views and dropout (default 0)")
    return made


def main() -> int:
    """Parse, load, compare, train."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write lines to standard error
    options = parser()
    given = options.parse_args()
    if given.batch < 2:
        options.error(f"--batch: must be 2 or more, since rows are told apart; got {given.batch}")
    if not 0 < given.chunk <= given.batch:
        options.error(f"--chunk: must be from 1 to the {given.batch} rows of a batch; got {given.chunk}")
    if given.steps < 1:
        options.error(f"--steps: must be 1 or more; got {given.steps}")
    if not 0 <= given.seed < 2**63:
        options.error(f"--seed: must be a whole number from 0 to 2^63 - 1; got {given.seed}")
    try:
        images = digits(given.batch)
    except DataError as error:
        options.error(str(error))
    torch.manual_seed(given.seed)
    encoder, views = Encoder(), (view(images), view(images))
    few = min(CHECKED, given.batch)
    show_gradients(encoder, (views[0][:few], views[1][:few]), min(given.chunk, few // 4 or 1), given.seed)
    show_memory(encoder, views, given.chunk)
    show_training(encoder, images, given.chunk, given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
