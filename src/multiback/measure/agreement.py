"""Compares the gradients of two ways: how far apart, and whether one is a multiple of the other."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Largest accepted difference of a gradient tensor, relative to its norm. Other summation orders
# differ by rounding alone, which stayed at least ten times below this in the nets that were tried.
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_DEFAULT_TOLERANCE = 1e-4
# A tensor whose true gradient is zero (a bias before a normalisation) holds nothing but rounding of
# the others. In float64 that is told from a real difference by the scale of the whole gradient.
FLOAT64_FLOOR = 64 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Gap:
    """How far two gradients are apart.

    `difference` is the largest of any tensor, ||found - c * expected|| / ||c * expected||; `excess`
    the largest in units of the tensor's own tolerance, so at most 1 where the two agree; `worst`
    the tensor where that is.
    """

    difference: float = 0.0
    excess: float = 0.0
    worst: int = 0

    @property
    def agrees(self) -> bool:
        """Whether every tensor is within its tolerance."""
        return self.excess <= 1.0


def tolerance_of(tensor: Tensor) -> float:
    """The tolerance of a tensor's dtype."""
    return _TOLERANCE.get(tensor.dtype, _DEFAULT_TOLERANCE)


def gap_between(found: Sequence[Tensor], expected: Sequence[Tensor], factor: float = 1.0, floor: float = 0.0) -> Gap:
    """Compare tensor by tensor; a gap up to `floor` times the norm of the whole gradient is none.

    Infinite where one of the two holds something that is not finite.
    """
    result, whole = Gap(), 0.0
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if factor == 1.0 and torch.equal(mine, theirs):
            continue  # the usual case, and the cheap one
        gap = _norm(torch.add(mine, theirs, alpha=-factor))
        if floor and gap:
            whole = whole or abs(factor) * math.hypot(*map(_norm, expected))
        if gap <= floor * whole:
            continue
        scale = abs(factor) * _norm(theirs)
        relative = gap / scale if scale and math.isfinite(scale) else math.inf
        relative = relative if math.isfinite(relative) else math.inf
        excess = relative / tolerance_of(theirs)
        if excess > result.excess:
            result = Gap(max(relative, result.difference), excess, index)
    return result


def difference_between(found: Sequence[Tensor], expected: Sequence[Tensor], factor: float = 1.0) -> float:
    """The largest relative difference of any tensor."""
    return gap_between(found, expected, factor).difference


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def factor_between(found: Sequence[Tensor], expected: Sequence[Tensor], floor: float = 0.0) -> float | None:
    """The number c for which found = c * expected within tolerance; None where there is none."""
    square = sum(_dot(tensor, tensor) for tensor in expected)
    if square == 0.0 or not math.isfinite(square):
        return None
    factor = sum(_dot(mine, theirs) for mine, theirs in zip(found, expected, strict=True)) / square
    if factor == 0.0 or not math.isfinite(factor):
        return None
    return factor if gap_between(found, expected, factor, floor).agrees else None


class Compared:
    """The comparison of a way's calls with the reference gradients, the worst call kept.

    Without a reference (no way has run yet) everything is a difference, and the way becomes it.
    """

    def __init__(self, reference: list[Tensor] | None, floor: float) -> None:
        self._reference = reference
        self._floor = floor
        self.gap = Gap()
        self.factor: float | None = None
        self.finite = True
        self.seconds = 0.0

    @property
    def unclear(self) -> bool:
        """Whether more than this comparison is needed to place the way."""
        return self.finite and self.factor is None and (self._reference is None or not self.gap.agrees)

    def add(self, found: list[Tensor], multiple: int) -> None:
        """Compare one call's gradients with `multiple` times the reference."""
        start = time.perf_counter()
        self.finite = self.finite and all_finite(found)
        if self._reference is not None:
            gap = gap_between(found, self._reference, multiple, self._floor)
            if gap.excess > self.gap.excess:
                self.gap = gap
                agrees = gap.agrees or not self.finite
                self.factor = None if agrees else factor_between(found, self._reference, self._floor)
        self.seconds += time.perf_counter() - start


def _norm(tensor: Tensor) -> float:
    """The L2 norm, in float64 only where the tensor's own range or precision would not do."""
    if tensor.dtype in (torch.float32, torch.float64):
        norm = float(torch.linalg.vector_norm(tensor))
        if math.isfinite(norm) and norm > torch.finfo(tensor.dtype).tiny ** 0.5:
            return norm
    return math.sqrt(_dot(tensor, tensor))


def _dot(first: Tensor, second: Tensor) -> float:
    """The real inner product, summed in float64."""
    if first.is_complex():
        first, second = torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj())
    return float(torch.dot(first.reshape(-1).double(), second.reshape(-1).double()))
