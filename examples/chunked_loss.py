"""A cross-entropy over a large vocabulary, chunk by chunk, with one traversal of the trunk by `mb.cut`."""

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention
from torch import Tensor, nn
from typing_extensions import override

import multiback as mb
from multiback.measure.memory import live_bytes

LAYERS, HEADS, WIDER = 4, 4, 8
IGNORED = -100  # cross_entropy's own ignore_index
Way = Callable[[], None]


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage lines before it."""

    @override
    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def some_labels(tokens: int, vocabulary: int, chunk: int) -> Tensor:
    """Random labels [T], of which more and more are ignored, as where sequences end in padding.

    The first of every chunk stays: the mean over a chunk without labels is NaN.
    """
    ignored = torch.rand(tokens) < torch.linspace(0.1, 0.8, tokens)
    ignored[::chunk] = False
    return torch.randint(vocabulary, (tokens,)).masked_fill(ignored, IGNORED)


class Language:
    """A trunk that mixes tokens by attention, a head [D, V], one sequence of T tokens, and ways to its gradient."""

    def __init__(self, tokens: int, width: int, vocabulary: int, chunks: int) -> None:
        layer = nn.TransformerEncoderLayer(width, HEADS, WIDER * width, dropout=0.0, batch_first=True)
        self.trunk = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.inputs = torch.randn(1, tokens, width)
        self.mask = nn.Transformer.generate_square_subsequent_mask(tokens)
        self.chunk = -(-tokens // chunks)
        self.labels = some_labels(tokens, vocabulary, self.chunk)
        self.count = int((self.labels != IGNORED).sum())
        self.model = nn.ModuleList([self.trunk, self.head])

    def hidden(self) -> Tensor:
        """The trunk's output [T, D]."""
        return self.trunk(self.inputs, mask=self.mask, is_causal=True)[0]

    def parts(self, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Chunks of the hidden states with their labels; views, so they copy nothing and keep `hidden` alive."""
        return list(zip(hidden.split(self.chunk), self.labels.split(self.chunk), strict=True))

    def share(self, part: Tensor, labels: Tensor) -> Tensor:
        """What a chunk adds to the mean over all labels: its sum, divided by the count of all."""
        return F.cross_entropy(self.head(part), labels, reduction="sum") / self.count

    def whole(self) -> None:
        """All logits [T, V] at once."""
        F.cross_entropy(self.head(self.hidden()), self.labels).backward()

    def retained(self) -> None:
        """Chunk by chunk, each back-propagated through the trunk as well."""
        for part, labels in self.parts(self.hidden()):
            self.share(part, labels).backward(retain_graph=True)

    def cut(self) -> None:
        """Chunk by chunk down to the hidden states, then one traversal of the trunk."""
        with mb.cut(self.hidden()) as cut:
            for part, labels in self.parts(cut.value):
                self.share(part, labels).backward()

    def means(self) -> None:
        """The usual slip: the mean of the chunks' own means, whose counts of labels differ."""
        with mb.cut(self.hidden()) as cut:
            parts = self.parts(cut.value)
            for part, labels in parts:
                (F.cross_entropy(self.head(part), labels) / len(parts)).backward()

    def gradient(self, way: Way) -> Tensor:
        """What a way writes into `.grad`, all of it in a row."""
        self.model.zero_grad()
        way()
        found = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad()
        return torch.cat([part.reshape(-1) for part in found if part is not None])

    def peak(self, way: Way) -> int:
        """The most bytes that a way holds, above what is there before it; the gradients are among them."""
        self.model.zero_grad()
        return live_bytes(way).peak

    def seconds(self, way: Way) -> float:
        """The time of one run."""
        self.model.zero_grad()
        start = time.perf_counter()
        way()
        return time.perf_counter() - start


def require(statement: str, *, holds: bool) -> None:
    """Print a statement that holds; raise where it does not."""
    if not holds:
        raise ArithmeticError(f"does not hold: {statement}")
    print(f"  holds: {statement}")


def distance(first: Tensor, second: Tensor) -> float:
    """How far apart two tensors are, in norms of the second."""
    return ((first - second).norm() / second.norm()).item()


def fastest(language: Language, ways: list[Way], repetitions: int) -> list[float]:
    """Seconds of each way, the least of some interleaved repetitions."""
    rounds = [[language.seconds(way) for way in ways] for _ in range(repetitions)]
    return [min(times) for times in zip(*rounds, strict=True)]


def show(language: Language, repetitions: int) -> None:
    """Every way's peak, time and error, and what holds of them."""
    ways: dict[str, Way] = {
        "the whole loss": language.whole,
        "chunks, graph retained": language.retained,
        "chunks by mb.cut": language.cut,
        "mean of chunk means": language.means,
    }
    right = language.gradient(language.whole)
    errors = {name: distance(language.gradient(way), right) for name, way in ways.items()}
    peaks = {name: language.peak(way) for name, way in ways.items()}
    seconds = dict(zip(ways, fastest(language, list(ways.values()), repetitions), strict=True))
    print(f"\nPeak of the memory that tensors take, least time of {repetitions} interleaved repetitions,")
    print("and the gradient's relative error against the whole loss")
    for name in ways:
        print(f"  {name:<24}{peaks[name] / 2**20:9.1f} MiB{seconds[name] * 1e3:10.1f} ms{errors[name]:12.1e}")
    whole, retained, cut, means = ways
    traversals = len(language.parts(language.hidden()))
    require("chunks through the retained graph give the whole loss's gradient", holds=errors[retained] < 1e-4)
    require("chunks by mb.cut give the whole loss's gradient", holds=errors[cut] < 1e-4)
    print(f"  The whole loss takes {peaks[whole] / peaks[cut]:.1f} times the cut's memory. The retained graph takes")
    print(
        f"  {seconds[retained] / seconds[cut]:.1f} times its time: the trunk is traversed {traversals} times, not once."
    )
    print(f"  The mean of chunk means is off by {errors[means]:.1%}: chunks hold unequal counts of labels, so a label")
    print("  in a chunk with few weighs more. Divide each chunk's sum by the count of all.")
    print("  Chunks are views, which keep the storage of all hidden states alive; that is harmless here, since these")
    print("  are few beside the logits, and one traversal needs them all.")


def parser() -> OneSentenceParser:
    """The options."""
    made = OneSentenceParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=textwrap.dedent("""
            examples:
              python examples/chunked_loss.py
              python examples/chunked_loss.py --tokens 256 --vocabulary 8000 --chunks 4
        """),
    )
    made.add_argument("--tokens", type=int, default=1024, metavar="T", help="tokens of the sequence (default 1024)")
    made.add_argument("--width", type=int, default=64, metavar="D", help=f"of the trunk, by {HEADS} (default 64)")
    made.add_argument("--vocabulary", type=int, default=50_000, metavar="V", help="classes (default 50000)")
    made.add_argument("--chunks", type=int, default=16, metavar="K", help="of the loss (default 16)")
    made.add_argument("--repetitions", type=int, default=3, metavar="N", help="of each way (default 3)")
    made.add_argument("--seed", type=int, default=0, help="of weights, inputs and labels (default 0)")
    return made


def main() -> int:
    """Parse and show."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write lines to standard error
    options = parser()
    given = options.parse_args()
    if given.chunks < 2:
        options.error(f"--chunks: must be 2 or more, since chunks are the point; got {given.chunks}")
    if given.tokens < given.chunks:
        options.error(f"--tokens: must be at least the {given.chunks} chunks; got {given.tokens}")
    if given.width < HEADS or given.width % HEADS:
        options.error(f"--width: must be a positive multiple of {HEADS}, one part per head; got {given.width}")
    if given.vocabulary < 2:
        options.error(f"--vocabulary: must be 2 or more; got {given.vocabulary}")
    if given.repetitions < 1:
        options.error(f"--repetitions: must be 1 or more; got {given.repetitions}")
    if not 0 <= given.seed < 2**63:
        options.error(f"--seed: must be a whole number from 0 to 2^63 - 1; got {given.seed}")
    torch.manual_seed(given.seed)
    language = Language(given.tokens, given.width, given.vocabulary, given.chunks)
    print(f"{given.tokens} tokens, of which {language.count} have a label; hidden states of {given.width},")
    print(f"a vocabulary of {given.vocabulary:,}, chunks of {language.chunk} tokens")
    show(language, given.repetitions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
