"""What objects of the program hold, seen without running any of its code, and which files and classes are its own."""

import os
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from types import GetSetDescriptorType, MemberDescriptorType, SimpleNamespace
from typing import Any

import torch

import multiback

OWN = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, multiback.__file__))
_LIBRARY = ("<frozen", sysconfig.get_paths()["stdlib"] + os.sep)
_INSTALLED = ("site-packages", "dist-packages")
DICTS = (dict, OrderedDict, defaultdict, Counter)
_MODULES_OWN = frozenset(torch.nn.Module().__dict__)
_DICT_OF_MODULE: Any = type(sys).__dict__["__dict__"]
_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
_MRO: Any = type.__dict__["__mro__"]


def is_outside_file(name: str) -> bool:
    """Whether code in a file belongs to torch, to multiback or to the standard library."""
    if name.startswith(OWN):
        return True
    return name.startswith(_LIBRARY) and not any(folder in name for folder in _INSTALLED)


def is_plain_tensor(kind: type) -> bool:
    """Whether a tensor of that class runs no code of a subclass when it is looked at."""
    return kind is torch.Tensor or kind is torch.nn.Parameter


def attributes_of(value: Any, depth: int) -> Iterator[tuple[str, Any, int]]:
    """The attributes of an object of the program's own, or of a module, and the depth at which each is.

    Modules' children and buffers are among them, however deep modules are in modules; of torch's own modules the
    children alone.
    """
    kind = type(value)
    is_module, own = issubclass(kind, torch.nn.Module), is_of_program(kind)
    found = _state_of(value) if is_module or own or kind is SimpleNamespace else None
    if found is None:
        return
    if is_module:
        for part in ("_modules", "_buffers") if own else ("_modules",):
            inside: Any = found.get(part)
            if is_any(type(inside), DICTS):
                for key, item in list(inside.items()):
                    yield key, item, depth
    if own or not is_module:
        for key, item in list(found.items()):
            if type(key) is str and not key.startswith("__") and not (is_module and key in _MODULES_OWN):
                yield key, item, depth + 1


def _state_of(value: Any) -> dict[Any, Any] | None:
    """An object's own `__dict__`, by the descriptor that Python gives its class, and by no other."""
    for kind in mro_of(type(value)):
        found = type.__getattribute__(kind, "__dict__").get("__dict__")
        if found is not None:
            state = found.__get__(value) if is_any(type(found), _DESCRIPTORS) else None
            return state if type(state) is dict else None
    return None


def mro_of(kind: type) -> tuple[type, ...]:
    """A class and those that it is made from."""
    return tuple(_MRO.__get__(kind))


def is_of_program(kind: type) -> bool:
    """Whether a class is the program's own, not one of Python's or torch's."""
    file = file_of(kind)
    return bool(file) and not is_outside_file(file)


def file_of(kind: type) -> str:
    """The file of the module that a class says it is from; empty where there is none."""
    name = type.__getattribute__(kind, "__dict__").get("__module__")
    module = sys.modules.get(name) if type(name) is str else None
    if module is None or not isinstance(module, type(sys)):
        return ""
    file = _DICT_OF_MODULE.__get__(module).get("__file__")
    return file if type(file) is str else ""


def is_any(kind: type, kinds: tuple[type, ...]) -> bool:
    """By identity, since a metaclass may compare by code of its own."""
    return any(kind is one for one in kinds)
