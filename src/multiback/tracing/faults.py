"""What goes wrong inside the recorder: kept apart from the program's own exceptions, and noted once."""

import functools
import inspect
import signal
from pathlib import PurePath
from types import CodeType
from typing import Any

_MOST = 20
_OURS = ("builtins", "torch", "multiback", "msgspec")  # where what we may raise ourselves is defined


class Faults:
    """Each fault of the recorder's once, with how often it happened; no exception is kept."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def note(self, where: str, error: BaseException, handlers: frozenset[CodeType] = frozenset()) -> None:
        """Remember it; an exception of the program's own is raised again, as of `handlers` that were installed."""
        if is_the_programs(error, handlers):
            raise error
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        line = "" if frame is None else f" ({PurePath(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno})"
        text = f"{where}{line}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        if text in self._count or len(self._count) < _MOST:
            self._count[text] = self._count.get(text, 0) + 1

    def texts(self) -> list[str]:
        """What to write of them."""
        return [text + (f" ({count:,} times)" if count > 1 else "") for text, count in self._count.items()]


def is_the_programs(error: BaseException, handlers: frozenset[CodeType] = frozenset()) -> bool:
    """Whether the program has raised it between our own lines: in a signal handler, or of a kind of its own.

    A time limit may be set upon a thread from outside, without any handler.
    """
    kind = type(error)
    if not isinstance(error, Exception) or kind.__module__.partition(".")[0] not in _OURS or kind is TimeoutError:
        return True
    known = handlers | installed()
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code in known:
            return True
        frame = frame.tb_next
    return False


def installed() -> frozenset[CodeType]:
    """The code of all signal handlers."""
    found = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    return frozenset(one for one in found if one is not None)


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    called = inspect.getattr_static(type(function), "__call__", None)
    return getattr(function, "__code__", None) or getattr(called, "__code__", None)
