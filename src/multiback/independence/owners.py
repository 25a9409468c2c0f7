"""Which loss owns each unit of a site: the partition of a batch among K losses."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cyclic:
    """Unit n belongs to loss `(n // inner) % count`: every loss owns equally many."""

    count: int
    inner: int
    units: int

    def parts(self) -> list["Part"]:
        """All owners at once."""
        return [Part(None, self, None)]

    def index(self, device: torch.device) -> Tensor:
        """Owner of each unit [units]."""
        return (torch.arange(self.units, device=device) // self.inner) % self.count

    def gather(self, units: Tensor) -> Tensor:
        """[units, ...] as [count, units / count, ...]."""
        outer = self.units // (self.count * self.inner)
        if outer == 1:
            return units.reshape(self.count, self.inner, *units.shape[1:])
        cut = units.reshape(outer, self.count, self.inner, *units.shape[1:])
        return cut.transpose(0, 1).reshape(self.count, outer * self.inner, *units.shape[1:])


@dataclass(frozen=True, eq=False)
class Named:
    """Unit n belongs to loss `owner[n]`; -1 stands for no loss, whose gradient there is zero."""

    count: int
    owner: Tensor

    def index(self, device: torch.device) -> Tensor:
        """Owner of each unit [units]."""
        return self.owner.to(device)

    def parts(self) -> list["Part"]:
        """Owners of equally many units together, so that nothing is padded."""
        order = torch.argsort(self.owner, stable=True)
        counts = torch.bincount(self.owner + 1, minlength=self.count + 1)
        starts = counts.cumsum(0) - counts
        own, starts = counts[1:], starts[1:]
        found = []
        for size in own.unique().tolist():
            if size == 0:
                continue
            owners = (own == size).nonzero().flatten()
            places = starts[owners][:, None] + torch.arange(size, device=owners.device)
            whole = len(owners) == self.count
            found.append(Part(None if whole else owners, None, order[places]))
        return found


Owners = Cyclic | Named


@dataclass(frozen=True, eq=False)
class Part:
    """Losses of equally many units: `owners` (None: all, in order), and where their units are."""

    owners: Tensor | None
    cyclic: Cyclic | None
    places: Tensor | None

    def gather(self, units: Tensor) -> Tensor:
        """[units, ...] as [owners, n, ...]."""
        if self.cyclic is not None:
            return self.cyclic.gather(units)
        if self.places is None:
            raise AssertionError("a part is cyclic or has places")
        taken = units.index_select(0, self.places.flatten())
        return taken.reshape(*self.places.shape, *units.shape[1:])
