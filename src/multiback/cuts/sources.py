"""The data of a cut: rows by their numbers, from tensors or from a data set that is read again."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from multiback.cuts import fingerprints
from multiback.errors import OptionError, StaleForwardError
from multiback.nested import map_tensors, tensors_in

Collate = Callable[[list[Any]], Any]


class Source(Protocol):
    """N rows of data, read in groups."""

    @property
    def num_rows(self) -> int:
        """N."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that hold the data; none where the data are read from a data set."""

    def read(self, groups: Sequence[Sequence[int]]) -> Iterator[Any]:
        """The rows of each group in turn, in the data's structure, with the rows in dimension 0."""


@dataclass(frozen=True)
class Tensors:
    """Tensors, or a structure of them, that hold N rows each."""

    data: Any
    num_rows: int
    tensors: Sequence[Tensor]

    def read(self, groups: Sequence[Sequence[int]]) -> Iterator[Any]:
        """Slices where the rows follow one another, else copies."""
        for rows in groups:
            yield map_tensors(self.data, lambda tensor, rows=rows: taken(tensor.detach(), rows))


def taken(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of a tensor: a view where they follow one another."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return tensor[rows[0] : rows[-1] + 1]
    return tensor[torch.as_tensor(rows, dtype=torch.int64, device=tensor.device)]


@dataclass(frozen=True)
class Items:
    """A map-style data set, whose items are read again by their numbers."""

    data: Any
    num_rows: int
    collate: Collate
    workers: int
    tensors: Sequence[Tensor] = ()

    def read(self, groups: Sequence[Sequence[int]]) -> Iterator[Any]:
        """Collated items; by worker processes where there is more than one group."""
        workers = self.workers if len(groups) > 1 else 0
        loader: DataLoader[Any] = DataLoader(
            self.data,
            batch_sampler=[list(rows) for rows in groups],
            collate_fn=self.collate,
            num_workers=workers,
            generator=torch.Generator(torch.get_default_device()),  # or else the loader would draw from the global one
        )
        for group, rows in zip(loader, groups, strict=True):
            for tensor in tensors_in(group):
                if tensor.requires_grad:
                    raise OptionError(
                        "data: must give items that require no grad, since no gradient can reach what they were made "
                        "from; got one that does. Detach it in the data set, or give the tensors themselves."
                    )
                if not tensor.ndim or tensor.shape[0] != len(rows):
                    raise OptionError(
                        f"data: must be collated with the items in dimension 0; got a tensor of shape "
                        f"{list(tensor.shape)} for {len(rows)} items. Stack them in collate_fn."
                    )
            yield group


def source_of(data: Any, collate: Collate | None, workers: int) -> Source:
    """Check the data; OptionError says what it must be."""
    if isinstance(data, DataLoader):
        raise OptionError(
            "data: must be readable by row number; got a DataLoader. Give its data set, loader.dataset, with "
            "batch_size and, where it has one, collate_fn."
        )
    if isinstance(data, IterableDataset) or (isinstance(data, Iterable) and not _indexable(data)):
        raise OptionError(
            f"data: must be readable again by row number; got {type(data).__name__}, which can only be iterated. Give "
            "a map-style data set, with __getitem__ and __len__, or tensors."
        )
    items = isinstance(data, list) and not all(isinstance(item, Tensor) for item in data)
    if isinstance(data, (Tensor, tuple, list, Mapping)) and not items:
        return _tensors(data, collate, workers)
    if not _indexable(data) or type(data).__module__.partition(".")[0] == "numpy":
        raise OptionError(
            f"data: must be a tensor, a tuple or dict of tensors, or a map-style data set; got {type(data).__name__}. "
            "Convert arrays with torch.as_tensor."
        )
    if not isinstance(workers, int) or workers < 0:
        raise OptionError(f"workers: must be a whole number from 0 up; got {workers!r}. Leave it out for none.")
    if not len(data):
        raise OptionError("data: must hold at least one row; got none. Give rows to infer.")
    return Items(data, len(data), collate or default_collate, workers)


def _indexable(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _tensors(data: Any, collate: Collate | None, workers: int) -> Tensors:
    if collate is not None or workers:
        name = "workers" if collate is None else "collate_fn"
        raise OptionError(f"{name}: must go with a data set; got tensors as data. Leave it out.")
    values = [data] if isinstance(data, Tensor) else list(data.values() if isinstance(data, Mapping) else data)
    for value in values:
        if not isinstance(value, Tensor):
            raise OptionError(
                f"data: must hold tensors only; got {type(value).__name__} in a {type(data).__name__}. Bind other "
                "arguments with functools.partial, or give a data set."
            )
    for value in values:
        if value.layout != torch.strided or value.is_nested or value.is_quantized or _is_tiny_float(value.dtype):
            kind = "nested" if value.is_nested else str(value.dtype if value.is_quantized else value.layout)
            kind = str(value.dtype) if _is_tiny_float(value.dtype) else kind
            raise OptionError(
                f"data: must be plain dense tensors of a dtype that can be computed with; got {kind}. Convert them, or "
                "give a data set whose items are converted."
            )
    sizes = [value.shape[0] if value.ndim else None for value in values]
    if not values or not sizes[0] or any(size != sizes[0] for size in sizes):
        raise OptionError(
            f"data: must hold the same number of rows, at least one, in dimension 0 of every tensor; got "
            f"{[list(value.shape) for value in values]}. Expand or pad them."
        )
    if any(value.is_inference() for value in values):
        raise OptionError(
            "data: must be made outside torch.inference_mode(); got a tensor from inside. Clone it outside the block."
        )
    return Tensors(data, values[0].shape[0], values)


def _is_tiny_float(dtype: torch.dtype) -> bool:
    """Whether floating numbers of 8 bits or fewer, which no operation but a conversion takes."""
    return dtype.is_floating_point and dtype.itemsize < 2


class RowPrints:
    """Fingerprints of every row as it was at inference, by tensor of the data: 8 bytes each."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._found: list[Tensor] | None = None

    def keep(self, start: int, group: Any) -> None:
        """Remember the rows from `start` on."""
        prints = [fingerprints.of_rows(tensor).cpu() for tensor in tensors_in(group)]
        if self._found is None:
            self._found = [torch.empty(self._num_rows, dtype=torch.int64, device="cpu") for _ in prints]
        for kept, found in zip(self._found, prints, strict=True):
            kept[start : start + len(found)] = found

    def check(self, rows: Sequence[int], group: Any) -> None:
        """StaleForwardError unless the rows are what they were."""
        for kept, tensor in zip(self._found or [], tensors_in(group), strict=True):
            then, now = taken(kept, rows), fingerprints.of_rows(tensor).cpu()
            if not torch.equal(then, now):
                row = rows[int((then != now).nonzero()[0, 0])]
                raise StaleForwardError(
                    f"data: must give the same rows whenever they are read; row {row} is not what it was at inference. "
                    "Draw random augmentations once, by row number, and leave the data as they are until backward."
                )
