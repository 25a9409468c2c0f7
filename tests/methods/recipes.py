"""Small random graphs: operations in a row on tensors [B, D], losses, and what to differentiate them by."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 4
TOKENS = 5


@dataclass
class Shelf:
    """Tensors made so far: `values` [B, D], and parameters, which operations use again by name."""

    batch: int
    dtype: torch.dtype
    plain: bool
    generator: torch.Generator
    values: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def parameter(self, name: str, *shape: int) -> Tensor:
        """A parameter, or, where the shelf holds plain tensors, a leaf that is none."""
        if name not in self.parameters:
            value = self.random(*shape) / 2
            self.parameters[name] = value.requires_grad_() if self.plain else nn.Parameter(value)
        return self.parameters[name]

    def square(self, number: int) -> Tensor:
        return self.parameter(f"w{number % 2}", WIDTH, WIDTH)

    def scale(self, number: int) -> Tensor:
        """A scale or bias that is broadcast over rows, columns or both, or holds a value for each."""
        shapes = ((WIDTH,), (1, WIDTH), (1,), (), (self.batch, 1), (self.batch, WIDTH))
        return self.parameter(f"s{number % len(shapes)}", *shapes[number % len(shapes)])

    def indices(self, count: int, *shape: int) -> Tensor:
        return torch.randint(0, count, shape, generator=self.generator)


Operation = Callable[[Shelf, Tensor, Tensor, int], Tensor]


def three_dimensions(shelf, x, _other, n):
    """A linear layer on [B, 2, D / 2], or with the batch in the middle."""
    x = x.reshape(shelf.batch, 2, 2)
    weight, bias = shelf.parameter("half", 2, 2), shelf.parameter("half bias", 2)
    if n % 2:
        return F.linear(x.transpose(0, 1), weight, bias if n % 3 else None).transpose(0, 1).reshape(-1, WIDTH)
    return F.linear(x, weight, bias if n % 3 else None).reshape(-1, WIDTH)


def convolved(shelf, x, _other, n):
    bias = shelf.parameter("kernel bias", 2) if n % 2 else None
    return F.conv1d(x.reshape(-1, 2, 2), shelf.parameter("kernel", 2, 2, 3), bias, padding=1).flatten(1)


def transposed_convolution(shelf, x, _other, n):
    return F.conv_transpose1d(x.reshape(-1, 2, 2), shelf.parameter("kernel", 2, 2, 3), padding=1).flatten(1)


def grouped_convolution(shelf, x, _other, n):
    return F.conv1d(x.reshape(-1, 4, 1), shelf.parameter("groups", 4, 2, 1), groups=2).flatten(1)


def looked_up(shelf, x, _other, n):
    padding = 0 if n % 2 else None
    return x + F.embedding(shelf.indices(TOKENS, shelf.batch), shelf.parameter("table", TOKENS, WIDTH), padding)


def shared_look_up(shelf, x, _other, n):
    """The same rows of a table for every row of the batch."""
    table = shelf.parameter("table", TOKENS, WIDTH)
    return x * F.embedding(torch.arange(WIDTH) % TOKENS, table).sum(1 if n % 2 else 0)


def layer_norm(shelf, x, _other, n):
    scale = shelf.parameter("norm scale", WIDTH) if n % 2 else None
    shift = shelf.parameter("norm shift", WIDTH) if n % 3 else None
    return F.layer_norm(x, (WIDTH,), scale, shift)


def group_norm(shelf, x, _other, n):
    scale, shift = shelf.parameter("channel scale", 2), shelf.parameter("channel shift", 2)
    return F.group_norm(x.reshape(-1, 2, 2), 2, scale, shift).flatten(1) + x


def batch_norm(shelf, x, _other, n):
    """With running statistics, so that rows stay apart."""
    mean, spread = shelf.random(WIDTH), shelf.random(WIDTH).abs() + 0.5
    return F.batch_norm(x, mean, spread, shelf.parameter("norm scale", WIDTH), shelf.parameter("norm shift", WIDTH))


def attended(shelf, x, other, n):
    query, key = x.reshape(-1, 1, 2, 2), other.reshape(-1, 1, 2, 2)
    return F.scaled_dot_product_attention(query, key, key if n % 2 else query).flatten(1)


def added_in_place(shelf, x, other, n):
    return x.clone().add_(other).mul_(shelf.scale(n))


def chunked(shelf, x, other, n):
    first, second = x.chunk(2, 1)
    return torch.cat([second, first if n % 2 else other[:, :2]], 1)


APART: dict[str, Operation] = {
    "linear": lambda shelf, x, _, n: F.linear(x, shelf.square(n), shelf.scale(n % 4) if n % 8 != 3 else None),
    "product": lambda shelf, x, _, n: x @ (shelf.square(n) if n % 2 else shelf.square(n).t()),
    "addmm": lambda shelf, x, _, n: torch.addmm(shelf.scale(n), x, shelf.square(n), alpha=1 + n % 2, beta=1 + n % 3),
    "made weight": lambda shelf, x, _, n: F.linear(x, shelf.square(n) * shelf.scale(n % 4)),
    "softmaxed weight": lambda shelf, x, _, n: x @ shelf.square(n).softmax(n % 2),
    "tanh": lambda _shelf, x, _, n: x.tanh(),
    "relu": lambda _shelf, x, _, n: x.relu() + 0.1 * x,
    "sine": lambda _shelf, x, _, n: x.sin() * x.cos(),
    "gelu": lambda _shelf, x, _, n: F.gelu(x),
    "root": lambda _shelf, x, _, n: (x.square() + 1).sqrt(),
    "added scale": lambda shelf, x, _, n: x + shelf.scale(n),
    "scaled": lambda shelf, x, _, n: shelf.scale(n) * x,
    "subtracted": lambda shelf, x, _, n: torch.sub(x, shelf.scale(n), alpha=2) if n % 2 else shelf.scale(n) - x,
    "divided": lambda shelf, x, _, n: x / (1 + shelf.scale(n).square()),
    "expanded": lambda shelf, x, _, n: x * shelf.parameter("s0", WIDTH).expand(shelf.batch, WIDTH),
    "repeated": lambda shelf, x, _, n: x + shelf.parameter("s0", WIDTH).repeat(shelf.batch, 1),
    "sum": lambda _shelf, x, other, n: x + other,
    "product of two": lambda _shelf, x, other, n: x * other.tanh(),
    "softmax": lambda _shelf, x, _, n: x.softmax(1) if n % 2 else x.log_softmax(-1),
    "centred": lambda _shelf, x, _, n: x - x.mean(1, keepdim=True),
    "cumulative": lambda _shelf, x, _, n: x.cumsum(1) / 2,
    "turned columns": lambda _shelf, x, _, n: x.flip(1) if n % 2 else x[:, [2, 0, 1, 3]],
    "halves swapped": lambda shelf, x, _, n: x.reshape(shelf.batch, 2, 2).transpose(1, 2).reshape(-1, WIDTH),
    "masked": lambda shelf, x, _, n: x * (shelf.random(shelf.batch, WIDTH) > 0),
    "masked by rows": lambda shelf, x, _, n: x * (shelf.random(shelf.batch, 1) > 0),
    "partly detached": lambda _shelf, x, other, n: x + other.detach(),
    "three dimensions": three_dimensions,
    "convolved": convolved,
    "transposed convolution": transposed_convolution,
    "grouped convolution": grouped_convolution,
    "looked up": looked_up,
    "shared look-up": shared_look_up,
    "layer norm": layer_norm,
    "group norm": group_norm,
    "batch norm": batch_norm,
    "attended": attended,
    "in place": added_in_place,
    "chunked": chunked,
}

MIXING: dict[str, Operation] = {
    "less the mean": lambda _shelf, x, _, n: x - x.mean(0),
    "permuted": lambda shelf, x, _, n: x[torch.randperm(shelf.batch, generator=shelf.generator)],
    "flipped": lambda _shelf, x, _, n: x.flip(0),
    "rolled": lambda _shelf, x, _, n: x + 0.1 * x.roll(1, 0),
    "drawn rows": lambda shelf, x, _, n: x[shelf.indices(shelf.batch, shelf.batch)],
    "summed so far": lambda _shelf, x, _, n: x.cumsum(0) / 3,
    "softmax over rows": lambda _shelf, x, _, n: x.softmax(0),
    "products of rows": lambda _shelf, x, other, n: (x @ other.t()).tanh() @ x,
    "train-mode batch norm": lambda _shelf, x, _, n: F.batch_norm(x, None, None, training=True, eps=0.1),
    "first row added": lambda _shelf, x, _, n: x + x[:1],
    "a row as a bias": lambda shelf, x, _, n: x + x[n % shelf.batch],
    "times their total": lambda _shelf, x, _, n: x * (1 + x.sum() / 10),
    "mixed by a matrix": lambda shelf, x, _, n: shelf.random(shelf.batch, shelf.batch) @ x,
    "rows as a weight": lambda shelf, x, _, n: F.linear(shelf.random(WIDTH, WIDTH), x).t(),
    "stacked and turned": lambda _shelf, x, _, n: torch.stack([x]).transpose(0, 1)[:, 0] + x.mean(0),
    "other layout": lambda shelf, x, _, n: x.t().reshape(shelf.batch, WIDTH),
    "table of rows": lambda shelf, x, _, n: F.embedding(shelf.indices(shelf.batch, shelf.batch), x),
    "halves of rows": lambda shelf, x, _, n: torch.cat([x[shelf.batch // 2 :], x[: shelf.batch // 2]]),
    "convolved over rows": lambda shelf, x, _, n: F.conv1d(
        x.t(), shelf.parameter("row kernel", 4, 4, 3), padding=1
    ).t(),
    "rarely": lambda _shelf, x, _, n: x + (x.mean(0) - 0.5).relu(),
}


@dataclass(frozen=True)
class Graph:
    """A graph that has been built: its losses as they are asked for, and all that might be differentiated by."""

    losses: Tensor | list[Tensor]
    scalars: list[Tensor]
    candidates: dict[str, Tensor]
    parameters: frozenset[str]

    @property
    def distinct(self) -> list[int]:
        """Places of the losses that are no repetition of another."""
        return list({id(loss): place for place, loss in reversed(list(enumerate(self.scalars)))}.values())


def slices(shelf: Shelf, output: Tensor, n: int) -> list[Tensor]:
    """One loss per part of the rows: ragged, in any order, perhaps with rows of no loss."""
    cuts = sorted({0, shelf.batch, *shelf.indices(shelf.batch, 1 + n % 3).tolist()})
    pairs = list(itertools.pairwise(cuts))
    if n % 2 and len(pairs) > 2:
        pairs = pairs[1:][::-1]
    return [(output[start:stop].square() if n % 3 else output[start:stop].sin()).mean() for start, stop in pairs]


def mixtures(shelf: Shelf, output: Tensor, n: int) -> list[Tensor]:
    found = [(shelf.random(shelf.batch, WIDTH) * (output + output.square())).mean() for _ in range(1 + n % 4)]
    return [*found, found[0], found[0] / 2] if n % 5 == 0 else found


LOSSES: dict[str, Callable[[Shelf, Tensor, int], Tensor | list[Tensor]]] = {
    "per row": lambda _shelf, y, n: y.square().mean(1) if n % 2 else (y * y.detach().sin()).sum(1),
    "classes": lambda shelf, y, n: F.cross_entropy(y, shelf.indices(WIDTH, shelf.batch), reduction="none"),
    "squares": lambda shelf, y, n: F.mse_loss(y, shelf.random(*y.shape), reduction="none").mean(-1),
    "mixtures": mixtures,
    "slices": slices,
    "repeated": lambda shelf, y, n: [one for one in slices(shelf, y, n) for _ in range(1 + n % 2)],
    "repeated mixtures": lambda shelf, y, n: [*(found := mixtures(shelf, y, n)), found[-1]],
    "elements": lambda _shelf, y, n: y[:, :2] if n % 2 else y.flatten()[: 3 + n % 4],
    "some rows": lambda _shelf, y, n: y.sum(1)[1:] if n % 2 else y.sum(1)[[1, 0]],
    "regularised": lambda shelf, y, n: y.square().sum(1) + shelf.square(n).square().sum(),
    "stacked": lambda _shelf, y, n: torch.stack([row.square().sum() for row in y.unbind()]),
    "unbound": lambda _shelf, y, n: list(y.square().sum(1).unbind()),
}

STEPS = st.lists(
    st.tuples(st.sampled_from([*APART, *APART, *MIXING]), st.integers(0, 9), st.integers(0, 9), st.integers(0, 23)),
    min_size=1,
    max_size=8,
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A graph, and a subset of what it could be differentiated by."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    shelf = Shelf(draw(st.integers(2, 5)), dtype, draw(st.booleans()), generator)
    shelf.values.append(shelf.random(shelf.batch, WIDTH).requires_grad_(draw(st.integers(0, 3)) > 0))
    for name, first, second, n in draw(STEPS):
        operation = APART.get(name) or MIXING[name]
        x, other = (shelf.values[-1 - place % min(3, len(shelf.values))] for place in (first // 4, second))
        shelf.values.append(operation(shelf, x, other, n))
    output = shelf.values[-1]
    if not output.requires_grad:
        output = output * shelf.parameter("s0", WIDTH)
    losses = LOSSES[draw(st.sampled_from(list(LOSSES)))](shelf, output, draw(st.integers(0, 23)))
    values = {f"value {place}": value for place, value in enumerate(shelf.values) if value.requires_grad}
    unused = {"unused": shelf.random(WIDTH + 3, WIDTH).requires_grad_()}
    scalars = list(losses.flatten().unbind()) if isinstance(losses, Tensor) else losses
    return Graph(losses, scalars, {**values, **shelf.parameters, **unused}, frozenset(shelf.parameters))
