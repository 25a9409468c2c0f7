"""State around a forward pass: random number generators, autocast, train modes and buffers."""

import random
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Randomness:
    """The states of torch's generators (CPU and every CUDA device), of `random` and of `numpy.random`."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: tuple[Any, ...] | None
    numpy: dict[str, Any] | None

    @classmethod
    def read(cls, *, torch_alone: bool = False) -> "Randomness":
        """The states as they are now, 10 kB; some 40 microseconds, nearly all of them for numpy's."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        if torch_alone:
            return cls(torch.get_rng_state(), cuda, None, None)
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(legacy=False))

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)

    def same_as(self, other: "Randomness") -> bool:
        """Whether nothing was drawn between the two."""
        mine, theirs = (self.numpy or {}).get("state", {}), (other.numpy or {}).get("state", {})
        return (
            torch.equal(self.cpu, other.cpu)
            and len(self.cuda) == len(other.cuda)
            and all(torch.equal(one, two) for one, two in zip(self.cuda, other.cuda, strict=True))
            and self.python == other.python
            and mine.keys() == theirs.keys()
            and all(np.array_equal(mine[key], theirs[key]) for key in mine)
        )


@contextmanager
def random_kept(*, torch_alone: bool = False) -> Generator[None]:
    """Put every generator back on leaving."""
    state = Randomness.read(torch_alone=torch_alone)
    try:
        yield
    finally:
        if not state.same_as(Randomness.read(torch_alone=torch_alone)):
            state.restore()


@dataclass(frozen=True)
class Autocast:
    """Autocast as it stood, by device type: (type, enabled, dtype)."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool

    @classmethod
    def read(cls, types: Iterable[str]) -> "Autocast":
        """The settings for those device types, the CPU's always among them."""
        kinds = sorted({"cpu", *types})
        settings = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(settings, torch.is_autocast_cache_enabled())

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes that it computes in; empty where it is off."""
        return [dtype for _, enabled, dtype in self.settings if enabled]

    @contextmanager
    def replayed(self) -> Generator[None]:
        """The same settings again."""
        if torch.is_autocast_cache_enabled() == self.cached and all(
            torch.is_autocast_enabled(kind) == enabled and torch.get_autocast_dtype(kind) == dtype
            for kind, enabled, dtype in self.settings
        ):
            yield
            return
        with ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cached))
            yield


class Modes:
    """Modules' train or eval modes."""

    def __init__(self) -> None:
        self._modes: dict[nn.Module, bool] = {}

    def add(self, root: nn.Module) -> None:
        """Remember the modes of a module and its children, where they are not known yet."""
        for module in root.modules():
            self._modes.setdefault(module, module.training)

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._modes

    @contextmanager
    def replayed(self) -> Generator[None]:
        """The same modes again, and on leaving those that were found."""
        found = [(module, now) for module, then in self._modes.items() if (now := module.training) != then]
        try:
            for module, training in found:
                module.training = not training
            yield
        finally:
            for module, training in found:
                module.training = training


@dataclass(frozen=True, eq=False)
class Buffer:
    """One place of a buffer: its module, its name there and its name from the outermost module."""

    module: nn.Module
    key: str
    name: str

    @property
    def tensor(self) -> Tensor | None:
        """What is in it now."""
        return self.module._buffers.get(self.key)

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever another tensor is put there or the one that is there is written to openly."""
        tensor = self.tensor
        return (0, 0) if tensor is None else (id(tensor), tensor._version)


def buffers_of(modules: Sequence[nn.Module]) -> list[Buffer]:
    """Every buffer of the modules and their children, each place once."""
    found: dict[tuple[int, str], Buffer] = {}
    for root in modules:
        for prefix, module in root.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    found.setdefault((id(module), key), Buffer(module, key, name))
    return list(found.values())


class BufferValues:
    """Copies of buffers, to be put back."""

    def __init__(self, buffers: Iterable[Buffer] = ()) -> None:
        self._kept: dict[Buffer, tuple[Tensor, Tensor]] = {}
        self.add(buffers)

    def add(self, buffers: Iterable[Buffer]) -> None:
        """Copy these as well."""
        for buffer in buffers:
            tensor = buffer.tensor
            if tensor is not None:
                self._kept[buffer] = tensor, tensor.detach().clone()

    def changed(self) -> list[Buffer]:
        """The buffers that are another tensor now, or hold other values."""
        return [
            buffer
            for buffer, (tensor, value) in self._kept.items()
            if buffer.tensor is not tensor or not torch.equal(tensor, value)
        ]

    def only(self, buffers: Iterable[Buffer]) -> "BufferValues":
        """Those copies alone."""
        found = BufferValues()
        found._kept = {buffer: self._kept[buffer] for buffer in buffers if buffer in self._kept}
        return found

    def restore(self) -> None:
        """The same tensors with the same values; what saved them for a backward can still run."""
        for buffer, (tensor, value) in self._kept.items():
            if not torch.equal(tensor, value):
                tensor.data.copy_(value)  # through .data, which leaves the version as it is
            buffer.module._buffers[buffer.key] = tensor


class Attributes:
    """Modules' attributes that are numbers, flags or texts, such as a count of calls or a strength that is set."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._kept = [
            (part, name, value)
            for root in self._modules
            for part in root.modules()
            for name, value in part.__dict__.items()
            if type(value) in (int, float, bool, str) and name != "training" and not name.startswith("_")
        ]

    def changed(self) -> "Attributes":
        """Those that have another value now, with the value that they had."""
        found = Attributes(())
        found._kept = [kept for kept in self._kept if not self._is(kept)]
        return found

    def differing(self) -> str | None:
        """The name of the first that has another value now."""
        return next((f'attribute "{name}" of {type(part).__name__}' for part, name, _ in self.changed()._kept), None)

    def restore(self) -> None:
        """Put the values back."""
        for part, name, value in self._kept:
            if part.__dict__.get(name) is not value:
                part.__dict__[name] = value

    @staticmethod
    def _is(kept: tuple[nn.Module, str, object]) -> bool:
        part, name, value = kept
        now = part.__dict__.get(name)
        return type(now) is type(value) and (now == value or now is value)
