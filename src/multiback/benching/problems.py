"""What is benched: a model, its data and its losses; and the presets."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention
from torch import Tensor, nn
from typing_extensions import override

from multiback.benching.names import PRESETS
from multiback.errors import OptionError

Data: TypeAlias = Any  # a tensor, a tuple for model(*data), or a dict for model(**data)
Loss: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Problem:
    """One forward pass and several losses to differentiate.

    Parameters
    ----------
    model : an `nn.Module`, or any callable.
    data : a tensor for `model(data)`, a tuple for `model(*data)`, a dict for `model(**data)`.
        Rows lie along dimension 0. Tensors that require grad are differentiated too.
    losses : one function `(output, data) -> tensor or sequence of tensors`, or a sequence of such
        functions. A tensor of any shape is as many losses as it has elements, so a function with
        `reduction="none"` gives one loss per row.
    targets : where given, losses are called as `(output, targets)`, the signature of torch's own
        loss modules.

    Nothing is run or copied here; breaches of these rules are raised as `InputError` when the
    problem is benched.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> problem = mb.Problem(
    ...     torch.nn.Linear(4, 3),
    ...     torch.rand(8, 4),
    ...     torch.nn.CrossEntropyLoss(reduction="none"),
    ...     targets=torch.randint(3, (8,)),
    ... )
    """

    model: Callable[..., Any]
    data: Data
    losses: Loss | Sequence[Loss]
    targets: Any = None


def mlp(*, batch: int = 1, num_losses: int = 2) -> Problem:
    """The published answer's net: 1024-4096-4096-1024 with ReLU, and two clamp losses."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return Problem(model, torch.rand(batch, 1024), published_losses(num_losses))


def two_layer(*, batch: int = 1, num_losses: int = 2) -> Problem:
    """The question's net: two layers, 40 features in and out, and an input that requires grad."""
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
    return Problem(model, torch.rand(batch, 40).requires_grad_(), published_losses(num_losses))


def slices(*, batch: int = 128, num_losses: int | None = None) -> Problem:
    """The CIFAR-10 tutorial's conv net on random images, one cross-entropy per image."""
    _one_loss_per_row("slices", num_losses, batch)
    images = torch.rand(batch, 3, 32, 32).requires_grad_()
    return Problem(tutorial_net(), images, nn.CrossEntropyLoss(reduction="none"), targets=torch.randint(10, (batch,)))


def heads(*, batch: int = 32, num_losses: int = 5) -> Problem:
    """A trunk of four layers with one small head and one loss per task."""
    model = _Heads(num_losses)
    targets = torch.randint(10, (num_losses, batch))
    losses = [_HeadLoss(task) for task in range(num_losses)]
    return Problem(model, torch.rand(batch, 256), losses, targets=targets)


def transformer(*, batch: int = 8, num_losses: int = 2) -> Problem:
    """A small encoder with losses on the same output: a token loss and sentence losses."""
    model = _Encoder()
    tokens = torch.randint(1000, (batch, 32))
    losses: list[Loss] = [_token_loss, *[_SentenceLoss(head) for head in range(1, num_losses)]]
    return Problem(model, tokens, losses)


def recurrent(*, batch: int = 4, num_losses: int = 1) -> Problem:
    """A recurrent net that keeps its hidden state, with its graph, from one step to the next."""
    losses = [_SentenceLoss(head) for head in range(num_losses)]
    return Problem(_Recurrent(batch), torch.rand(batch, 6, 16), losses)


_BUILDERS: dict[str, Callable[..., Problem]] = {
    "mlp": mlp,
    "two-layer": two_layer,
    "slices": slices,
    "heads": heads,
    "transformer": transformer,
    "recurrent": recurrent,
}


def build_preset(name: str, *, batch: int | None, num_losses: int | None) -> Problem:
    """The preset `name`, with its own defaults where `batch` or `num_losses` is None."""
    return call_builder(_BUILDERS[name], name, batch=batch, num_losses=num_losses)


def call_builder(build: Callable[..., Any], name: str, **options: int | None) -> Any:
    """Call `build` with the options that are set; OptionError where it takes none of that name."""
    given = {key: value for key, value in options.items() if value is not None}
    accepted = inspect.signature(build).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    for key in given:
        if key not in accepted and not takes_any:
            raise OptionError(
                f"--{key.replace('_', '-')}: the target must take an argument named {key}; {name} does not. "
                f"Add `{key}` to its arguments, or leave the option out."
            )
    return build(**given)


def published_losses(count: int = 2) -> list[Loss]:
    """The two losses of the published question, `(y * (c - x.clamp(0, 1))).sum()`; more with other c."""
    return [ClampLoss(0.5 * (index + 1)) for index in range(count)]


@dataclass(frozen=True)
class ClampLoss:
    """`(output * (centre - data.clamp(0, 1))).sum()`."""

    centre: float

    def __call__(self, output: Tensor, data: Tensor) -> Tensor:
        """Give the loss."""
        return (output * (self.centre - data.clamp(0, 1))).sum()


@dataclass(frozen=True)
class WeightedSum:
    """A sum of all outputs with fixed random weights, drawn from `seed`."""

    seed: int

    def __call__(self, output: Any, _data: Any) -> Tensor:
        """Give the loss; the same weights in every call."""
        generator = torch.Generator().manual_seed(self.seed)
        total = torch.zeros(())
        for tensor in _tensors(output):
            weights = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
            total = total.to(tensor.device, tensor.dtype) + (tensor * weights).sum()
        return total


def _tensors(value: Any) -> list[Tensor]:
    """The real floating tensors in a nested output."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _one_loss_per_row(name: str, num_losses: int | None, batch: int) -> None:
    if num_losses not in (None, batch):
        raise OptionError(
            f"--num-losses: {name} has one loss per row, so it must equal the batch of {batch}; "
            f"got {num_losses}. Use --batch {num_losses}."
        )


def tutorial_net() -> nn.Sequential:
    """The conv net of the CIFAR-10 tutorial: conv 3-6-5, pool, conv 6-16-5, pool, 400-120-84-10."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


class _Heads(nn.Module):
    def __init__(self, tasks: int) -> None:
        super().__init__()
        layers = [layer for width in (256, 512, 512, 512) for layer in (nn.Linear(width, 512), nn.ReLU())]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(512, 10) for _ in range(tasks))

    @override
    def forward(self, data: Tensor) -> list[Tensor]:
        hidden = self.trunk(data)
        return [head(hidden) for head in self.heads]


@dataclass(frozen=True)
class _HeadLoss:
    task: int

    def __call__(self, output: Sequence[Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(output[self.task], targets[self.task])


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(64, 1000)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.encoder(self.embedding(tokens)))


def _token_loss(output: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class _SentenceLoss:
    feature: int

    def __call__(self, output: Tensor, _data: Tensor) -> Tensor:
        return output.mean(dim=1)[:, self.feature].square().mean()


class _Recurrent(nn.Module):
    hidden: Tensor

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.cell = nn.GRU(16, 32, batch_first=True)
        self.hidden = torch.zeros(1, batch, 32)

    @override
    def forward(self, data: Tensor) -> Tensor:
        output, self.hidden = self.cell(data, self.hidden.to(data.dtype))
        return output


if set(_BUILDERS) != set(PRESETS):
    raise AssertionError("every preset that is listed must be built, and the other way round")
