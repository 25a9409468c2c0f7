"""Fingerprints of tensors' bits, by which a later change is seen, also one through `.data`.

The bits of a tensor, as words of 32 bits and less, each times a random number of 64 bits that belongs to
its place, are added up modulo 2^64. Two tensors that differ have the same sum with a chance of 2^-33 or so
(multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014); words are half as
wide as the numbers, since a change of the highest bit alone would be lost in pairs. Many words are laid out
as a matrix first, whose row sums and column sums are what is weighted: no copy of the tensor is made.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WIDTH = 4093  # a prime, so that a tensor's own rows do not line up with the matrix's
_LARGE = 1 << 16  # words
_SMALL = 1 << 18  # bytes
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@functools.cache
def _weights(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    bounds = torch.iinfo(torch.int64)
    return torch.randint(bounds.min, bounds.max, (count,), generator=generator, device="cpu").to(device)


def _words(rows: Tensor) -> Tensor:
    """[B, n] of any plain dtype as [B, m] words of at most 32 bits."""
    rows = rows.resolve_conj().resolve_neg().contiguous()
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    return rows.view(_WORDS.get(rows.element_size(), torch.int32))


def of_rows(tensor: Tensor) -> Tensor:
    """A fingerprint per row of dimension 0, int64 [B] on the tensor's device."""
    flat = tensor.detach()
    if not flat.numel():
        return torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    words = _words(flat.reshape(flat.shape[0], -1))
    if words.shape[1] >= _LARGE:
        whole = words.shape[1] // _WIDTH * _WIDTH
        table = words[:, :whole].reshape(words.shape[0], -1, _WIDTH)
        sums = [table.sum(1, dtype=torch.int64), table.sum(2, dtype=torch.int64)]
        words = torch.cat([words[:, whole:].long(), *sums], 1)
    size = 1 << max(words.shape[1] - 1, 1).bit_length()
    return (words.long() * _weights(size, words.device)[: words.shape[1]]).sum(1)


def of_tensor(tensor: Tensor) -> Tensor | None:
    """The fingerprint of a whole tensor, int64 []; None where its bits cannot be read as plain storage."""
    if _place(tensor) is None:
        return None
    try:
        return of_rows(tensor.detach().reshape(1, -1))[0]
    except RuntimeError:  # quantised, or a wrapper without storage
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


def _place(tensor: Tensor) -> tuple[object, ...] | None:
    """Where a tensor's values are and how they are read, which `.data =` changes; None where they are not to be read.

    A storage can be freed under a tensor, as sharding does, and another come to lie at its address.
    """
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    try:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a wrapper without storage
        return None
    if tensor.numel() and not size:
        return None
    views = tensor.is_conj(), tensor.is_neg()
    return storage._cdata, size, tensor.storage_offset(), tensor.shape, tensor.dtype, tensor.stride(), views


def _bits(tensor: Tensor) -> Tensor | None:
    """A small tensor on the CPU as integers; None for any other."""
    dtype = _WORDS.get(tensor.element_size(), torch.int64 if tensor.element_size() == 8 else None)
    if dtype is None or tensor.device.type != "cpu" or _place(tensor) is None or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.detach().view(dtype) if tensor.numel() * tensor.element_size() <= _SMALL else None


def _numbers(found: list[Tensor]) -> list[int]:
    """The values, with one wait for each device."""
    values: dict[int, int] = {}
    for device in {one.device for one in found}:
        places = [place for place, one in enumerate(found) if one.device == device]
        values.update(zip(places, torch.stack([found[place] for place in places]).tolist(), strict=True))
    return [values[place] for place in range(len(found))]
