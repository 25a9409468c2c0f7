"""The usual ways to many gradients, each written as its own documentation would have it, for one shared case.

Only ways that are given a finished graph can leave the forward pass out of their time; so that all are alike,
every way here runs the forward pass itself, unless a script asks for a finished graph.
"""

import copy
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from harness import Prepare
from nets import NETS, OUTPUTS, data_of, split_attention

Answer = Callable[[Tensor, tuple[Tensor, ...]], object]

# Imported once, before the measuring processes are forked. One that is missing is named when it is asked for.
for _name in ("torchjd.autojac", "torchjd.autogram", "opacus", "backpack.extensions"):
    try:
        importlib.import_module(_name)
    except ImportError:
        pass
for _message in ("There is a performance drop", "Full backward hook is firing", "Extension saving to grad_batch"):
    warnings.filterwarnings("ignore", message=_message)


@dataclass(frozen=True)
class Case:
    """A net, its data, and K losses that weigh the outputs with fixed random numbers.

    `weights` is [K, B, outputs] for losses that depend on every row, and [B, outputs] for losses of
    B / K rows each.
    """

    net: nn.Module
    data: Tensor
    weights: Tensor
    count: int

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """What is differentiated with respect to."""
        return tuple(self.net.parameters())

    def losses_of(self, output: Tensor) -> Tensor:
        """The K losses of an output."""
        if self.weights.dim() == 3:
            return (output[None] * self.weights).sum((1, 2))
        return (output * self.weights).sum(1).view(self.count, -1).sum(1)

    def losses(self) -> Tensor:
        """A forward pass."""
        return self.losses_of(self.net(self.data))

    def copied(self) -> nn.Module:
        """A copy of the net, for a way that changes the module it is given."""
        return copy.deepcopy(self.net)


def dense_case(net: str, batch: int, count: int) -> Case:
    """Losses that each depend on every row."""
    return Case(NETS[net](), data_of(net, batch), torch.randn(count, batch, OUTPUTS) / 10, count)


def sliced_case(net: str, batch: int, count: int) -> Case:
    """Losses of disjoint slices of the batch; with as many losses as rows, one loss per row."""
    return Case(NETS[net](), data_of(net, batch), torch.randn(batch, OUTPUTS), count)


def on_graph(case: Case, answer: Answer, *, forward: bool = True) -> Prepare:
    """A way that works on a graph, with or without the time of the forward pass that makes it."""

    def prepare() -> Callable[[], object]:
        if forward:
            return lambda: answer(case.losses(), case.parameters)
        losses = case.losses()
        return lambda: answer(losses, case.parameters)

    return prepare


def loop(losses: Tensor, inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """One traversal per loss; the gradients as they come, one tuple per loss, which is the least work."""
    last = len(losses) - 1
    return [torch.autograd.grad(losses[k], inputs, retain_graph=k < last) for k in range(len(losses))]


def batched(losses: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One traversal for all losses at once, by torch's own option."""
    return torch.autograd.grad(losses, inputs, torch.eye(len(losses)), is_grads_batched=True)


def torchjd_jac(losses: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """TorchJD's Jacobian."""
    return _peer("torchjd.autojac").jac(losses, list(inputs))


def functional_jacobian(case: Case) -> Prepare:
    """torch.func's reverse-mode Jacobian of the net as a function of its parameters."""
    values = {name: parameter.detach() for name, parameter in case.net.named_parameters()}

    def losses(values: dict[str, Tensor]) -> Tensor:
        return case.losses_of(functional_call(case.net, values, (case.data,)))

    jacobian = jacrev(losses)
    return lambda: lambda: jacobian(values)


def functional_rows(case: Case) -> Prepare:
    """torch.func's per-sample gradients, as its tutorial has them: vmap over grad."""
    values = {name: parameter.detach() for name, parameter in case.net.named_parameters()}

    def loss(values: dict[str, Tensor], row: Tensor, weights: Tensor) -> Tensor:
        return (functional_call(case.net, values, (row[None],)) * weights).sum()

    rows = vmap(grad(loss), in_dims=(None, 0, 0))
    return lambda: lambda: rows(values, case.data, case.weights)


def opacus_rows(case: Case) -> Prepare:
    """Opacus' per-sample gradients.

    It has none for torch's attention, and its own replacement gives other outputs where rows come first
    (1.6.0), so that attention is taken apart into linear layers, which it has.
    """
    net = _peer("opacus").GradSampleModule(split_attention(case.copied()), loss_reduction="sum")
    names = [name for name, _ in case.net.named_parameters()]

    def step() -> Callable[[], object]:
        case.losses_of(net(case.data)).sum().backward()
        found = {name.removeprefix("_module."): p.grad_sample for name, p in net.named_parameters()}
        return lambda: [_opacus_gradient(found, name) for name in names]

    def prepare() -> Callable[[], object]:
        net.zero_grad(set_to_none=True)  # with the per-sample gradients
        return step

    return prepare


def _opacus_gradient(found: dict[str, Any], name: str) -> Tensor:
    """The gradient of a parameter; the attention it is given has three where torch's has one."""
    if "in_proj_" not in name:
        return found[name]
    return torch.cat([found[name.replace("in_proj_", f"{part}.")] for part in ("query", "key", "value")], dim=1)


def backpack_rows(case: Case) -> Prepare:
    """BackPACK's per-sample gradients."""
    backpack, extensions = _peer("backpack"), _peer("backpack.extensions")
    net = backpack.extend(case.copied())
    parameters: list[Any] = list(net.parameters())

    def step() -> list[Tensor]:
        with backpack.backpack(extensions.BatchGrad()):
            case.losses_of(net(case.data)).sum().backward()
        try:
            return [parameter.grad_batch for parameter in parameters]
        except AttributeError:
            raise NotImplementedError(f"no per-sample gradients for {', '.join(_unsupported(net))}") from None

    def prepare() -> Callable[[], object]:
        for parameter in parameters:
            parameter.grad = None
            if hasattr(parameter, "grad_batch"):
                del parameter.grad_batch
        return step

    return prepare


def _unsupported(net: nn.Module) -> list[str]:
    """The kinds of module whose parameters BackPACK left without gradients."""
    left = {
        type(module).__name__
        for module in net.modules()
        if any(not hasattr(parameter, "grad_batch") for parameter in module.parameters(recurse=False))
    }
    return sorted(left)


def engine_gramian(case: Case) -> Prepare:
    """TorchJD's autogram engine, for losses of one row each."""
    net = case.copied()
    engine = _peer("torchjd.autogram").Engine(net, batch_dim=0)
    return lambda: lambda: engine.compute_gramian(case.losses_of(net(case.data)))


def loop_gramian(losses: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """The Gramian from K whole gradients."""
    rows = torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in loop(losses, inputs)])
    return rows @ rows.T


def _peer(name: str) -> Any:
    """A module of a peer, which carries no types here, since it need not be installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is not installed; `make peers` makes an environment with it"
        ) from error
