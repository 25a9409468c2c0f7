"""What is changed in torch as a whole while models run, and put back when the last of all threads is done."""

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor


class _Change:
    """A change, in force while a thread needs it; `make` makes it and gives what undoes it."""

    def __init__(self, make: Callable[[], Callable[[], object]]) -> None:
        self._make = make
        self._undo: Callable[[], object] = make
        self._lock, self._count = threading.Lock(), 0

    @contextmanager
    def in_force(self) -> Generator[None]:
        """Made by the first who needs it, undone by the last."""
        with self._lock:
            if not self._count:
                self._undo = self._make()
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._undo()


def _without_fast_path() -> Callable[[], object]:
    found = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return partial(torch.backends.mha.set_fastpath_enabled, found)


def _with_hooks_told() -> Callable[[], object]:
    register = torch.Tensor.register_hook

    def registered(tensor: Tensor, hook: Any) -> Any:
        tell = getattr(_LISTENING, "tell", None)
        if tell is not None:
            tell()
        return register(tensor, hook)

    patch = mock.patch.object(torch.Tensor, "register_hook", registered)
    patch.start()
    return patch.stop


_PLAIN_ATTENTION, _HOOKS_TOLD = _Change(_without_fast_path), _Change(_with_hooks_told)
_LISTENING = threading.local()


def plain_attention() -> AbstractContextManager[None]:
    """Without the attention fast path, which is taken under no_grad alone and leaves padded rows zero."""
    return _PLAIN_ATTENTION.in_force()


@contextmanager
def hearing_of_hooks(tell: Callable[[], None]) -> Generator[None]:
    """Call `tell` for every hook that this thread puts on a tensor."""
    outer, _LISTENING.tell = getattr(_LISTENING, "tell", None), tell
    try:
        with _HOOKS_TOLD.in_force():
            yield
    finally:
        _LISTENING.tell = outer
