"""Places in the traced program: who calls, what its names hold, and where a name is assigned."""

import ast
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

import multiback
from multiback.traces import Place

_OWN = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, multiback.__file__))
_LIBRARY = ("<frozen", sysconfig.get_paths()["stdlib"] + os.sep)
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_JACOBIAN = os.path.join("torch", "autograd", "functional.py")
_INSTALLED = ("site-packages", "dist-packages")
_MOST_NAMES, _MOST_ITEMS = 200, 200
_ONLY_OURS = 4  # the frame's reference, the caller's, the parameter's and the count's own


def is_outside(frame: FrameType) -> bool:
    """Whether a frame belongs to torch, to multiback or to the standard library."""
    name = frame.f_code.co_filename
    if name.startswith(_OWN):
        return True
    return name.startswith(_LIBRARY) and not any(folder in name for folder in _INSTALLED)


def caller(frame: FrameType | None) -> FrameType | None:
    """The first frame of the program itself, from `frame` outwards."""
    while frame is not None and is_outside(frame):
        frame = frame.f_back
    return frame


def in_library_loop(frame: FrameType | None) -> bool:
    """Whether a library asks for gradients one after another on the program's behalf: torch's `jacobian`, multiback."""
    while frame is not None and is_outside(frame):
        name = frame.f_code.co_filename
        if name.endswith(_JACOBIAN) or (name.startswith(_OWN[1]) and not name.startswith(_HERE)):
            return True
        frame = frame.f_back
    return False


def place_of(frame: FrameType | None) -> Place:
    """The line that a frame is at."""
    if frame is None:
        return Place("<unknown>", 0)
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def names_in(frame: FrameType | None) -> dict[int, str]:
    """By the sequence number of the node that made it, what the program calls a tensor; two frames' locals."""
    found: dict[int, str] = {}
    for one in (frame, frame.f_back if frame is not None else None):
        if one is None or is_outside(one):
            continue
        names = one.f_locals
        for name, value in list(names.items())[:_MOST_NAMES]:
            for path, tensor in _tensors(name, value):
                if tensor.grad_fn is not None:
                    found.setdefault(tensor.grad_fn._sequence_nr(), path)
        _let_go(one, names)
    return found


def _let_go(frame: FrameType, names: Any) -> None:
    """Empty the snapshot of a function's names, which its frame would keep, and with it every tensor in it.

    Before Python 3.13 a function's `f_locals` is such a dict; a module's is its namespace, and stays.
    """
    is_snapshot = type(names) is dict and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_snapshot and sys.getrefcount(names) <= _ONLY_OURS:  # the program may hold it, by locals()
        names.clear()


def _tensors(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under a name: itself, items of short sequences and dicts, attributes of a module."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < 2 and isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        for place, item in enumerate(value):
            yield from _tensors(f"{name}[{place}]", item, depth + 1)
    elif depth < 1 and isinstance(value, dict) and len(value) <= _MOST_ITEMS and not name.startswith("__"):
        for key, item in list(value.items()):
            yield from _tensors(f"{name}[{key!r}]", item, depth + 1)
    elif depth < 1 and isinstance(value, torch.nn.Module):
        for key, item in list(vars(value).items()):
            if not key.startswith("_"):
                yield from _tensors(f"{name}.{key}", item, 1)


def assigned(code: CodeType, name: str) -> list[int]:
    """The lines of a function, or of a module, at which a name is assigned."""
    root = re.split(r"[.\[]", name, maxsplit=1)[0]
    try:
        tree: ast.AST = ast.parse("".join(linecache.getlines(code.co_filename)))
        if code.co_name != "<module>":
            functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
            tree = next(
                node for node in ast.walk(tree) if isinstance(node, functions) and node.lineno == code.co_firstlineno
            )
    except (SyntaxError, StopIteration, ValueError):
        return []
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return sorted({node.lineno for node in stores if node.id == root})


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """The program's own frames, from `frame` outwards."""
    while frame is not None:
        if not is_outside(frame):
            yield frame
        frame = frame.f_back


def current() -> FrameType:
    """The frame of whoever calls."""
    return sys._getframe(1)
