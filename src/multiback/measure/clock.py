"""Times one call: wall and CPU seconds, minor page faults, involuntary switches, RSS."""

import gc
import resource
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class Figures:
    """What one timed call took; `rss_bytes` is the process's RSS right after it."""

    seconds: float
    cpu_seconds: float
    minor_faults: int
    involuntary_switches: int
    rss_bytes: int


def time_call(call: Callable[[], object], device: str = "cpu") -> Figures:
    """Run `call` once and return what it took.

    On an accelerator the device is synchronised before the clock starts and before it stops.
    CPU time, faults and switches are those of the whole process, all threads.
    """
    synchronise = _synchroniser(device)
    synchronise()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter_ns()
    call()
    synchronise()
    stop = time.perf_counter_ns()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Figures(
        seconds=(stop - start) / 1e9,
        cpu_seconds=(after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime),
        minor_faults=after.ru_minflt - before.ru_minflt,
        involuntary_switches=after.ru_nivcsw - before.ru_nivcsw,
        rss_bytes=psutil.Process().memory_info().rss,
    )


@contextmanager
def without_gc() -> Generator[list[int], None, None]:
    """Collect, then keep the cyclic collector off; the list receives what the closing collect freed."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    freed: list[int] = []
    try:
        yield freed
    finally:
        freed.append(gc.collect())
        if was_enabled:
            gc.enable()


def _synchroniser(device: str) -> Callable[[], object]:
    if device.startswith("cuda"):
        return torch.cuda.synchronize
    if device.startswith("mps"):
        return torch.mps.synchronize
    return _nothing


def _nothing() -> None:
    """The CPU has nothing to wait for."""
