"""Finds what a program calls a tensor, and which modules a function names."""

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

_DEEPEST, _MOST = 4, 1000


def name_of(tensor: Tensor) -> str:
    """How a message calls a leaf: its name in a module that holds it, else its shape.

    Looks through every object alive, some 50 milliseconds: for messages alone.
    """
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    children = {id(child) for module in modules for child in module._modules.values()}
    names = [
        f'parameter "{name}" of {type(root).__name__}'
        for root in modules
        if id(root) not in children
        for name, parameter in root.named_parameters(remove_duplicate=False)
        if parameter is tensor
    ]
    return max(names, key=len, default=f"a leaf of shape {list(tensor.shape)}")


def modules_of(call: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a callable is or names: in arguments, closures, globals and what these hold, to some depth."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(call, 0)]
    while waiting and len(seen) < _MOST:
        value, depth = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[id(value)] = value
        elif depth < _DEEPEST:
            waiting += [(part, depth + 1) for part in _named_by(value)]
    return list(found.values())


def runs_compiled(call: Callable[..., Any]) -> bool:
    """Whether a module that a callable is or names, or a part of it, is compiled."""
    parts = (part for root in modules_of(call) for part in root.modules())
    return any(type(one).__name__ == "OptimizedModule" or one._compiled_call_impl is not None for one in parts)


def _named_by(value: Any) -> Iterator[Any]:
    """What a function, a structure or a plain object holds."""
    if isinstance(value, (list, tuple, set)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif inspect.ismethod(value):
        yield from (value.__self__, value.__func__)
    elif inspect.isfunction(value):
        try:
            seen = inspect.getclosurevars(value)
        except ValueError:  # a variable that is not set yet
            return
        yield from (*seen.nonlocals.values(), *seen.globals.values(), getattr(value, "__wrapped__", None))
    elif not (inspect.ismodule(value) or inspect.isclass(value) or isinstance(value, Tensor)):
        yield from getattr(value, "__dict__", {}).values()
