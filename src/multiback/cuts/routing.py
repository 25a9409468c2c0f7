"""Routes cotangents of all rows to the batches that hold them, and back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiback.cuts.row_gradient import nonzero_rows


@dataclass(frozen=True, eq=False)
class Routed:
    """The rows of one loss's cotangents that are not zero.

    Attributes
    ----------
    loss : the loss's number.
    rows : int64 [n] on the CPU, ascending.
    cotangents : by output, [n, ...]; None for an output that the loss does not use.
    """

    loss: int
    rows: Tensor
    cotangents: list[Tensor | None]

    @classmethod
    def of(cls, loss: int, values: Sequence[Tensor | None], start: int = 0) -> "Routed":
        """From cotangents of rows `start` and following; they are copied unless all of them count."""
        there = [value.detach() for value in values if value is not None]
        rows = nonzero_rows(there)
        whole = bool(there) and len(rows) == len(there[0])
        parts = [None if value is None else value.detach() for value in values]
        taken = parts if whole else [None if part is None else part[rows.to(part.device)] for part in parts]
        return cls(loss, rows + start, taken)

    def by_batch(self, starts: Tensor) -> Iterator[tuple[int, "Routed"]]:
        """By batch that holds any of them, its number and those; `starts` are the batches' first rows, ascending."""
        if not len(self.rows):
            return
        where = torch.bucketize(self.rows, starts, right=True) - 1
        numbers, counts = where.unique_consecutive(return_counts=True)
        if len(numbers) == 1:
            yield int(numbers[0]), self
            return
        first = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            here = slice(first, first + count)
            parts = [None if one is None else one[here] for one in self.cotangents]
            yield number, Routed(self.loss, self.rows[here], parts)
            first += count


def union(parts: Sequence[Routed]) -> Tensor:
    """The rows of any of them, ascending."""
    if len(parts) == 1:
        return parts[0].rows
    return torch.cat([part.rows for part in parts]).unique()


def spread(parts: Sequence[Routed], rows: Tensor) -> list[Tensor | None]:
    """By output, the sum of the parts' cotangents over `rows`, which hold them all; zero elsewhere."""
    if len(parts) == 1 and len(parts[0].rows) == len(rows):
        return parts[0].cotangents
    found: list[Tensor | None] = []
    for columns in zip(*(part.cotangents for part in parts), strict=True):
        whole: Tensor | None = None
        for part, column in zip(parts, columns, strict=True):
            if column is None or not len(part.rows):
                continue
            if whole is None:
                whole = column.new_zeros(len(rows), *column.shape[1:])
            whole.index_add_(0, torch.searchsorted(rows, part.rows).to(column.device), column)
        found.append(whole)
    return found


def disjoint(parts: Sequence[Routed]) -> Iterator[list[Routed]]:
    """The parts in as few groups as one pass finds, no row twice in any group."""
    if len(parts) == 1:
        yield [parts[0]]
        return
    groups: list[tuple[set[int], list[Routed]]] = []
    for part in parts:
        rows = set(part.rows.tolist())
        for used, members in groups:
            if used.isdisjoint(rows):
                used.update(rows)
                members.append(part)
                break
        else:
            groups.append((rows, [part]))
    yield from (members for _, members in groups)
