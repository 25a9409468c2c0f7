"""Recording inside a process of a traced program: from the end of its own import of torch to its exit.

Loaded before the program's first line, this file imports only what the interpreter's start has loaded by
then, so that a program which has a `types.py` or `random.py` of its own finds that one. All else is imported
once the program has imported torch.

Three things cannot be seen: what a process did last that ends by `os._exit` or by a signal that it does not
handle (its part is up to 10 seconds old, and missing if it ran for less than 2), one whose interpreter ignores
PYTHONPATH (`-I`, `-E`, `-S`, or an environment made anew), and one whose own finder in `sys.meta_path` loads torch
before this one is asked.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import FrameType, ModuleType
    from typing import Any

    from multiback.traces import TraceRecord
    from multiback.tracing.recorder import Recording

OUTPUT = "MULTIBACK_TRACE_OUTPUT"
MAX_STEPS = "MULTIBACK_TRACE_MAX_STEPS"
SAMPLE_LOCALS = "MULTIBACK_TRACE_SAMPLE_LOCALS"
FIRST = "MULTIBACK_TRACE_FIRST"  # the process that the launcher started; it sets this itself

_AFTER_JOINS = -100  # of multiprocessing's finalizers, those below 0 run once children have been joined
_SECONDS_TO_WRITE = 5.0  # of a worker that was told to terminate


def watch_import(on_torch: Callable[[], None]) -> None:
    """Call `on_torch` once torch has been imported in full, in whichever thread; at once if it has been already.

    An import that fails does not count, nor does a look at torch's spec; a reload does not count again.
    Python's lock of the module is still held during the call, so that no other thread sees torch before its end.
    """
    if "torch" in sys.modules:
        __import__("torch")  # waits for a thread that is at it
        on_torch()
    else:
        sys.meta_path.insert(0, _Finder(on_torch))


class _Finder:
    """Finds torch as the other finders do, with a loader that tells when it is done; then leaves `sys.meta_path`."""

    def __init__(self, on_torch: Callable[[], None]) -> None:
        self._on_torch = on_torch
        self._asking: set[int] = set()  # threads; a finder that asks all finders must not come back here
        self._lock = _thread.allocate_lock()
        self._told = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of torch from the other finders; None for everything else."""
        thread = _thread.get_ident()
        if name != "torch" or thread in self._asking:
            return None
        self._asking.add(thread)
        try:
            spec = self._from_others(name, path, target)
        finally:
            self._asking.discard(thread)
        if spec is not None and not self._told and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._tell)  # type: ignore[assignment]
        return spec

    def _from_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                return spec
        return None

    def _tell(self) -> None:
        with self._lock:
            if self._told:
                return
            self._told = True
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._on_torch()


class _Loader:
    """Another loader, put back in its place before it runs, and a call when it has ended well."""

    def __init__(self, loader: Any, ended: Callable[[], None]) -> None:
        self._loader = loader
        self._ended = ended

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the other loader, which the module keeps as its own."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._ended()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def begin(output: str, max_steps: int | None, *, sample_locals: bool = False) -> None:
    """Record this process from its import of torch on; at its exit write `output`.<process id>.part, all or nothing.

    A process that never imports torch writes nothing, and so does one in which nothing was seen, such as a
    data loader's worker, unless it is the first. A forked child starts afresh. From the start of its recording
    to its end a process shows by an empty file `output`.<process id>.alive that it may still write.
    """
    watch_import(_Process(output, max_steps, sample_locals=sample_locals).start)


def begin_in_child() -> None:
    """`begin` as the environment says; nothing where it says nothing."""
    output = os.environ.get(OUTPUT)
    if output:
        os.environ.setdefault(FIRST, str(os.getpid()))
        steps = os.environ.get(MAX_STEPS)
        begin(output, int(steps) if steps else None, sample_locals=SAMPLE_LOCALS in os.environ)


class _Process:
    """The recording of this process: one at a time, and a fresh one in a forked child."""

    def __init__(self, output: str, max_steps: int | None, *, sample_locals: bool) -> None:
        self._output, self._max_steps, self._sample_locals = output, max_steps, sample_locals
        self._recording: Recording | None = None
        self._path: Path | None = None  # of this process's part
        self._writing = False
        self._terminated_by: int | None = None

    def start(self) -> None:
        """Begin to record, and see to it that the record gets written."""
        try:
            from multiprocessing import util

            from multiback import records, traces  # noqa: F401 - at the exit it may be too late to import them

            self._record()
            atexit.register(self.write)
            os.register_at_fork(after_in_child=self._forked)
            util.register_after_fork(self, _Process._in_multiprocessing)
            self._in_multiprocessing()
        except Exception as error:
            _complain(error)

    def _record(self) -> None:
        from multiback.tracing import recorder

        self._path = None
        self._recording = recorder.start(max_steps=self._max_steps, keep=self._write, sample_locals=self._sample_locals)
        if os.path.isdir(os.path.dirname(self._output)):
            with open(f"{self._output}.{os.getpid()}.alive", "wb"):
                pass

    def _forked(self) -> None:
        """In a child right after a fork: what the parent has seen is the parent's to tell."""
        inherited, self._recording = self._recording, None
        if inherited is None:
            return
        try:
            inherited.finish("forked")
            self._record()
        except Exception as error:
            _complain(error)

    def _in_multiprocessing(self) -> None:
        """A child of multiprocessing leaves by `os._exit`, after its finalizers; a pool ends its workers by SIGTERM."""
        import signal
        from multiprocessing import process, util

        util.Finalize(None, self.write, exitpriority=_AFTER_JOINS)
        # Others keep the default: a Python handler waits for a native call to return, which may hang.
        pooled = "PoolWorker" in process.current_process().name
        if pooled and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            try:
                signal.signal(signal.SIGTERM, self._terminated)
            except ValueError:  # torch was imported in another thread than the main one
                pass

    def _terminated(self, number: int, _frame: FrameType | None) -> None:
        """Write, then end as without this; another thread writes, as this one may hold what it needs."""
        import threading

        if self._writing:  # at its exit already, in the frame below
            self._terminated_by = number
            return
        try:
            writing = threading.Thread(target=self.write, args=(f"signal {number}",), daemon=True)
            writing.start()
            writing.join(_SECONDS_TO_WRITE)
        finally:
            _end_by(number)

    def write(self, ended: str | None = None) -> None:
        """Finish the recording and write it, once; Ctrl-C is let pass until it is written."""
        deaf = _deaf_to_interrupts()
        self._writing = True  # before the recording is taken, so that SIGTERM never finds it taken and not written
        recording, self._recording = self._recording, None
        try:
            if recording is not None:
                self._write(recording.finish(ended or _ended()))
        except Exception as error:
            _complain(error)
        finally:
            self._writing = False
            try:
                os.unlink(f"{self._output}.{os.getpid()}.alive")
            except OSError:
                pass
            deaf()
            if self._terminated_by is not None:
                _end_by(self._terminated_by)

    def _write(self, record: TraceRecord) -> None:
        first = os.environ.get(FIRST) == str(os.getpid())
        wanted = first or record.sites or record.evidence or record.steps or record.unobserved or record.faults
        if not wanted or not os.path.isdir(os.path.dirname(self._output)):
            return
        from pathlib import Path

        from multiback import records, traces

        if self._path is None:
            self._path = Path(f"{self._output}.{os.getpid()}.part")
            again = 2
            while self._path.exists():  # of an earlier process with this number
                self._path = Path(f"{self._output}.{os.getpid()}-{again}.part")
                again += 1
        records.write_atomically(self._path, traces.encode(record))


def _deaf_to_interrupts() -> Callable[[], object]:
    """Ignore SIGINT, where this is the main thread; gives what ends that."""
    import signal

    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        return lambda: None
    return lambda: signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _end_by(number: int) -> None:
    """End this process by a signal, as if it had no handler."""
    import signal

    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _ended() -> str:
    """The exception that Python has reported as uncaught, or `exit 0`: the exit code itself is not known yet."""
    kind = getattr(sys, "last_type", None)
    return "exit 0" if kind is None else kind.__name__


def _complain(error: Exception) -> None:
    """One line, and the program goes on."""
    try:
        sys.stderr.write(f"multiback: this process is not recorded ({type(error).__name__}: {error}).\n")
    except Exception:  # noqa: S110 - standard error is gone, and nobody is left to tell
        pass
