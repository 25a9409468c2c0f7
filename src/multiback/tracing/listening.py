"""Hooks for the length of one call, on nodes that earlier calls went through or where rows may meet."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from multiback.tracing.calls import Call
from multiback.tracing.faults import is_the_programs
from multiback.tracing.hiding import unseen, untraced
from multiback.tracing.walking import Walked, has_values

_FEWEST_ROWS = 2
_TAKING_APART = ("UnbindBackward", "SplitBackward", "SplitWithSizesBackward", "ChunkBackward")


def shares(one: Call, call: Call, numbers: set[int], walked: Walked) -> bool:
    """Whether an earlier call went through nodes that this one found freed."""
    if one is call or one.thread != call.thread:
        return False
    return not numbers.isdisjoint(one.numbers) if one.numbers else one.root in walked.nodes


def entrances(walked: Walked, shared: set[int]) -> set[int]:
    """The shared nodes that the newer part of the graph leads to, or where the call itself begins."""
    found = set()
    for number, node in walked.nodes.items():
        if number in shared:
            continue
        for child, _ in node.next_functions:
            if child is not None and child._sequence_nr() in shared:
                found.add(child._sequence_nr())
    if walked.root in shared:
        found.add(walked.root)
    return found


def heard(call: Call, number: int, node: Any, *, counting: bool = True) -> Callable[[tuple[Tensor | None, ...]], None]:
    """A prehook that notes when the shared part begins, and which rows carry something there."""
    kind = type(node).__name__
    in_parts = kind.startswith(_TAKING_APART) and getattr(node, "_saved_dim", None) == 0
    first_alone = "BatchNorm" in kind  # whose other outputs are statistics

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        began = time.perf_counter()
        if call.entered_at is None:
            call.entered_at = began
        if counting:
            with _unheard(call, began):
                rows = _parts(gradients) if in_parts else None
                if not in_parts and (len(gradients) == 1 or first_alone):
                    rows = _rows(gradients[0])
                if rows is not None:
                    call.rows[number] = rows

    return untraced(hook)


def below_norm(call: Call) -> Callable[[tuple[Tensor | None, ...], Any], None]:
    """A hook behind a batch norm in train mode: the rows that carry something there."""

    def hook(gradients: tuple[Tensor | None, ...], _outer: Any) -> None:
        with _unheard(call, time.perf_counter()):
            call.norm_rows = _rows(gradients[0]) or call.norm_rows

    return untraced(hook)


def guarded(call: Call, hear: Callable[[Any], None]) -> Callable[[Any], None]:
    """A prehook of another observer's."""

    def hook(gradients: Any) -> None:
        with _unheard(call, time.perf_counter()):
            hear(gradients)

    return untraced(hook)


@contextmanager
def _unheard(call: Call, began: float) -> Generator[None]:
    """A look of the recorder's own inside a call: neither its time nor its faults are the call's."""
    try:
        with unseen():
            yield
    except Exception as error:
        if is_the_programs(error):
            raise
    finally:
        call.listening += time.perf_counter() - began


def _parts(gradients: tuple[Tensor | None, ...]) -> tuple[int, int]:
    """How many of the parts that a tensor was taken apart into carry anything, and how many there are."""
    used = [one for one in gradients if one is not None and has_values(one) and bool(one.detach().any())]
    return len(used), len(gradients)


def _rows(gradient: Tensor | None) -> tuple[int, int] | None:
    """How many rows hold something other than zero, and how many there are."""
    if gradient is None or not has_values(gradient) or gradient.dim() < 1 or gradient.shape[0] < _FEWEST_ROWS:
        return None
    if torch.is_grad_enabled():
        return None
    flat = gradient.detach().flatten(1) if gradient.dim() > 1 else gradient.detach()[:, None]
    return int(flat.any(1).sum()), gradient.shape[0]
