"""Starts measuring processes and talks to them; everything is ended when the runner leaves."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from multiback.benching.protocol import Answer, Done, Failed, Job, receive_answer, send
from multiback.errors import BY_NAME, WorkerError

_ENVIRONMENT = {
    "KINETO_LOG_LEVEL": "99",  # the profiler would write a line per start and stop
    "PYTHONSAFEPATH": "1",  # a random.py beside the user's script must not replace the standard one
}

_SECONDS_TO_LEAVE = 3.0


class Process:
    """One measuring process: a fork server (`fork`), or the fresh process of one cold start (`once`).

    It runs in a session of its own, so that Ctrl-C reaches the runner alone, which then ends it.
    What the target prints goes to `log`, or straight to standard error where that is None.
    """

    def __init__(self, mode: str, log: BinaryIO | None) -> None:
        job_read, job_write = os.pipe()
        answer_read, answer_write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "multiback.benching.worker", mode, str(job_read), str(answer_write)],
            pass_fds=(job_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=log if log is not None else sys.stderr,
            stderr=log if log is not None else None,
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        os.close(job_read)
        os.close(answer_write)
        self._jobs = Connection(job_write, readable=False)
        self._answers = Connection(answer_read, writable=False)
        self._ready = False

    def run(self, job: Job) -> Iterator[Answer]:
        """Send a job and yield its answers up to the end; the process's errors are raised here."""
        if not self._ready:
            self._receive()  # the process says that torch is imported
            self._ready = True
        send(self._jobs, job)
        while not isinstance(answer := self._receive(), Done):
            if isinstance(answer, Failed):
                raise BY_NAME.get(answer.kind, WorkerError)(answer.message, answer.details)
            yield answer

    def _receive(self) -> Answer:
        try:
            return receive_answer(self._answers)
        except (EOFError, ConnectionResetError) as error:
            code = self._process.wait()
            raise WorkerError(
                f"a measuring process must answer; it ended with exit status {code}. Add --debug to see its output."
            ) from error

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.close()
        self._answers.close()
        if error is None:
            try:
                self._process.wait(timeout=_SECONDS_TO_LEAVE)  # it leaves by itself once the pipe is closed
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


class Log:
    """Collects what the target prints, away from the report; its tail helps when something fails."""

    def __init__(self, *, show: bool) -> None:
        self.stream: BinaryIO | None = None if show else tempfile.TemporaryFile()  # noqa: SIM115 -- closed below

    def tail(self, lines: int = 15) -> str:
        """The last lines printed."""
        if self.stream is None:
            return ""
        self.stream.seek(0)
        return "\n".join(self.stream.read().decode(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Forget it."""
        if self.stream is not None:
            self.stream.close()


def write_problem(pickled: bytes, folder: Path) -> str:
    """Put a pickled problem where measuring processes can read it; the path."""
    path = folder / "problem.pickle"
    path.write_bytes(pickled)
    return str(path)
