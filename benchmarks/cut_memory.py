"""Exact peak bytes with `mb.cut`: over data sets of growing length, and of chunked losses, way by way.

A data set of small images is inferred, and then back-propagated through, in batches of 100: its peak is held against
that of a data set of 1,000 and what the longer one's outputs and their loss take, with 8 bytes a row for fingerprints.
A cross-entropy over a vocabulary of 50,000 and a contrastive loss of 4,096 rows are held against one traversal of
everything.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention
from torch import Tensor, nn
from torch.utils.data import Dataset
from typing_extensions import override

import multiback as mb
from memory import Figure, conduct
from multiback.measure import memory

BATCH, SHORT, LENGTHS = 100, 1_000, (10_000, 100_000)
VOCABULARY, TOKENS, WIDTH, CHUNKS = 50_000, 512, 64, 16
PAIRS, ROWS = 4_096, 256


class Images(Dataset[Tensor]):
    """Images of 3x8x8, made when they are read."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._base = torch.rand(64, 3, 8, 8)

    def __len__(self) -> int:
        return self._length

    @override
    def __getitem__(self, index: int) -> Tensor:
        return self._base[index % 64] + index % 7


def small_net() -> nn.Sequential:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    )


def through(length: int) -> int:
    """The peak of a data set's inference, a loss of all its rows, and the gradient of the parameters."""
    net, images = small_net(), Images(length)

    def run() -> None:
        with mb.cut(net, images, batch_size=BATCH, keep="recompute", progress=False) as cut:
            cut.value.square().mean().backward()

    return memory.live_bytes(run).peak


def growth(length: int) -> tuple[int, int]:
    """The peak for a data set of that length, and what the short one and outputs of that length account for."""

    def outputs() -> None:
        torch.empty(length, 10, requires_grad=True).square().mean().backward()

    return through(length), through(SHORT) + memory.live_bytes(outputs).peak + 8 * length


def vocabulary(way: Callable[[Tensor, nn.Linear, Tensor], None]) -> tuple[int, int]:
    """The peak of a cross-entropy by one way, and by the whole."""
    trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    head, tokens = nn.Linear(WIDTH, VOCABULARY, bias=False), torch.randn(TOKENS, WIDTH)
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    for parameter in (*trunk.parameters(), *head.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    mine = memory.live_bytes(lambda: way(trunk(tokens), head, labels)).peak
    return mine, memory.live_bytes(lambda: whole(trunk(tokens), head, labels)).peak


def whole(hidden: Tensor, head: nn.Linear, labels: Tensor) -> None:
    """All logits at once."""
    F.cross_entropy(head(hidden), labels).backward()


def retained(hidden: Tensor, head: nn.Linear, labels: Tensor) -> None:
    """Chunk by chunk through the retained graph."""
    for number, (part, own) in enumerate(zip(hidden.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True), 1):
        loss = F.cross_entropy(head(part), own, reduction="sum") / TOKENS
        loss.backward(retain_graph=number < CHUNKS)


def by_cut(hidden: Tensor, head: nn.Linear, labels: Tensor) -> None:
    """Chunk by chunk on a cut, one traversal of the trunk at the end."""
    with mb.cut(hidden) as cut:
        for part, own in zip(cut.value.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True):
            (F.cross_entropy(head(part), own, reduction="sum") / TOKENS).backward()


def contrastive(embedded: Tensor) -> Tensor:
    """Each row against all rows, a row of logits at a time being enough: here in chunks, so that they do not count."""
    normed = F.normalize(embedded, dim=1)
    parts = [
        F.cross_entropy(normed[start : start + ROWS] @ normed.roll(1, 0).t() / 0.2, torch.arange(start, start + ROWS))
        for start in range(0, len(normed), ROWS)
    ]
    return torch.stack(parts).mean()


def encoder() -> nn.Sequential:
    """A perceptron whose hidden layers outweigh its output."""
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 32))


def encoder_graph() -> tuple[int, int]:
    """What the encoder's part of a contrastive step holds at its peak by the cut, and with the whole batch's graph."""
    net, data = encoder(), torch.randn(PAIRS, 64)

    def cut() -> None:
        with mb.cut(net, data, batch_size=ROWS, keep="recompute", progress=False) as made:
            made.value.square().mean().backward()

    def plain() -> None:
        net(data).square().mean().backward()

    return memory.live_bytes(cut).peak, memory.live_bytes(plain).peak


def contrastive_step() -> tuple[int, int]:
    """The peak of a whole contrastive step by the cut, and by one traversal."""
    net, data = encoder(), torch.randn(PAIRS, 64)

    def cut() -> None:
        with mb.cut(net, data, batch_size=ROWS, keep="recompute", progress=False) as made:
            contrastive(made.value).backward()

    return memory.live_bytes(cut).peak, memory.live_bytes(lambda: contrastive(net(data)).backward()).peak


def figures() -> Iterator[Figure]:
    """Everything that is measured."""
    for length in LENGTHS:
        yield Figure(
            f"{length:,} images through mb.cut / {SHORT:,} images and the outputs of {length:,}",
            partial(growth, length),
            1.0,
            smoke=length == LENGTHS[0],
        )
    name = f"cross-entropy over {VOCABULARY:,}, {CHUNKS} chunks"
    yield Figure(f"{name}: retained graph / the whole loss", partial(vocabulary, retained), 0.25, smoke=False)
    yield Figure(f"{name}: mb.cut / the whole loss", partial(vocabulary, by_cut), 0.25)
    yield Figure(f"encoder of {PAIRS:,} rows: mb.cut / the batch's graph", encoder_graph, 0.5)
    yield Figure(f"contrastive step of {PAIRS:,} rows: mb.cut / the batch's graph", contrastive_step, 1.0, smoke=False)


if __name__ == "__main__":
    sys.exit(conduct(__doc__ or "", figures(), processes=1))
