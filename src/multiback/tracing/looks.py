"""Timed looks, between two bytecodes of the main thread, at what it is doing."""

import _thread
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from multiback.tracing.hiding import untraced

_LEAST_SECONDS = 0.05  # between looks
_FIRST, _FREE_SECONDS = 20, 0.2  # looks that take no more in all
_SHARE = 0.02  # of the elapsed time that later ones may take
_CANDIDATES = 8


class Looks:
    """Calls `look` with the main thread's frame now and then, until stopped; `look` gives the seconds that it took.

    A thread that Python's own list does not show asks the interpreter to run the handler of a signal which the
    program does not handle, as if it had arrived: nothing is sent, so no system call is interrupted, and what
    another handler raises during a look reaches the program as ever.
    """

    def __init__(self, look: Callable[[FrameType | None], float]) -> None:
        self._look, self._wait = look, _LEAST_SECONDS
        self._looks, self._taken, self._begun = 0, 0.0, time.perf_counter()
        self._asked, self._number = False, 0
        self._running = _thread.allocate_lock()

    def start(self) -> bool:
        """Begin; False where this is not the main thread, or no signal is left to use."""
        if threading.current_thread() is not threading.main_thread():
            return False
        last = getattr(signal, "SIGRTMAX", 0)
        unused = (n for n in range(last, max(0, last - _CANDIDATES), -1) if signal.getsignal(n) is signal.SIG_DFL)
        self._number = next(unused, 0)
        if not self._number:
            return False
        signal.signal(self._number, self._handle)
        self._running.acquire()
        _thread.start_new_thread(self._ask, ())
        return True

    def stop(self) -> None:
        """End; in another thread than the main one the handler stays, and is never run."""
        if not self._number:
            return
        if self._running.locked():
            self._running.release()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(self._number) == self._handle:
            signal.signal(self._number, signal.SIG_DFL)
        self._number = 0

    def _ask(self) -> None:
        while not self._running.acquire(timeout=self._wait):
            if not self._asked and self._number and signal.getsignal(self._number) == self._handle:
                self._asked = True
                _thread.interrupt_main(self._number)  # type: ignore[bad-argument-type] # which have no member each

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        try:
            if self._number:
                self._looks += 1
                self._taken += (seconds := self._look(frame))
                is_free = self._looks < _FIRST and self._taken < _FREE_SECONDS
                may_go_on = is_free or self._taken < _SHARE * (time.perf_counter() - self._begun)
                self._wait = _LEAST_SECONDS if may_go_on else max(_LEAST_SECONDS, seconds / _SHARE)
        except RecursionError:  # the program is close to its limit
            pass
        finally:
            self._asked = False


untraced(Looks._handle)
