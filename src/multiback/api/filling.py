"""Answers put together from chunks of losses."""

import torch
from torch import Tensor

from multiback.api.answering import Prepared, columns
from multiback.methods import pages
from multiback.methods.columns import Columns
from multiback.request import Request, Target


class Slot:
    """One target's answer [K, *shape], filled chunk by chunk; a single chunk is taken as it is."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._parts: Tensor | None = None

    def put(self, found: Columns, number: int, count: int) -> None:
        """Take the gradients of a chunk of losses."""
        if len(found) == count and isinstance(found.answers[number], Tensor):
            self._parts = found.gradients(number)
            return
        if self._parts is None:
            target = self._target
            self._parts = pages.fresh((count, *target.shape), target.dtype, target.device)
        found.gradients(number, self._parts[found.start : found.stop])

    def answer(self, count: int) -> Tensor:
        """[K, *shape]."""
        return self._target.zeros(count) if self._parts is None else self._parts


def filled(prepared: Prepared, slots: list[Slot]) -> list[Tensor]:
    """All chunks put in place."""
    count, reached = prepared.work.request.count, prepared.work.survey.reached
    if prepared.work.request.create_graph:
        return _stacked(prepared)
    for found in columns(prepared):
        for number in reached:
            slots[number].put(found, number, count)
        del found  # before the next chunk is made
    return [slot.answer(count) for slot in slots]


def _stacked(prepared: Prepared) -> list[Tensor]:
    pieces = list(columns(prepared))
    targets = prepared.work.request.targets
    return [torch.cat([piece.gradients(number) for piece in pieces]) for number in range(len(targets))]


def repeated(asked: Request, answer: Tensor) -> Tensor:
    """One row per loss that the caller gave."""
    return answer if asked.repeats is None else answer[list(asked.repeats)]
