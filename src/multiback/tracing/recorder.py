"""Records every backward of a program; what goes wrong in it never reaches the program."""

import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch

from multiback._version import __version__
from multiback.traces import RUNNING, TRACE_SCHEMA, Place, TraceRecord
from multiback.tracing.calls import Call
from multiback.tracing.faults import Faults, installed
from multiback.tracing.findings import judge
from multiback.tracing.hiding import unseen, untraced
from multiback.tracing.looks import Looks
from multiback.tracing.observer import Observer
from multiback.tracing.patches import PATCHES, Engine
from multiback.tracing.places import writable
from multiback.tracing.walking import Walked

_SHARE = 0.01  # of the elapsed time that walks may take beyond the first of every site
_PATIENCE = 1.0  # seconds to wait for another thread's call, which may itself wait for one that this thread holds up
STOPPED = "stopped recording"
_KEPT_FIRST, _KEPT_EVERY = 2.0, 10.0  # seconds
BLOCK_LEFT = "block left"
T = TypeVar("T")


class Recording:
    """One process's recording, from `start` to `finish`; nothing stays patched after it."""

    def __init__(
        self,
        max_steps: int | None,
        keep: Callable[[TraceRecord], None] | None = None,
        *,
        sample_locals: bool = False,
    ) -> None:
        self._started, self._begun = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.perf_counter()
        self._max_steps = max_steps
        self._overhead = 0.0
        self._faults = Faults()
        self._record: TraceRecord | None = None
        self._failed: tuple[int, Place | None] = 0, None
        self._lock, self._patience, self._working = threading.RLock(), _PATIENCE, False
        self._observer = Observer(self._spares, self._spares_look if sample_locals else None)
        self._keep, self._keep_at = keep, self._begun + _KEPT_FIRST
        self.active = True
        PATCHES.add(self)
        self._looks = Looks(self.look)
        if sample_locals and not self._looks.start():
            self._observer.cannot_look()

    def _spares(self) -> bool:
        return self._overhead - self._observer.looking < _SHARE * (time.perf_counter() - self._begun)

    def _spares_look(self) -> bool:
        return self._observer.looking < _SHARE * (time.perf_counter() - self._begun)

    # ---- what is heard ---------------------------------------------------------------------

    def call(self, engine: Engine, outputs: Any, *args: Any, **options: Any) -> Any:
        """Run the engine as asked; what is recorded around it never changes or breaks it."""
        if not self.active:
            return engine(outputs, *args, **options)
        began = time.perf_counter()
        handles: list[Any] = []
        seen: tuple[Call, Walked | None] | None = None
        failure: BaseException | None = None
        ready, faults = began, 0
        try:
            seen = self._safely("before a call", self._observer.before, outputs, args, options, handles)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            ready = time.perf_counter()
            return engine(outputs, *args, **options)
        except BaseException as error:
            failure = error
            raise
        finally:
            done = time.perf_counter()
            for handle in handles:
                handle.remove()
            if seen is not None and self.active:
                call, walked = seen
                call.seconds, call.finished_at = max(0.0, done - ready - call.listening), done
                call.faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
                self._safely("after a call", self._observer.after, call, walked, outputs, failure)
                if failure is not None:
                    self._failed = id(failure), call.place
                self._overhead += call.listening
                del walked
            del failure, seen, handles
            self._keep_so_far()
            self._overhead += ready - began + time.perf_counter() - done

    def inside(self, outputs: Any, args: tuple[Any, ...]) -> None:
        """A call inside another one, whose graph may be one that is kept."""
        self._timed("inside a call", self._observer.inside, outputs, args[3] if len(args) > 3 else ())

    def before_step(self, optimizer: Any) -> None:
        """An optimiser is about to step."""
        self._timed("before a step", self._observer.before_step, optimizer)

    def after_step(self, optimizer: Any) -> None:
        """It has stepped; enough may have been seen."""
        self._timed("after a step", self._observer.after_step, optimizer)
        if self.active and self._max_steps is not None and self._observer.steps >= self._max_steps:
            self.finish(STOPPED)

    def forward(self, module: Any) -> None:
        """A DDP module's forward is about to run."""
        self._timed("at a DDP forward", self._observer.ranks.begun, module)

    def look(self, frame: FrameType | None) -> float:
        """The main thread is between two bytecodes; gives the seconds that this took, none where others are at work."""
        began, handlers = time.perf_counter(), installed()
        if not self._lock.acquire(blocking=False):
            return 0.0
        try:
            if not self.active or self._working:
                return 0.0
            self._working = True
            try:
                self._observer.look(frame)
            except Exception as error:
                self._faults.note("at a look", error, handlers)
            finally:
                self._working = False
        finally:
            self._lock.release()
        seconds = time.perf_counter() - began
        self._overhead += seconds
        return seconds

    def _timed(self, where: str, act: Callable[..., None], *given: Any) -> None:
        if self.active:
            began = time.perf_counter()
            self._safely(where, act, *given)
            self._overhead += time.perf_counter() - began

    def _safely(self, where: str, act: Callable[..., T], *given: Any) -> T | None:
        """One thread at a time, unheard by the program's modes; a fault of ours is noted, the program's own goes on.

        A lock that cannot be had is no reason to wait for ever: whoever has it may be waiting for this thread, as in a
        finalizer that a collection runs. Each time it is waited for half as long.
        """
        if not self._lock.acquire(timeout=self._patience):
            self._patience /= 2
            self._faults.note(where, RuntimeError("another thread's call took too long"))
            return None
        within, self._working = self._working, True
        try:
            with unseen():
                return act(*given)
        except Exception as error:
            self._faults.note(where, error)
            return None
        finally:
            self._working = within
            self._lock.release()

    # ---- the end ---------------------------------------------------------------------------

    def forked(self) -> None:
        """In a child: this recording is the parent's, and its lock may be held by a thread that is not here."""
        self.active = False
        self._looks.stop()
        self._lock = threading.RLock()

    def finish(self, ended: str) -> TraceRecord:
        """Put everything back and give the record; a second call gives the same."""
        PATCHES.remove(self)
        self._looks.stop()
        if self._record is not None:
            return self._record
        if self.active and self._observer.has_tied():
            gc.collect()  # without the lock: it may run code of the program's
        if self.active:  # not in a forked child, where it is the parent's
            whole = ended == BLOCK_LEFT or ended.startswith("exit ")
            close = partial(self._observer.close, broken=not whole and ended != STOPPED, stopped=ended == STOPPED)
            self._safely("at the end", close)
        self.active = False
        self._record = self._record or self._made(ended)
        if ended == STOPPED and self._keep is not None:
            self._safely("while keeping the record", self._keep, self._record)
        return self._record

    def place_of(self, error: BaseException) -> Place | None:
        """Where the call was that raised this error, if it came out of one that was recorded here."""
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code is not Recording.call.__code__:
            frame = frame.tb_next
        return self._failed[1] if frame is not None and self._failed[0] == id(error) else None

    def _keep_so_far(self) -> None:
        """Now and then, hand over what has been seen, in case the process ends by a signal."""
        now = time.perf_counter()
        if self._keep is not None and self.active and now >= self._keep_at:
            keep = self._keep
            self._safely("while keeping the record", lambda: keep(self._made(RUNNING)))
            self._keep_at = now + max(_KEPT_EVERY, (time.perf_counter() - now) / _SHARE)

    def _made(self, ended: str) -> TraceRecord:
        seen = self._observer
        record = TraceRecord(
            schema=TRACE_SCHEMA,
            program=[writable(text) for text in getattr(sys, "argv", [])],
            started=self._started,
            seconds=time.perf_counter() - self._begun,
            ended=ended,
            versions={"multiback": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]},
            steps=seen.steps,
            processes=1,
            sites=[site for site in list(seen.sites.values()) if site.calls],
            evidence=list(seen.evidence.values()),
            findings=[],
            unobserved=sorted(list(seen.unobserved)),  # noqa: C414 - a copy at once, while other threads may add
            faults=self._faults.texts(),
            rank=int(os.environ["RANK"]) if os.environ.get("RANK", "").isdigit() else None,
            checksums=seen.ranks.checksums,
            overhead_seconds=self._overhead,
        )
        record.findings = judge(record)
        return record


untraced(Recording.call, through=True)
untraced(Recording.look)
untraced(Recording._timed)
untraced(Recording._safely)


def start(
    *,
    max_steps: int | None = None,
    keep: Callable[[TraceRecord], None] | None = None,
    sample_locals: bool = False,
) -> Recording:
    """Begin to record this process; `keep` is given what has been seen after 2 seconds, and every 10 from then on."""
    return Recording(max_steps, keep, sample_locals=sample_locals)
