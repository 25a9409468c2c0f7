"""The slow reference: K separate calls to autograd.grad, and how answers are held against it."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from multiback.methods.columns import real_rows
from zoo import ZOO

ENTRIES = {entry.name: entry for entry in ZOO}
PINNED = Path(__file__).with_name("matrix.json")


@dataclass(frozen=True)
class Reference:
    """One entry's K gradients per target, and what follows from them."""

    targets: dict[str, Tensor]
    jacobians: dict[str, Tensor]
    tolerance: float

    @functools.cached_property
    def matrix(self) -> Tensor:
        """[K, elements of all targets], in float64."""
        return torch.cat([real_rows(one.reshape(len(one), -1)).double() for one in self.jacobians.values()], 1)

    @functools.cached_property
    def gram(self) -> Tensor:
        """[K, K]."""
        return self.matrix @ self.matrix.t()

    def agrees(self, found: Tensor, expected: Tensor) -> bool:
        """Within the tolerance of the tensor's own norm, or of a hundredth of the largest gradient's.

        The second is for gradients that are zero but for rounding.
        """
        if found.shape != expected.shape or not bool(
            torch.isfinite(torch.view_as_real(found) if found.is_complex() else found).all()
        ):
            return False
        gap, norm = (float(one.abs().double().norm()) for one in (found - expected, expected))
        largest = max(float(one.abs().double().norm()) for one in self.jacobians.values())
        return gap <= self.tolerance * max(norm, largest / 100)


def separate(losses: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """[K, *shape] per target."""
    pieces = [torch.autograd.grad(loss, targets, retain_graph=True, allow_unused=True) for loss in losses]
    return [
        torch.stack([torch.zeros_like(target) if one is None else one.to_dense() for one in column])
        for target, column in zip(targets, zip(*pieces, strict=True), strict=True)
    ]


def losses_of(case, which):
    return getattr(case, which)()


@functools.lru_cache(maxsize=4)
def case_of(name):
    return ENTRIES[name].build()


@functools.lru_cache(maxsize=8)
def reference(name: str, which: str) -> Reference:
    """Of an entry's row losses (`rows`) or mixed losses (`dense`)."""
    case = case_of(name)
    targets = dict(case.parameters)
    if case.data is not None:
        targets["the data"] = case.data
    losses = losses_of(case, which)
    scalars = list(losses.unbind()) if isinstance(losses, Tensor) else losses
    found = separate(scalars, list(targets.values()))
    return Reference(targets, dict(zip(targets, found, strict=True)), case.tolerance)


def pinned() -> dict[str, dict[str, str]]:
    """What each entry's requests are answered by, kept in a file beside this one."""
    return json.loads(PINNED.read_text())
