"""Places in the traced program: who calls, what its names hold, and where a name is assigned."""

import ast
import dis
import inspect
import linecache
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache, partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from multiback.traces import Place
from multiback.tracing.insides import OWN, attributes_of, is_outside_file
from multiback.tracing.wasteful import MIXED

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LOOPS = tuple(os.path.join("torch", "autograd", name) for name in ("functional.py", "gradcheck.py"))
_MOST_NAMES, _MOST_LOOKED_AT = 200, 400
_WATCHING = ("__torch_function__", "__torch_dispatch__")
LOCALS_APART = sys.version_info >= (3, 13)  # from here on f_locals is a view of its own
_PYTEST = "@py_builtins"  # in whose rewritten assertions locals() stands in the message alone
_SHOWING_FRAMES = frozenset({"f_locals", "_getframe", "currentframe"})
_SHOWING_LOCALS = frozenset({"locals", "exec", "eval", "vars", "dir"}) | _SHOWING_FRAMES
_LOADING_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_MOST_CODES = 4096
_ON_PURPOSE = ("requires_grad_", "zero_grad_", "retain_grad_", "detach_")
_ONLY_OURS = 4  # the frame's reference, the caller's, the parameter's and the count's own


def is_outside(frame: FrameType) -> bool:
    """Whether a frame belongs to torch, to multiback or to the standard library."""
    return is_outside_file(frame.f_code.co_filename)


def caller(frame: FrameType | None) -> FrameType | None:
    """The first frame of the program itself, from `frame` outwards; what only watches operations is passed by."""
    while frame is not None and (is_outside(frame) or frame.f_code.co_name in _WATCHING):
        frame = frame.f_back
    return frame


def in_library_loop(frame: FrameType | None) -> bool:
    """Whether a library asks for gradients one after another on the program's behalf, such as torch's `jacobian`."""
    while frame is not None and is_outside(frame):
        name = frame.f_code.co_filename
        if name.endswith(_LOOPS) or (name.startswith(OWN[1]) and not name.startswith(_HERE)):
            return True
        frame = frame.f_back
    return False


def place_of(frame: FrameType | None) -> Place:
    """The line that a frame is at."""
    if frame is None:
        return Place("<unknown>", 0)
    return Place(writable(frame.f_code.co_filename), frame.f_lineno, writable(frame.f_code.co_name))


def writable(text: str) -> str:
    """Text as a record can hold it: bytes of a name that are no UTF-8 are written as escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class Name(NamedTuple):
    """What the program calls a tensor, and for a name with an index what holds it: tuple, list or dict."""

    text: str
    kind: str = ""


def names_in(frame: FrameType | None) -> dict[int, Name]:
    """By the sequence number of the node that made it, what the program calls a tensor; two frames' locals."""
    found: dict[int, Name] = {}
    for one in (frame, frame.f_back if frame is not None else None):
        if one is None or is_outside(one) or not may_look(one.f_code):
            continue
        names, left = one.f_locals, [_MOST_LOOKED_AT]
        try:
            for name, value in list(names.items())[:_MOST_NAMES]:
                for path, kind, tensor in _tensors(name, "", value, left):
                    node = maker_of(tensor)
                    if node is not None:
                        found.setdefault(node._sequence_nr(), Name(path, kind))
        finally:
            let_go(one, names)
    return found


def kind_of(value: Any) -> str:
    """What holds a named tensor: tuple, list or dict of tensors alone, or mixed."""
    items = value.values() if type(value) is dict else value
    alone = type(value) in (tuple, list, dict) and all(issubclass(type(item), torch.Tensor) for item in items)
    return type(value).__name__ if alone else MIXED


@lru_cache(_MOST_CODES)
def may_look(code: CodeType) -> bool:
    """Whether a function's locals can be read unnoticed: before Python 3.13 that renews the dict `locals()` gave.

    So it does what a frame's `f_locals` gave. A method of such a name, as `model.eval`, does not count.
    """
    if LOCALS_APART or not code.co_flags & inspect.CO_OPTIMIZED:
        return True
    asked = _SHOWING_LOCALS.intersection(code.co_names)
    if asked == {"locals"} and _PYTEST in code.co_names:
        return True
    return not asked or not any(
        one.argval in asked and (one.opname.startswith(_LOADING_NAMES) or one.argval in _SHOWING_FRAMES)
        for one in dis.get_instructions(code)
    )


def is_traced_by_python() -> bool:
    """Whether a trace or profile function may be running whose caller writes a function's locals back after it.

    So it is of those written in Python, not of coverage's or a profiler's own.
    """
    tracers = (sys.gettrace(), sys.getprofile())
    return not LOCALS_APART and any(_is_written_in_python(one) for one in tracers)


def _is_written_in_python(tracer: Any) -> bool:
    called = inspect.getattr_static(type(tracer), "__call__", None)
    return isinstance(tracer, (FunctionType, MethodType, partial)) or isinstance(called, FunctionType)


def maker_of(tensor: torch.Tensor) -> Any:
    """The node that made a tensor; None for leaves, and where it cannot be told, as of a view that was written to.

    Asked for that, torch would make the view's node anew, later than the program would have.
    """
    try:
        return None if tensor._is_view() and tensor._version else tensor.grad_fn
    except RuntimeError:
        return None


def let_go(frame: FrameType, names: Any) -> None:
    """Empty the snapshot of a function's names, which its frame would keep, and with it every tensor in it.

    Before Python 3.13 a function's `f_locals` is such a dict; a module's is its namespace, and stays.
    """
    is_snapshot = type(names) is dict and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_snapshot and sys.getrefcount(names) <= _ONLY_OURS:  # the program may hold it, by locals()
        names.clear()


def _tensors(
    name: str, kind: str, value: Any, left: list[int], depth: int = 0
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The tensors under a name, and what kind of container holds each: itself, items, attributes of a module.

    Types are looked at, never asked, so that no code of the program runs. `left` counts down what may be looked at.
    """
    left[0] -= 1
    if left[0] < 0:
        return
    if issubclass(type(value), torch.Tensor):
        yield name, kind, value
    elif depth < 2 and type(value) in (list, tuple):
        inside = MIXED if kind else kind_of(value)
        for place, item in enumerate(value[: left[0] + 1]):
            yield from _tensors(f"{name}[{place}]", inside, item, left, depth + 1)
    elif depth < 1 and type(value) is dict and not name.startswith("__"):
        inside = kind_of(value)
        for key, item in list(value.items()) if len(value) <= left[0] else []:
            if type(key) in (str, int):
                yield from _tensors(f"{name}[{key!r}]", inside, item, left, depth + 1)
    elif depth < 1:
        for key, item, _ in attributes_of(value, 0):
            yield from _tensors(f"{name}.{key}", "", item, left, 1)


def assigned(frame: FrameType, name: str) -> list[int]:
    """The lines at which the frame's function, or module, assigns a name: the last three before where it is."""
    root = re.split(r"[.\[]", name, maxsplit=1)[0]
    stores = [
        node for node in syntax_of(frame.f_code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    lines = sorted({node.lineno for node in stores if node.id == root})
    return [line for line in lines if line <= frame.f_lineno][-3:] or lines[:3]


def syntax_of(code: CodeType) -> list[ast.AST]:
    """All of a function, or of a module; nothing where there is no source."""
    tree = syntax_in(code.co_filename)
    if code.co_name == "<module>":
        return tree
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    own = next((node for node in tree if isinstance(node, functions) and first_line(node) == code.co_firstlineno), None)
    return [] if own is None else list(ast.walk(own))


def first_line(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    """Where it begins, decorators included, as its code says."""
    return min([function.lineno, *(one.lineno for one in getattr(function, "decorator_list", ()))])


def edited(frame: FrameType) -> list[tuple[int, str]]:
    """Lines of the frame's file that change something in place, such as `x += 1` or `x.relu_()`: line and text."""
    found: dict[int, str] = {}
    tree = syntax_in(frame.f_code.co_filename)
    counters = _counters(tree)
    for node in tree:
        method = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        in_place = method.endswith("_") and not method.startswith(("_", "clip_grad")) and method not in _ON_PURPOSE
        in_place = in_place and "init." not in ast.unparse(node)
        augmented = isinstance(node, ast.AugAssign) and not _counts(node, counters)
        into_part = isinstance(node, ast.Assign) and any(isinstance(one, ast.Subscript) for one in node.targets)
        if isinstance(node, (ast.AugAssign, ast.Assign, ast.Call)) and (augmented or into_part or in_place):
            found[node.lineno] = linecache.getline(frame.f_code.co_filename, node.lineno).strip()
    return sorted(found.items())


def _counts(node: ast.AugAssign, counters: set[str]) -> bool:
    return isinstance(node.target, ast.Name) and node.target.id in counters


def _counters(tree: list[ast.AST]) -> set[str]:
    """Names that a file sets to a number somewhere."""
    sets = [node for node in tree if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    return {one.id for node in sets for one in node.targets if isinstance(one, ast.Name)}


def syntax_in(file: str) -> list[ast.AST]:
    """The syntax of a whole file; nothing where there is no source."""
    tree = tree_of(file)
    return [] if tree is None else list(ast.walk(tree))


def tree_of(file: str) -> ast.Module | None:
    """The syntax of a whole file; None where there is no source."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """The program's own frames, from `frame` outwards."""
    while frame is not None:
        if not is_outside(frame):
            yield frame
        frame = frame.f_back


def current() -> FrameType:
    """The frame of whoever calls."""
    return sys._getframe(1)
