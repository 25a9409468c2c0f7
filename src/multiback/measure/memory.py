"""Exact peak and held bytes of a call, with a self-test and a second opinion from the system."""

import ctypes
import gc
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler

_SELF_TEST_BYTES = 1 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)


@dataclass(frozen=True)
class Bytes:
    """Live bytes above those at the start of a call: the highest value, and the value at its end."""

    peak: int
    held: int


def live_bytes(call: Callable[[], object], device: str = "cpu") -> Bytes:
    """Run `call` once under the profiler and return its exact peak and held bytes.

    On the CPU these are the maximum and the last value of the running sum of the profiler's
    memory events, so they count every tensor allocation of this thread and of autograd, to the
    byte, and cost about 1.0-1.4 of the call's time. They miss numpy arrays and foreign threads:
    `high_water_bytes` sees those. On CUDA they are `max_memory_allocated` and
    `memory_allocated` above the start. Garbage is collected before `held` is read.
    """
    if device.startswith("cuda"):
        return _live_bytes_cuda(call)
    gc.collect()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or else it writes lines of its own to standard error
    # torch.profiler adds seconds of set-up (trace metadata) that its core does not need
    recorder = profiler.profile(use_kineto=True, profile_memory=True, use_cpu=True, acc_events=False)
    with recorder:
        call()
        gc.collect()
    live = peak = 0
    results: Any = recorder.kineto_results  # its events are typed without their size
    for event in results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return Bytes(peak=peak, held=live)


def _live_bytes_cuda(call: Callable[[], object]) -> Bytes:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    gc.collect()
    return Bytes(peak=torch.cuda.max_memory_allocated() - start, held=torch.cuda.memory_allocated() - start)


def self_test() -> str:
    """An empty string where a 1 MiB tensor reads as exactly 1 MiB; else what was read instead."""
    measured = live_bytes(lambda: torch.empty(_SELF_TEST_BYTES, dtype=torch.uint8))
    if measured == Bytes(peak=_SELF_TEST_BYTES, held=0):
        return ""
    return f"a tensor of {_SELF_TEST_BYTES} bytes read as peak {measured.peak}, held {measured.held}"


@contextmanager
def pinned_allocator() -> Generator[None, None, None]:
    """Make glibc return freed blocks at once, so that the system's figures follow the program's.

    Blocks of 64 KiB and more get pages of their own meanwhile, which makes allocation slower.
    Afterwards the thresholds are where glibc's own adjustment ends up in programs with large
    tensors. Elsewhere than on glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, 64 << 10)
    mallopt(_M_TRIM_THRESHOLD, 0)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def high_water_bytes(call: Callable[[], object]) -> int | None:
    """Run `call` and return how far VmHWM rose above the RSS before it; None where /proc cannot tell.

    A second opinion, to the page: it also sees numpy and foreign threads, and it misses blocks
    that were allocated and never touched. `ru_maxrss` is not used, since a child inherits it.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # pages that the allocator keeps would be used again and not seen
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, proc(5)
        before = _status_bytes("VmRSS")
        call()
        return _status_bytes("VmHWM") - before
    except (OSError, KeyError):
        return None


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    raise KeyError(field)
