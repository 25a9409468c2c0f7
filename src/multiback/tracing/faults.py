"""What goes wrong inside the recorder: kept apart from the program's own exceptions, and noted once."""

import signal
from pathlib import PurePath
from types import CodeType
from typing import Any

_MOST = 20


class Faults:
    """Each fault of the recorder's once, with how often it happened; no exception is kept."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def note(self, where: str, error: BaseException) -> None:
        """Remember it; an exception of the program's own is raised again."""
        if is_the_programs(error):
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


def is_the_programs(error: BaseException) -> bool:
    """Whether it comes out of a signal handler, which runs wherever the program is: also between our own lines."""
    if not isinstance(error, Exception):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code in handlers:
            return True
        frame = frame.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None) or getattr(vars(type(handler)).get("__call__"), "__code__", None)
