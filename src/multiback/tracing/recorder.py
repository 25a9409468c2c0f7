"""Records every backward of a program: one patch at the engine's entry, optimiser steps, DDP forwards."""

import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from multiback._version import __version__
from multiback.traces import TRACE_SCHEMA, TraceRecord
from multiback.tracing.calls import Call
from multiback.tracing.findings import judge
from multiback.tracing.observer import Observer
from multiback.tracing.ranks import Ranks
from multiback.tracing.walking import Walked

_WALKED_CALLS = 3  # of every site, whatever they cost
_SHARE = 0.01  # of the elapsed time that walks may take beyond these
_REMEMBERED = 256  # calls
_MOST_FAULTS = 20
FORKED = "forked"
_MOST_SITES = 2000


class Recording:
    """One process's recording, from `start` to `finish`; nothing stays patched after it."""

    def __init__(self, max_steps: int | None) -> None:
        self._started, self._begun = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.perf_counter()
        self._max_steps = max_steps
        self._overhead = 0.0
        self._faults: list[str] = []
        self._record: TraceRecord | None = None
        self.active = True
        self._ranks = Ranks(lambda: self.active, self._fault)
        self._observer = Observer(self._spares, self._ranks)
        self._undo: list[Callable[[], None]] = [self._ranks.undo]
        self._patch()

    def _spares(self) -> bool:
        return self._overhead < _SHARE * (time.perf_counter() - self._begun)

    # ---- hooking in ------------------------------------------------------------------------

    def _patch(self) -> None:
        engine = torch.autograd._engine_run_backward

        def watched(outputs: Any, *args: Any, **options: Any) -> Any:
            if not self._watches():
                return engine(outputs, *args, **options)
            return self._through(engine, outputs, args, options)

        torch.autograd._engine_run_backward = watched  # pyrefly: ignore[bad-assignment]
        self._undo.append(lambda: _unpatch(engine, watched))
        before = optimizers.register_optimizer_step_pre_hook(self._guarded(self._observer.before_step))
        after = optimizers.register_optimizer_step_post_hook(self._guarded(self._stepped))
        self._undo += [before.remove, after.remove]

    def _watches(self) -> bool:
        """Whether a call is one of the program's own: not nested in another, nor inside a transform."""
        return (
            self.active
            and torch._C._current_graph_task_id() == -1
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    def _guarded(self, act: Callable[..., None]) -> Callable[..., None]:
        """The hook, whose faults never reach the program."""

        def hook(*args: Any, **_options: Any) -> None:
            if not self.active:
                return
            began = time.perf_counter()
            try:
                with self._observer.lock:
                    act(*args)
            except Exception as error:
                self._fault(act.__name__, error)
            self._overhead += time.perf_counter() - began

        return hook

    def _fault(self, where: str, error: Exception) -> None:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        line = frame.tb_lineno if frame is not None else 0
        if len(self._faults) < _MOST_FAULTS:
            self._faults.append(f"{where}, line {line}: {type(error).__name__}: {error}")

    # ---- a call ----------------------------------------------------------------------------

    def _through(self, engine: Callable[..., Any], outputs: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run the engine as asked; what is recorded around it never changes or breaks it."""
        began = time.perf_counter()
        call: Call | None = None
        walked: Walked | None = None
        handles: list[Any] = []
        try:
            with self._observer.lock:
                call, walked = self._observer.before(outputs, args, options, handles)
        except Exception as error:
            self._fault("before a call", error)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        ready = time.perf_counter()
        self._overhead += ready - began
        failure: BaseException | None = None
        try:
            return engine(outputs, *args, **options)
        except BaseException as error:
            failure = error
            raise
        finally:
            done = time.perf_counter()
            try:
                for handle in handles:
                    handle.remove()
                if call is not None:
                    call.seconds, call.finished_at = done - ready, done
                    call.faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
                    with self._observer.lock:
                        self._observer.after(call, walked, outputs, failure)
            except Exception as error:
                self._fault("after a call", error)
            del failure, walked, handles
            self._overhead += time.perf_counter() - done

    def _stepped(self, *args: Any) -> None:
        self._observer.after_step(*args)
        if self._max_steps is not None and self._observer.steps >= self._max_steps:
            self.finish("stopped recording")

    # ---- the end ---------------------------------------------------------------------------

    def finish(self, ended: str) -> TraceRecord:
        """Put everything back and give the record; a second call gives the same."""
        if ended == FORKED:  # another process's recording, whose lock a thread that is not here may hold
            self.active = False
            self._unpatch()
            return self._made(ended)
        with self._observer.lock:
            if self._record is not None:
                return self._record
            gc.collect()
            self._observer.close()
            self.active = False
            self._unpatch()
            self._record = self._made(ended)
            return self._record

    def _unpatch(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _made(self, ended: str) -> TraceRecord:
        seen = self._observer
        record = TraceRecord(
            schema=TRACE_SCHEMA,
            program=list(sys.argv),
            started=self._started,
            seconds=time.perf_counter() - self._begun,
            ended=ended,
            versions={"multiback": __version__, "torch": str(torch.__version__), "python": sys.version.split()[0]},
            steps=seen.steps,
            processes=1,
            sites=[site for site in seen.sites.values() if site.calls],
            evidence=list(seen.evidence.values()),
            findings=[],
            unobserved=sorted(seen.unobserved),
            faults=self._faults,
            rank=int(os.environ["RANK"]) if os.environ.get("RANK", "").isdigit() else None,
            checksums=self._ranks.checksums,
            overhead_seconds=self._overhead,
        )
        record.findings = judge(record)
        return record


def start(*, max_steps: int | None = None) -> Recording:
    """Begin to record this process."""
    return Recording(max_steps)


def _unpatch(engine: Callable[..., Any], watched: Callable[..., Any]) -> None:
    """Put the engine's entry back, unless another recording has patched it since: then it only passes calls on."""
    if torch.autograd._engine_run_backward is watched:
        torch.autograd._engine_run_backward = engine
