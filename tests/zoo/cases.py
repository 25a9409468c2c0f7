"""What an entry of the zoo is, and how a model and its input become one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 4
LOSSES = 3

FLOAT32, FLOAT64, BFLOAT16 = 1e-4, 1e-9, 5e-2


@dataclass(frozen=True)
class Case:
    """A model built, its input, and fresh losses of it at every call."""

    model: nn.Module
    batch: Tensor
    parameters: dict[str, Tensor]
    data: Tensor | None
    rows: Callable[[], Tensor]
    dense: Callable[[], list[Tensor]]
    tolerance: float


@dataclass(frozen=True)
class Entry:
    """A model to build, and what is known of it without building it."""

    name: str
    build: Callable[[], Case]
    independent: bool
    traits: frozenset[str]


class Net(nn.Module):
    """Named parts, and a function of itself and the inputs: a model in one expression."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs, **named_inputs):
        return self.function(self, *inputs, **named_inputs)


@contextmanager
def one_thread() -> Iterator[None]:
    """A single thread for torch: with two on busy cores a tiny convolution takes a hundred times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def weight(*shape: int) -> nn.Parameter:
    """A parameter with random entries."""
    return nn.Parameter(torch.randn(shape) / 2)


def tokens(length: int, kinds: int = 11) -> Callable[[], Tensor]:
    """A batch of sequences of integers, none of them zero: zero is padding."""
    return lambda: torch.randint(1, kinds, (BATCH, length))


class Pen(list[Entry]):
    """The entries of one file."""

    def add(
        self,
        name: str,
        inputs: tuple[int, ...] | Callable[[], Tensor],
        make: Callable[[], nn.Module],
        *traits: str,
        losses: Callable[[nn.Module, Any], Tensor] | None = None,
        independent: bool = True,
        tolerance: float = FLOAT32,
    ) -> None:
        """Keep the model that `make` gives.

        `inputs` is the shape of a row of the data, or makes the batch; `losses` replaces the usual loss per row by one
        of the model and its output.
        """

        def build() -> Case:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = make()
                batch = inputs() if callable(inputs) else torch.randn(BATCH, *inputs)
            return case_of(model, batch, losses, tolerance)

        self.append(Entry(name, build, independent, frozenset(traits)))


def case_of(model: nn.Module, batch: Tensor, losses: Callable[..., Tensor] | None, tolerance: float) -> Case:
    """The case of a model applied to a batch, which is data to differentiate by unless it holds integers."""
    data = batch.detach().requires_grad_() if batch.is_floating_point() or batch.is_complex() else None
    kept = [(m, name, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]

    def fresh() -> Any:
        _restore(kept)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            outputs = model(batch if data is None else data)
        return outputs if losses is None else losses(model, outputs)

    return Case(
        model=model,
        batch=batch,
        parameters={name: p for name, p in model.named_parameters() if p.requires_grad},
        data=data,
        rows=lambda: row_losses(fresh()) if losses is None else fresh(),
        dense=lambda: dense_losses(fresh()),
        tolerance=tolerance,
    )


def _restore(kept: list[tuple[nn.Module, str, Tensor]]) -> None:
    # A new tensor rather than a copy into the old one, which a graph made by an earlier call may have saved.
    for module, name, value in kept:
        now = module._buffers[name]
        if not torch.equal(now, value.to(now.dtype)):
            module._buffers[name] = value.to(now.dtype, copy=True)


def row_losses(outputs: Any) -> Tensor:
    """Half the mean squared distance of each row of the outputs from a fixed target, shape [B]."""
    return sum(
        (0.5 * (output - _random(output, -1, index)) ** 2).reshape(len(output), -1).mean(1)
        for index, output in enumerate(_tensors(outputs))
    )


def dense_losses(outputs: Any) -> list[Tensor]:
    """Scalars that each mix all the rows of all the outputs, by fixed random weights."""
    flat = list(enumerate(_tensors(outputs)))
    return [
        sum((_random(output, which, index) * (output + output**2)).mean() for index, output in flat)
        for which in range(LOSSES)
    ]


def _random(like: Tensor, *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + sum((part + 2) * 100**place for place, part in enumerate(seed)))
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield torch.view_as_real(outputs) if outputs.is_complex() else outputs
    else:
        for output in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _tensors(output)
