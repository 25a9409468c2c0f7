"""What methods for returned gradients share: the work at hand and their form."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from multiback import graph, traversals
from multiback.independence import Independence
from multiback.methods.columns import Answer, Columns
from multiback.planner import Facts
from multiback.request import Request
from multiback.survey import Survey


@dataclass(frozen=True, eq=False)
class Work:
    """One request with everything that is known of it."""

    survey: Survey
    independence: Independence
    last: bool = True

    @property
    def request(self) -> Request:
        """The request."""
        return self.survey.request

    @property
    def frees(self) -> bool:
        """Whether the graph goes with the last traversal."""
        return self.last and not (self.request.retain_graph or self.request.create_graph)

    def keeps(self, loss: int, *, all_leaves: bool = False) -> bool:
        """Whether the traversal that ends with `loss` must keep the graph, since more of it will be traversed.

        The last frees what it visits, which is everything where it goes to `all_leaves`. Otherwise
        the graph is released as a whole, but for graphs with Python nodes, which are not run for that.
        """
        whole = all_leaves and self.survey.whole
        return not (self.frees and loss == self.request.count and (whole or self.survey.python))

    def below(self, numbers: list[int]) -> bool:
        """Whether tensors made from parameters are traversed by themselves, after the last traversal from losses."""
        covers = (kept.get(number) for number in numbers for kept in (self.survey.covers, self.survey.spares))
        return any(cover is not None and bool(cover.below) for cover in covers)

    def ready(self, loss: int, *, kept: bool) -> None:
        """The traversals up to `loss` are done; after the last, what was `kept` only for safety is freed."""
        if self.frees and loss == self.request.count:
            if kept:
                traversals.release(self.survey)
            graph.mark_freed(self.request.losses)


class Method(ABC):
    """One way to gradients of K losses; `columns` gives them chunk by chunk and keeps the graph."""

    name: str
    chunks = True

    @abstractmethod
    def refusal(self, facts: Facts) -> str:
        """Why this method cannot answer; empty where it can."""

    @abstractmethod
    def peak_bytes(self, facts: Facts, chunk: int) -> int:
        """Upper bound of the bytes above those at entry, the answer included."""

    @abstractmethod
    def columns(self, work: Work, numbers: list[int], chunk: int) -> Iterator[Columns]:
        """Gradients of the targets `numbers`, zeros for all others."""


def placed(work: Work, numbers: list[int], found: list[Answer]) -> list[Answer]:
    """Answers of the targets `numbers` at their places among all."""
    answers: list[Answer] = [None] * len(work.request.targets)
    for number, answer in zip(numbers, found, strict=True):
        answers[number] = answer
    return answers


def ranges(count: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Start and stop of every chunk of losses."""
    for start in range(0, count, chunk):
        yield start, min(start + chunk, count)


def dense(gradient: Tensor) -> Tensor:
    """A sparse gradient as a dense one."""
    return gradient.to_dense() if gradient.layout != torch.strided else gradient
