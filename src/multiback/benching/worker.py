"""The measuring processes: a fork server that has imported torch and run nothing, and its children.

Run as `python -m multiback.benching.worker MODE READ_FD WRITE_FD`. In mode `fork` it forks one
child per job, so that each starts from the same untouched state without importing torch again; in
mode `once` it is itself the fresh process of one `Cold` job.
"""

import contextlib
import ctypes
import gc
import os
import random
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from multiback.benching import targets
from multiback.benching.bound import Bound
from multiback.benching.protocol import (
    Cold,
    Done,
    Dropped,
    Examine,
    Failed,
    Job,
    Measure,
    Rows,
    Source,
    Step,
    receive_job,
    send,
)
from multiback.errors import MultibackError, ProblemError
from multiback.records import ProblemFacts

# Of a child that has sent its last answer; a target that leaves by itself has another status, 0 included.
_ANSWERED = 64
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Serve jobs until the runner closes its end."""
    mode, jobs, answers = arguments
    _die_with_parent()
    os.environ.pop("PYTHONSAFEPATH", None)  # set for this process's own imports; the target starts without
    incoming = Connection(int(jobs), writable=False)
    outgoing = Connection(int(answers), readable=False)
    send(outgoing, Done())
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            job = receive_job(incoming)
            if mode == "once":
                _answer(job, outgoing)
                return
            _fork(job, outgoing)


def _fork(job: Job, outgoing: Connection) -> None:
    """Run the job in a child; report a child that died without a word."""
    child = os.fork()
    if child == 0:
        _die_with_parent()
        status = 1
        try:
            _answer(job, outgoing)
            status = _ANSWERED
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        send(outgoing, Failed(kind="WorkerError", message=_death(signal.Signals(os.WTERMSIG(status)).name), details=""))
    elif os.WEXITSTATUS(status) != _ANSWERED:
        send(outgoing, Failed(kind="WorkerError", message=_death(f"exit status {os.WEXITSTATUS(status)}"), details=""))


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent is gone, however that ended; prctl(2), Linux only."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _death(how: str) -> str:
    hint = " (out of memory? Try a smaller --batch)" if how == "SIGKILL" else ""
    return f"a measuring process must answer; it ended with {how}{hint}. Add --debug to see its output."


def _answer(job: Job, outgoing: Connection) -> None:
    """Run one job and send what comes of it; the user's errors become one sentence."""
    try:
        _run(job, outgoing)
    except MultibackError as error:
        send(outgoing, Failed(kind=type(error).__name__, message=str(error), details=traceback.format_exc()))
    except BaseException as error:
        message = (
            f"{job.source.target}: the problem must run; it raised {type(error).__name__}: "
            f"{targets.first_line(error)}. Add --debug to see where."
        )
        send(outgoing, Failed(kind="ProblemError", message=message, details=traceback.format_exc()))
    else:
        send(outgoing, Done())


def _run(job: Job, outgoing: Connection) -> None:
    # Only here, in the process of the job: what these import computes as it is imported, which starts
    # threads, and a process that is forked from one with threads may wait for them forever.
    from multiback.benching import peers, timing
    from multiback.benching.examining import Examiner

    source = job.source
    sys.path[:0] = [entry for entry in source.search_path if entry not in sys.path]
    torch.set_num_threads(job.threads)
    if isinstance(job, Measure) and any(act.question == "cold" for act in job.acts):
        timing.thread_start(job.process, lambda samples: send(outgoing, Rows(samples)))
    start = time.perf_counter()
    if not isinstance(job, Cold):
        peers.preload(act.way for act in job.acts)
    bound, built = _bind(source)
    torch.set_num_threads(job.threads)  # the target may have chosen another number
    _check_shapes(bound, job)
    build_seconds = time.perf_counter() - start
    # what exists now never becomes garbage: collections between calls then cost next to nothing
    gc.collect()
    gc.freeze()
    if isinstance(job, Examine):
        resolved = msgspec.structs.replace(source, saved_losses=built.saved_losses)
        examiner = Examiner(bound, job)
        facts = _facts(bound, source, built.losses)
        send(outgoing, examiner.run(facts, resolved, build_seconds, lambda label: send(outgoing, Step(label))))
    elif isinstance(job, Measure):
        timing.measure(
            bound,
            job,
            lambda samples: send(outgoing, Rows(samples)),
            lambda act, reason: send(outgoing, Dropped(act=act, reason=reason)),
        )
    elif isinstance(job, Cold):
        timing.first_calls(bound, job, lambda samples: send(outgoing, Rows(samples)))


def _check_shapes(bound: Bound, job: Job) -> None:
    """A target that builds another problem in every process cannot be compared across them."""
    shapes, _ = bound.shapes()
    if not isinstance(job, Examine) and job.shapes != shapes:
        raise ProblemError(
            f"{job.source.target}: must build the same problem in every process; its data had shapes {job.shapes} in "
            f"one and {shapes} in another. Draw sizes from torch, random or numpy's global generator, which are seeded."
        )


def _bind(source: Source) -> tuple[Bound, targets.Built]:
    dtype = targets.dtype_of(source.dtype)
    targets.check_device(source.device)
    random.seed(source.seed)
    np.random.seed(source.seed % 2**32)
    built = targets.build(source)
    return Bound(built.problem, device=source.device, dtype=dtype), built


def _facts(bound: Bound, source: Source, losses: str) -> ProblemFacts:
    shapes, dtypes = bound.shapes()
    return ProblemFacts(
        target=source.target,
        shapes=shapes,
        dtypes=dtypes,
        losses=losses,
        num_losses=bound.num_losses,
        num_parameters=sum(parameter.numel() for parameter in bound.parameters),
        num_rows=bound.num_rows,
        seed=source.seed,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
