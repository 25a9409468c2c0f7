"""Records where a run takes place: versions, processor, threads, allocator, load."""

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

from multiback._version import __version__
from multiback.records import Environment

_ALLOCATOR_VARIABLES = (
    "MALLOC_ARENA_MAX",
    "MALLOC_CONF",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "PYTORCH_CUDA_ALLOC_CONF",
    "THP_MEM_ALLOC_ENABLE",
)
_PRELOADED = ("jemalloc", "tcmalloc", "mimalloc")


def available_cores() -> int:
    """Processors that this process may use, which containers and taskset make fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe(*, threads: int, device: str) -> Environment:
    """The environment now; the load after the run is filled in by `finished`."""
    return Environment(
        versions={
            "multiback": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "numpy", "scipy")},
        },
        platform=platform.platform(),
        cpu=_cpu_name(),
        cores=available_cores(),
        threads=threads,
        device=device,
        allocator=_allocator(),
        allocator_settings={name: os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ},
        transparent_huge_pages=_huge_pages(),
        load_before=load(),
        load_after=[],
    )


def load() -> list[float]:
    """The system's load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in psutil.getloadavg()]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _allocator() -> str:
    preload = os.environ.get("LD_PRELOAD", "")
    for name in _PRELOADED:
        if name in preload:
            return name
    return " ".join(platform.libc_ver()).strip() or "unknown"


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else text.strip()
