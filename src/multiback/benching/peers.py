"""Other libraries that answer the same requests, each used as its own documentation has it; none is required."""

import copy
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from multiback.benching.bound import Bound
from multiback.benching.targets import first_line
from multiback.errors import ProblemError
from multiback.nested import map_tensors

_MODULES: dict[str, tuple[str, ...]] = {
    "TorchJD": ("torchjd.autojac", "torchjd.autogram"),
    "Opacus": ("opacus",),
    "BackPACK": ("backpack", "backpack.extensions"),
}
_LEFT = ("grad_sample", "grad_batch")  # where Opacus and BackPACK leave per-sample gradients


def preload(ways: Iterable[str]) -> None:
    """Import what these ways need, which takes seconds, before anything is timed; failures show in the ways."""
    for name in dict.fromkeys(module for way in ways for module in _MODULES.get(way, ())):
        try:
            importlib.import_module(name)
        except Exception:  # noqa: S110 -- the way that needs it raises it again, and its reason is reported
            pass


def release(bound: Bound) -> None:
    """Drop the gradients that a run left on the copies of the model, so that the next one starts without."""
    for kept in bound.kept.values():
        kept.release()


def torchjd_jacobian(bound: Bound) -> Callable[[], list[Tensor]]:
    """TorchJD's Jacobians [K, *shape] of every parameter."""
    jac = _module("torchjd.autojac").jac
    return lambda: list(jac(bound.loss_tensors(bound.forward()), bound.parameters))


def torchjd_gramian(bound: Bound) -> Callable[[], Tensor]:
    """The Gramian [K, K] by TorchJD's autogram engine, told of the batch where there is one loss per row."""
    make = _module("torchjd.autogram").Engine
    batch_dim = 0 if bound.has_row_losses else None
    kept = _kept(bound, "TorchJD", lambda model: make(model, batch_dim=batch_dim))
    model = kept.prepared()
    return lambda: kept.made.compute_gramian(bound.vector(bound.forward(model=model)))


def opacus_rows(bound: Bound) -> Callable[[], list[Tensor]]:
    """Opacus' per-sample gradients [B, *shape] of every parameter."""
    wrap = _module("opacus").GradSampleModule
    kept = _kept(bound, "Opacus", lambda model: wrap(model, loss_reduction="sum"))
    return _summed_backward(bound, kept.made, kept.prepared(), "grad_sample")


def backpack_rows(bound: Bound) -> Callable[[], list[Tensor]]:
    """BackPACK's per-sample gradients [B, *shape] of every parameter."""
    backpack, extensions = _module("backpack"), _module("backpack.extensions")
    kept = _kept(bound, "BackPACK", backpack.extend)
    model = kept.prepared()
    step = _summed_backward(bound, kept.made, model, "grad_batch")

    def call() -> list[Tensor]:
        with backpack.backpack(extensions.BatchGrad()):
            return step()

    return call


def _summed_backward(bound: Bound, made: Any, model: nn.Module, attribute: str) -> Callable[[], list[Tensor]]:
    """Forward, backward of the summed losses, and what that left on the parameters.

    The data are detached: `backward()` would else compute their gradients too, which nobody asked for.
    """
    data = map_tensors(bound.data, Tensor.detach)
    named = [item for item in model.named_parameters() if item[1].requires_grad]

    def call() -> list[Tensor]:
        bound.vector(bound.forward(data, made)).sum().backward()
        found = [(name, getattr(parameter, attribute, None)) for name, parameter in named]
        missing = [name for name, one in found if not isinstance(one, Tensor)]
        if missing:
            raise ProblemError(f"it gives no per-sample gradients of {', '.join(missing)}")
        return [one for _, one in found if isinstance(one, Tensor)]

    return call


class _Kept:
    """A copy of the model for a library that changes what it is given, made once and kept from run to run."""

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], Any]) -> None:
        self._model = copy.deepcopy(model)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        self.made = make(self._model)

    def prepared(self) -> nn.Module:
        """The copy, its buffers as they were at first."""
        with torch.no_grad():
            for buffer, saved in self._buffers:
                buffer.copy_(saved)
        return self._model

    def release(self) -> None:
        """Free what a backward left on the parameters."""
        for parameter in self._model.parameters():
            for name in ("grad", *_LEFT):
                if getattr(parameter, name, None) is not None:
                    setattr(parameter, name, None)


def _kept(bound: Bound, name: str, make: Callable[[nn.Module], Any]) -> _Kept:
    if not isinstance(bound.model, nn.Module):
        raise ProblemError(f"it takes an nn.Module; the model is {type(bound.model).__name__}")
    if len(bound.modules) > 1 and any(p.requires_grad for loss in bound.modules[1:] for p in loss.parameters()):
        raise ProblemError("it takes one model, and a loss function has parameters of its own")
    if name not in bound.kept:
        bound.kept[name] = _Kept(bound.model, make)
    kept = bound.kept[name]
    if not isinstance(kept, _Kept):
        raise AssertionError(f"{name} keeps a copy of the model")
    return kept


def _module(name: str) -> Any:
    """A library's module, which carries no types here, since it need not be installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ProblemError(f"{error.name} is not installed") from error
    except Exception as error:
        raise ProblemError(f"importing {name} raised {type(error).__name__}: {first_line(error)}") from error
