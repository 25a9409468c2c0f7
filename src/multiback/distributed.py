"""Process groups: what ranks know of one another, sums over them, and errors that no rank is left alone with."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from multiback.errors import OptionError, RequestError
from multiback.nested import dense

T = TypeVar("T")


class Group:
    """A process group, every rank of which makes the same calls in the same order."""

    def __init__(self, group: Any) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError(
                "group: must be a process group of torch.distributed, which is not initialised here. Call "
                "torch.distributed.init_process_group first, or leave it out."
            )
        try:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        except (AttributeError, TypeError, ValueError) as error:
            raise OptionError(
                f"group: must be a process group; got {type(group).__name__}. Give torch.distributed.group.WORLD."
            ) from error
        if self.rank < 0:
            raise OptionError("group: must hold this rank, which it does not. Make the cut on its members alone.")
        self._group = group

    def told(self, one: T) -> list[T]:
        """What every rank tells, by rank; any object that can be pickled."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, one, group=self._group)
        return found

    def together(self, act: Callable[[], T]) -> T:
        """What `act` gives; where it fails on one rank, it fails on all, and none waits for another."""
        failure: Exception | None = None
        found: Any = None
        try:
            found = act()
        except Exception as error:
            failure = error
        said = self.told(None if failure is None else f"rank {self.rank}, {type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        others = [one for one in said if one is not None]
        if others:
            raise RequestError(f"group: must succeed on every rank; it did not on {others[0]}")
        return found

    def gathered(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, [sum of counts, ...], in the order of ranks."""
        largest = max(counts)
        mine = rows.new_zeros(largest, *rows.shape[1:])
        mine[: len(rows)] = rows
        parts = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(parts, mine, group=self._group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def sums(self, parts: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
        """By place, the sum over ranks of what is there, dense; None where no rank has anything."""
        there = [any(column) for column in zip(*self.told([part is not None for part in parts]), strict=True)]
        found: list[Tensor | None] = []
        for part, one, wanted in zip(parts, like, there, strict=True):
            total = None
            if wanted:
                total = (
                    torch.zeros_like(one)
                    if part is None
                    else dense(part.detach()).clone(memory_format=torch.contiguous_format)
                )
                dist.all_reduce(total, group=self._group)
            found.append(total)
        return found
