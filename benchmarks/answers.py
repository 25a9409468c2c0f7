"""Brings the answers of different ways into one form and compares them."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from multiback.measure.agreement import gap_between

# A gradient that is zero but for rounding is judged by the size of all gradients together.
FLOOR = 1e-6


def tensors_of(answer: object) -> list[Tensor]:
    """One tensor [K, *shape] per differentiated tensor.

    A way may answer with a tensor, with a mapping or a sequence of tensors, with one tuple per loss, or
    with a function that gives any of these and whose own work is not timed.
    """
    if callable(answer) and not isinstance(answer, Tensor):
        answer = cast(Callable[[], object], answer)()
    if isinstance(answer, Tensor):
        return [answer]
    if isinstance(answer, Mapping):
        answer = list(answer.values())
    items = list(cast(Sequence[object], answer))
    if items and not isinstance(items[0], Tensor):
        rows = cast(list[tuple[Tensor, ...]], items)
        return [torch.stack(column) for column in zip(*rows, strict=True)]
    return cast(list[Tensor], items)


def difference(answer: object, expected: object) -> str:
    """How an answer differs from the expected one; an empty string where it does not."""
    found, wanted = tensors_of(answer), tensors_of(expected)
    shapes, wanted_shapes = [list(t.shape) for t in found], [list(t.shape) for t in wanted]
    if shapes != wanted_shapes:
        return f"shapes {shapes} where {wanted_shapes} were expected"
    gap = gap_between([t.detach() for t in found], [t.detach() for t in wanted], floor=FLOOR)
    return "" if gap.agrees else f"wrong by {gap.difference:.1e} in the gradient at position {gap.worst}"


def message_of(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
