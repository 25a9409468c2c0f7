"""State around a forward pass: random number generators, autocast, train modes and buffers."""

import ctypes
import random
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_TWISTER_BYTES = 2500  # 624 words and a position, of 32 bits each


@dataclass(frozen=True, eq=False)
class Randomness:
    """The states of torch's generators (CPU and every CUDA device), of `random` and of `numpy.random`."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: tuple[Any, ...]
    numpy: dict[str, Any]

    @classmethod
    def read(cls, *, quick: bool = False) -> "Randomness":
        """The states as they are now, 10 kB; some 40 microseconds, most of them for numpy's.

        `quick` takes numpy's from the last read where its generator has not moved since: a quarter of that.
        """
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        return cls(torch.get_rng_state(), cuda, random.getstate(), _numpy_state(quick=quick))

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def same_as(self, other: "Randomness") -> bool:
        """Whether nothing was drawn between the two."""
        return (
            torch.equal(self.cpu, other.cpu)
            and len(self.cuda) == len(other.cuda)
            and all(torch.equal(one, two) for one, two in zip(self.cuda, other.cuda, strict=True))
            and self.python == other.python
            and (self.numpy is other.numpy or _alike(self.numpy, other.numpy))
        )


_numpy_seen: tuple[bytes, dict[str, Any]] | None = None


def _numpy_state(*, quick: bool) -> dict[str, Any]:
    """The state of numpy's global generator, which takes numpy a loop in Python's objects to read."""
    global _numpy_seen  # noqa: PLW0603 - it is numpy's global that is remembered
    place = _numpy_words()
    if quick and _numpy_seen is not None and place is not None and _numpy_seen[0] == place:
        return _numpy_seen[1]
    state = np.random.get_state(legacy=False)
    _numpy_seen = None if place is None else (place, state)
    return state


def _numpy_words() -> bytes | None:
    """The memory of numpy's Mersenne Twister, by its public address; None for another generator."""
    generator: Any = np.random.get_bit_generator() if hasattr(np.random, "get_bit_generator") else None
    if type(generator).__name__ != "MT19937":
        return None
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)


def _alike(one: Any, two: Any) -> bool:
    """Whether states nested in dicts are equal, numpy's cached normal among them."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_alike(one[key], two[key]) for key in one)
    return bool(np.array_equal(one, two))


@contextmanager
def random_kept(*, quick: bool = False) -> Generator[None]:
    """Put every generator back on leaving; `quick` where nothing is expected to have moved."""
    state = Randomness.read(quick=quick)
    try:
        yield
    finally:
        if not state.same_as(Randomness.read(quick=quick)):
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
            if tensor is not None and not nn.parameter.is_lazy(tensor):
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

    def take_over(self, others: "BufferValues") -> None:
        """Hold other copies as well, of buffers of which there is none here."""
        for buffer, kept in others._kept.items():
            self._kept.setdefault(buffer, kept)

    def restore(self) -> None:
        """The same tensors with the same values; what saved them for a backward can still run."""
        for buffer, (tensor, value) in self._kept.items():
            if tensor.shape != value.shape:  # as observers of quantisation do at their first batch
                tensor.data = value.clone()
            elif not torch.equal(tensor, value):
                tensor.data.copy_(value)  # through .data, which leaves the version as it is
            buffer.module._buffers[buffer.key] = tensor


class Attributes:
    """Modules' attributes that are numbers, flags, texts or tuples of them, such as a count of calls or a strength.

    Private ones too, and what a module has put in the place of its class's; torch's own are left out.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {part: None for root in modules for part in root.modules()}
        self._kept = [(part, _plain_attributes(part)) for part in parts]
        self._whole = True
        self._alike = {
            part: dict(part.__dict__)
            for part, kept in self._kept
            if part.__dict__.keys() <= _TORCHS_OWN | kept.keys()  # holds nothing alive that the module would let go
        }

    def changed(self) -> "Attributes":
        """Those that have another value now, with the value that they had; for new ones that there was none."""
        found = Attributes(())
        found._whole = False
        for part, kept in self._kept:
            if part.__dict__ == self._alike.get(part):  # nearly always
                continue
            now = _plain_attributes(part)
            if now != kept:
                names = {**kept, **now} if self._whole else kept
                then = {name: kept.get(name, _ABSENT) for name in names}
                differing = {name: one for name, one in then.items() if not _is_same(one, now.get(name, _ABSENT))}
                found._kept += [(part, differing)] if differing else []
        return found

    def differing(self) -> str | None:
        """The name of the first that has another value now."""
        names = ((part, name) for part, kept in self.changed()._kept for name in kept)
        return next((f'attribute "{name}" of {type(part).__name__}' for part, name in names), None)

    def restore(self) -> None:
        """Put the values back."""
        for part, kept in self.changed()._kept:
            for name, value in kept.items():
                if value is _ABSENT:
                    part.__dict__.pop(name, None)
                else:
                    part.__dict__[name] = value


_ABSENT = object()
_PLAIN = (int, float, bool, str, type(None))
_TORCHS_OWN = frozenset(nn.Module().__dict__)


def _plain_attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in part.__dict__.items() if name not in _TORCHS_OWN and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or issubclass(kind, np.generic) or (kind is tuple and all(map(_is_plain, value)))


def _is_same(one: object, two: object) -> bool:
    return one is two or (type(one) is type(two) and bool(one == two))
