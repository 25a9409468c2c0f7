"""Compares the gradients of two ways: how far apart, and whether one is a multiple of the other."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Largest accepted difference of a gradient tensor, relative to its norm. Other summation orders
# differ by rounding alone, which stayed at least ten times below this in the nets that were tried.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# A tensor whose true gradient is zero (a bias before a normalisation) holds rounding noise only;
# it is compared on the scale of the whole gradient.
_NOISE_SHARE = 1e-2


def tolerance_for(tensors: Sequence[Tensor]) -> float:
    """The tolerance of the coarsest dtype among `tensors`."""
    return max((_TOLERANCE.get(tensor.dtype, 1e-4) for tensor in tensors), default=1e-4)


def difference_between(found: Sequence[Tensor], expected: Sequence[Tensor], factor: float = 1.0) -> float:
    """The largest relative difference of any tensor: ||found - c * expected|| / ||c * expected||.

    The norm of a tensor counts as at least a hundredth of that of all of them. Infinite where
    one of the two holds something that is not finite.
    """
    largest = whole = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        if factor == 1.0 and torch.equal(mine, theirs):
            continue  # the usual case, and the cheap one
        whole = whole or abs(factor) * math.hypot(*map(_norm, expected))
        gap = _norm(torch.add(mine, theirs, alpha=-factor))
        scale = max(abs(factor) * _norm(theirs), _NOISE_SHARE * whole)
        if not math.isfinite(gap) or not math.isfinite(scale):
            return math.inf
        if gap > 0.0:
            largest = max(largest, gap / scale if scale else math.inf)
    return largest


def worst_of(found: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """Which tensor differs most, by its own relative difference."""
    gaps = [_norm(mine - theirs) / (_norm(theirs) or 1.0) for mine, theirs in zip(found, expected, strict=True)]
    return max(range(len(gaps)), key=lambda index: gaps[index])


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def factor_between(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float | None:
    """The number c for which found = c * expected within tolerance; None where there is none."""
    square = sum(_dot(tensor, tensor) for tensor in expected)
    if square == 0.0 or not math.isfinite(square):
        return None
    factor = sum(_dot(mine, theirs) for mine, theirs in zip(found, expected, strict=True)) / square
    if factor == 0.0 or not math.isfinite(factor):
        return None
    return factor if difference_between(found, expected, factor) <= tolerance else None


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
