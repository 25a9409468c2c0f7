"""The model of a cut: its modules, parameters, buffers and modes, and running it again as it was."""

import functools
import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multiback.cuts.fingerprints import Fingerprints
from multiback.cuts.naming import name_of
from multiback.errors import StaleForwardError
from multiback.nested import called
from multiback.states import Autocast, Buffer, BufferValues, Modes, Randomness, buffers_of, random_kept


class Model:
    """A callable with the modules that it runs, as they stand when this is made.

    Of a function, the modules are those in its arguments, closure and globals; parameters that it
    holds elsewhere are added when a graph shows them.
    """

    def __init__(self, call: Callable[..., Any], device_types: Iterable[str]) -> None:
        self._call = call
        self.modules = _modules_of(call)
        self._modes = Modes(self.modules)
        self._autocast = Autocast.read(device_types)
        self.buffers = buffers_of(self.modules)
        self._written: dict[Buffer, None] = {}
        self._first = True
        self.needs_graph = False
        self._before: Fingerprints | None = None

    @property
    def computing_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which it may compute: its parameters' and autocast's."""
        found = {p.dtype for module in self.modules for p in module.parameters() if p.is_floating_point()}
        return [*found, *self._autocast.dtypes]

    def infer(self, data: Any, *, grad: bool) -> tuple[Any, Randomness | None, BufferValues]:
        """The output, and what is needed to have it again: the random state, if any was drawn, and buffers."""
        copied = self.buffers if self._first else self.replayed_buffers
        self._first = False
        random, held = Randomness.read(), BufferValues(copied)
        versions = [(buffer, buffer.version) for buffer in self.buffers]
        try:
            with torch.set_grad_enabled(grad), _plain_attention():
                output = called(self._call, data)
        except Exception:
            random.restore()  # for another try
            held.restore()
            raise
        self._written.update(dict.fromkeys(held.changed()))
        self._written.update(dict.fromkeys(buffer for buffer, version in versions if buffer.version != version))
        drawn = not random.same_as(Randomness.read())
        return output, random if drawn else None, held.only(self.replayed_buffers)

    @property
    def replayed_buffers(self) -> list[Buffer]:
        """Buffers that a forward writes to and may read: all but batch norm's statistics in train mode."""
        return [buffer for buffer in self._written if not _is_running_statistic(buffer)]

    def settle(self, leaves: Iterable[Tensor]) -> None:
        """Remember what parameters and buffers hold, once inference is over; `leaves` are a graph's."""
        named: dict[int, tuple[Callable[[], str], Tensor]] = {}
        for module in self.modules:
            for name, parameter in module.named_parameters():
                named.setdefault(id(parameter), (lambda name=name: f'parameter "{name}"', parameter))
        for leaf in leaves:
            named.setdefault(id(leaf), (lambda leaf=leaf: name_of(leaf), leaf))
        for buffer in self.buffers:
            tensor = buffer.tensor
            if tensor is not None and buffer not in self._written and not _is_running_statistic(buffer):
                named.setdefault(id(tensor), (lambda buffer=buffer: f'buffer "{buffer.name}"', tensor))
        self._before = Fingerprints(list(named.values()))

    def check_unchanged(self) -> None:
        """StaleForwardError where a parameter or a buffer is not as it was at inference."""
        changed = None if self._before is None else self._before.changed()
        if changed is not None:
            raise StaleForwardError(
                f"cut: must be used before the model changes; {changed} has changed since inference, so this forward's "
                "gradient is stale. Ask for all gradients before the step, or make a new cut after it."
            )

    @contextmanager
    def again(self, random: Randomness | None, buffers: BufferValues) -> Generator[Callable[[Any], Any]]:
        """Run it with a graph, in the modes and autocast of inference, from a random state and buffers.

        What it writes to buffers, and draws, is undone when the context is left, after the traversal.
        """
        outer = BufferValues(self._written)
        with random_kept(), self._modes.replayed():
            if random is not None:
                random.restore()
            buffers.restore()
            try:
                yield self._run
            finally:
                outer.restore()

    def _run(self, data: Any) -> Any:
        with torch.enable_grad(), self._autocast.replayed(), _plain_attention():
            return called(self._call, data)


@contextmanager
def _plain_attention() -> Generator[None]:
    """Without the attention fast path, which is taken under no_grad alone and leaves padded rows zero."""
    found = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(found)


def _is_running_statistic(buffer: Buffer) -> bool:
    """Whether it is a batch norm's statistic that train mode only writes."""
    return isinstance(buffer.module, nn.modules.batchnorm._NormBase) and buffer.module.training


def _modules_of(call: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a callable runs, as far as they can be seen."""
    if isinstance(call, nn.Module):
        return [call]
    if isinstance(call, functools.partial):
        parts = [call.func, *call.args, *call.keywords.values()]
        return _unique(module for part in parts if callable(part) for module in _modules_of(part))
    owner, function = getattr(call, "__self__", None), getattr(call, "__func__", call)
    found: list[Any] = [owner, *getattr(owner, "__dict__", {}).values()]
    if inspect.isfunction(function):
        for one in {function, inspect.unwrap(function)}:
            seen = inspect.getclosurevars(one)
            found += [*seen.nonlocals.values(), *seen.globals.values()]
    elif not inspect.isroutine(call):
        found += list(getattr(call, "__dict__", {}).values())
    nested = [item for value in found for item in (value.values() if isinstance(value, dict) else [value])]
    flat = [item for value in nested for item in (value if isinstance(value, (list, tuple)) else [value])]
    return _unique(value for value in flat if isinstance(value, nn.Module))


def _unique(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())
