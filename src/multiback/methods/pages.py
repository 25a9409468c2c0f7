"""Large answers in huge pages: most of the time of writing one is the system handing out its pages.

A fresh tensor is mapped and faulted in page by page, 4 KiB each. Linux hands out 2 MiB at a time
where a program asks for it (`madvise(MADV_HUGEPAGE)`, see transparent_hugepage in the kernel's
admin guide; its `madvise` mode is the usual default). The tensor is torch's own as ever.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multiback.planner import LARGE_BYTES

_MADV_HUGEPAGE = 14
_PAGE = 4096


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor whose memory is about to be written whole."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    size = made.numel() * made.element_size()
    advise = _advise() if device.type == "cpu" and size >= LARGE_BYTES else None
    if advise is not None:
        start = made.data_ptr()
        first = (start + _PAGE - 1) // _PAGE * _PAGE
        last = (start + size) // _PAGE * _PAGE
        advise(first, last - first, _MADV_HUGEPAGE)  # advice: where it is not taken, nothing is lost
    return made


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's madvise; None where there is none, or MULTIBACK_HUGE_PAGES=0 forbids it."""
    if sys.platform != "linux" or os.environ.get("MULTIBACK_HUGE_PAGES") == "0":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
