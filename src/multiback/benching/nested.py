"""Tensors in nested tuples, lists and dicts, as models take their data."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return [tensor for _, tensor in named_tensors("", value)]


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its name: `name` itself, its place in a sequence, or its key in a mapping."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(str(key), item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors(f"{name}[{index}]", item)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def dense(grad: Tensor) -> Tensor:
    """The tensor without sparse storage."""
    return grad if grad.layout == torch.strided else grad.to_dense()


def fresh(tensor: Tensor) -> Tensor:
    """A leaf of the same values."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
