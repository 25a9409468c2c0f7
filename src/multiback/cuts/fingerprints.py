"""Fingerprints of tensors' bits, by which a later change is seen, also one through `.data`.

The bits of a tensor, as 64-bit words, each weighted by its position and added modulo 2^64, are the
fingerprint. No order of summation changes it, and blocks that change places change it. Many words are laid
out as a matrix first, whose row sums and column sums are what is weighted: no copy of the tensor is made.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WIDTH = 4093  # a prime, so that a tensor's own rows do not line up with the matrix's
_LARGE = 1 << 16  # words
_SMALL = 1 << 18  # bytes
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@functools.cache
def _weights(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator) | 1).to(device)


def _words(rows: Tensor) -> Tensor:
    """[B, n] of any plain dtype as [B, m] 64-bit words."""
    rows = rows.contiguous()
    if rows.shape[1] * rows.element_size() % 8 == 0 and rows.data_ptr() % 8 == 0:
        return rows.view(torch.int64)
    if rows.element_size() == 16:
        return torch.view_as_real(rows).reshape(rows.shape[0], -1).view(torch.int64)
    return rows.view(_WORDS[rows.element_size()]).to(torch.int64)


def of_rows(tensor: Tensor) -> Tensor:
    """A fingerprint per row of dimension 0, int64 [B] on the tensor's device."""
    flat = tensor.detach()
    if not flat.numel():
        return torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    words = _words(flat.reshape(flat.shape[0], -1))
    if words.shape[1] >= _LARGE:
        whole = words.shape[1] // _WIDTH * _WIDTH
        table = words[:, :whole].reshape(words.shape[0], -1, _WIDTH)
        words = torch.cat([words[:, whole:], table.sum(1), table.sum(2)], 1)
    size = 1 << max(words.shape[1] - 1, 1).bit_length()
    return (words * _weights(size, words.device)[: words.shape[1]]).sum(1)


def of_tensor(tensor: Tensor) -> Tensor | None:
    """The fingerprint of a whole tensor, int64 []; None where its bits cannot be read as plain storage."""
    try:
        return of_rows(tensor.detach().reshape(1, -1))[0]
    except RuntimeError:  # sparse, quantised, a wrapper without storage
        return None


class Fingerprints:
    """What tensors held when this was made; tensors without plain storage are judged by their version.

    Costs one read of each, now and whenever `changed` is asked. Small ones are kept as copies, which
    are compared in fewer steps.
    """

    def __init__(self, tensors: Sequence[tuple[Callable[[], str], Tensor]]) -> None:
        small = [(name, tensor, _bits(tensor)) for name, tensor in tensors]
        self._copies = [
            (name, tensor, _place(tensor), bits, bits.clone()) for name, tensor, bits in small if bits is not None
        ]
        self._tensors = [(name, tensor) for name, tensor, bits in small if bits is None]
        self._found = self._read()

    def changed(self) -> str | None:
        """The name of the first tensor that is not as it was; None where all are."""
        for name, tensor, place, bits, copy in self._copies:
            now = bits if _place(tensor) == place else _bits(tensor)
            if now is None or not torch.equal(now, copy):
                return name()
        for (name, _), then, now in zip(self._tensors, self._found, self._read(), strict=True):
            if then != now:
                return name()
        return None

    def _read(self) -> list[tuple[object, ...]]:
        prints = [of_tensor(tensor) for _, tensor in self._tensors]
        values = iter(_numbers([one for one in prints if one is not None]))
        return [
            (tuple(tensor.shape), tensor.dtype, tensor._version if one is None else next(values))
            for (_, tensor), one in zip(self._tensors, prints, strict=True)
        ]


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Where a tensor's values are and how they are laid out; `.data =` gives it others."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()


def _bits(tensor: Tensor) -> Tensor | None:
    """A small tensor on the CPU as integers; None for any other."""
    dtype = _WORDS.get(tensor.element_size())
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or dtype is None:
        return None
    return tensor.detach().view(dtype) if tensor.numel() * tensor.element_size() <= _SMALL else None


def _numbers(found: list[Tensor]) -> list[int]:
    """The values, with one wait for each device."""
    values: dict[int, int] = {}
    for device in {one.device for one in found}:
        places = [place for place, one in enumerate(found) if one.device == device]
        values.update(zip(places, torch.stack([found[place] for place in places]).tolist(), strict=True))
    return [values[place] for place in range(len(found))]
