"""Tensors in nested tuples, lists, mappings and dataclasses, as models take their data and give their outputs."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses."""
    return [tensor for _, tensor in named_tensors("", value)]


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its name: `name` itself, its place in a sequence, its key in a mapping, or its field."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(str(key), item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors(f"{name}[{index}]", item)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from named_tensors(field.name, getattr(value, field.name, None))


def map_tensors(value: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any] | None = None) -> Any:
    """The same structure, its types kept, with every tensor changed, in the order of `tensors_in`.

    `other` changes what is neither a tensor nor a structure; it stays as it is without.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, change, other) for key, item in value.items()}
        return items if type(value) is dict else _like(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change, other) for item in value))
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change, other) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if _is_dataclass(value):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):  # frozen ones, too, are filled without their own checks
                object.__setattr__(changed, field.name, map_tensors(getattr(value, field.name), change, other))
        return changed
    return value if other is None else other(value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type with other items; a plain dict where its type cannot be filled."""
    if not isinstance(value, MutableMapping):
        return items
    found = copy.copy(value)
    for key, item in items.items():
        found[key] = item
    return found


def called(model: Callable[..., Any], data: Any) -> Any:
    """The model on its data: a mapping as keywords, a tuple or list as positional arguments, else as one argument."""
    if isinstance(data, Mapping):
        return model(**data)
    if isinstance(data, (tuple, list)):
        return model(*data)
    return model(data)


def dense(grad: Tensor) -> Tensor:
    """The tensor without sparse storage."""
    return grad if grad.layout == torch.strided else grad.to_dense()


def fresh(tensor: Tensor) -> Tensor:
    """A leaf of the same values."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
