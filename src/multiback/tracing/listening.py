"""Hooks for the length of one call, on nodes that earlier calls went through or where rows may meet."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multiback.tracing.calls import Call
from multiback.tracing.walking import Walked


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


def around_norm(call: Call, walked: Walked) -> list[Any]:
    """Hooks before and behind the batch norm that is nearest to the data."""
    node = walked.nodes[min(walked.batch_norms)]
    return [node.register_prehook(heard(call, min(walked.batch_norms))), node.register_hook(below_norm(call))]


def heard(call: Call, number: int, *, counting: bool = True) -> Callable[[tuple[Tensor | None, ...]], None]:
    """A prehook that notes when the shared part begins, and which rows carry something there."""

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        try:
            if call.entered_at is None:
                call.entered_at = time.perf_counter()
            if not counting:
                return
            rows = _rows(gradients[0]) if len(gradients) == 1 else _parts(gradients)
            if rows is not None:
                call.rows[number] = rows
        except Exception:  # noqa: S110 - a count that cannot be had is left out
            pass

    return hook


def below_norm(call: Call) -> Callable[[tuple[Tensor | None, ...], Any], None]:
    """A hook behind a batch norm in train mode: the rows that carry something there."""

    def hook(gradients: tuple[Tensor | None, ...], _outer: Any) -> None:
        try:
            call.norm_rows = _rows(gradients[0]) or call.norm_rows
        except Exception:  # noqa: S110 - as above
            pass

    return hook


def _parts(gradients: tuple[Tensor | None, ...]) -> tuple[int, int]:
    """How many of the parts that a tensor was taken apart into carry anything, and how many there are."""
    used = [one for one in gradients if one is not None and bool(one.detach().any())]
    return len(used), len(gradients)


def _rows(gradient: Tensor | None) -> tuple[int, int] | None:
    """How many rows hold something other than zero, and how many there are."""
    if gradient is None or gradient.dim() < 1 or gradient.shape[0] < 2 or torch.is_grad_enabled():
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(gradient):
        return None
    flat = gradient.detach().flatten(1) if gradient.dim() > 1 else gradient.detach()[:, None]
    return int(flat.ne(0).any(1).sum()), gradient.shape[0]
