"""Fingerprints of tensors' bits, by which a later change is seen, also one through `.data`.

The bits of a tensor, as words of 32 bits and less, each times a random number of 64 bits that belongs to
its place, are added up modulo 2^64. Two tensors that differ have the same sum with a chance of 2^-33 or so
(multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is fast", 2014); words are half as
wide as the numbers, since a change of the highest bit alone would be lost in pairs. Many words, then of 64 bits, are
laid out as a matrix first; its row sums and column sums, mixed, are what is weighted: no copy of the tensor is made.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WIDTH = 4093  # a prime, so that a tensor's own rows do not line up with the matrix's
_LARGE = 1 << 16  # words
_ODD = 0x2545F4914F6CDD1D
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
        words = _sums(words)
    size = 1 << max(words.shape[1] - 1, 1).bit_length()
    return (words.long() * _weights(size, words.device)[: words.shape[1]]).sum(1)


def _sums(words: Tensor) -> Tensor:
    """[B, m] words of any width as far fewer of 64 bits, each of which a change in its row or column changes."""
    if words.shape[1] * words.element_size() % 8 == 0:  # sums of whole words take a tenth of the time
        words = (words if words.data_ptr() % 8 == 0 else words.clone()).view(torch.int64)
    whole = words.shape[1] // _WIDTH * _WIDTH
    table = words[:, :whole].reshape(words.shape[0], -1, _WIDTH)
    sums = [words[:, whole:].long(), table.sum(1, dtype=torch.int64), table.sum(2, dtype=torch.int64)]
    mixed = torch.cat(sums, 1)
    mixed = (mixed ^ (mixed >> 32)) * _ODD
    return mixed ^ (mixed >> 29)


def of_tensor(tensor: Tensor) -> Tensor | None:
    """The fingerprint of a whole tensor, int64 []; None where its bits cannot be read as plain storage."""
    if not _is_readable(tensor):
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
        self._copies = [(name, tensor, _Kept(tensor, bits)) for name, tensor, bits in small if bits is not None]
        self._tensors = [(name, tensor) for name, tensor, bits in small if bits is None]
        self._found = self._read()

    def changed(self) -> str | None:
        """The name of the first tensor that is not as it was; None where all are."""
        for name, tensor, kept in self._copies:
            if not kept.is_still(tensor):
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


class _Kept:
    """A small tensor's bits as they were, and a view of where they are, which keeps that memory from being reused."""

    def __init__(self, tensor: Tensor, bits: Tensor) -> None:
        self._bits, self._copy = bits, bits.clone()
        self._storage = bits.untyped_storage()
        self._size, self._at = self._storage.nbytes(), tensor.data_ptr()
        self._read = tensor.dtype, tensor.shape, tensor.stride()

    def is_still(self, tensor: Tensor) -> bool:
        """Whether the tensor holds these bits."""
        now: Tensor | None = self._bits
        if not self._is_there(tensor):
            now = _bits(tensor)
        return now is not None and torch.equal(now, self._copy)

    def _is_there(self, tensor: Tensor) -> bool:
        """Whether it is read from the same memory in the same way, which `.data =` and freeing a storage change."""
        try:
            at = tensor.data_ptr()
        except RuntimeError:  # sparse by now
            return False
        same = at == self._at and (tensor.dtype, tensor.shape, tensor.stride()) == self._read
        return same and self._storage.nbytes() == self._size and not (tensor.is_neg() or tensor.is_conj())


def _is_readable(tensor: Tensor) -> bool:
    """Whether a tensor's values lie in plain storage; one can be freed under it, as sharding does."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return False
    try:
        return not tensor.numel() or tensor.untyped_storage().nbytes() > 0
    except (NotImplementedError, RuntimeError):  # a wrapper without storage
        return False


def _bits(tensor: Tensor) -> Tensor | None:
    """A small tensor on the CPU as integers; None for any other."""
    dtype = _WORDS.get(tensor.element_size(), torch.int64 if tensor.element_size() == 8 else None)
    if dtype is None or tensor.device.type != "cpu" or not _is_readable(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.detach().view(dtype) if tensor.numel() * tensor.element_size() <= _SMALL else None


def _numbers(found: list[Tensor]) -> list[int]:
    """The values, with one wait for each device."""
    values: dict[int, int] = {}
    for device in {one.device for one in found}:
        places = [place for place, one in enumerate(found) if one.device == device]
        values.update(zip(places, torch.stack([found[place] for place in places]).tolist(), strict=True))
    return [values[place] for place in range(len(found))]
