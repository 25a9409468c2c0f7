"""What the program's names hold that may keep graphs: tensors, lists and dicts, also in objects and modules."""

import ast
import linecache
import sys
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from multiback.traces import Place
from multiback.tracing import places

_MOST = 2000  # names and parts of one namespace
_MOST_FRAMES = 8
_ITEMS = 32  # of what holds other than tensors, looked into
_DEPTH = 3
_ADDING = ("append", "extend", "insert", "add_", "setdefault", "update")
_MODULE = "<module>"
_PLAIN = frozenset((bool, int, float, str, bytes, type(None), set, OrderedDict))
_MODULES_OWN = frozenset(torch.nn.Module().__dict__)


class Holder(NamedTuple):
    """A tensor, or a list or dict that may hold some, under what some code of the program calls it.

    `owner` is the class of the object whose attribute it is, if it is one.
    """

    code: CodeType
    function: str
    text: str
    value: Any
    owner: type | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for what that name holds at another time."""
        return self.code.co_filename, self.function, self.text


def holders_from(frame: FrameType | None) -> Iterator[Holder]:
    """Of the program's frames from `frame` outwards, and of the modules in which these run."""
    told = set[int]()
    for number, one in enumerate(places.frames_from(frame)):
        if number >= _MOST_FRAMES:
            return
        if one.f_locals is not one.f_globals and places.may_look(one.f_code):
            names = one.f_locals
            yield from _held_by(names, one.f_code, one.f_code.co_name)
            places.let_go(one, names)
        if id(one.f_globals) not in told:
            told.add(id(one.f_globals))
            yield from _held_by(one.f_globals, one.f_code, _MODULE)


def _held_by(names: Any, code: CodeType, function: str) -> Iterator[Holder]:
    left = [_MOST]
    for name, value in list(names.items()):
        if type(value) not in _PLAIN and not name.startswith("__"):
            yield from _parts(Holder(code, function, name, value), left, 0)


def _parts(held: Holder, left: list[int], depth: int) -> Iterator[Holder]:
    """It, or what it is made of; types are looked at, never asked, so that no code of the program runs."""
    left[0] -= 1
    value, kind = held.value, type(held.value)
    if left[0] < 0:
        return
    if issubclass(kind, torch.Tensor) or kind in (list, dict):
        yield held
    if kind in (list, tuple, dict):
        items = list(value.items())[:_ITEMS] if kind is dict else enumerate(value[:_ITEMS])
        for key, item in items:
            alone = kind is tuple or not issubclass(type(item), torch.Tensor)  # tensors of a list are the list's
            if depth < _DEPTH and alone and type(key) in (int, str):
                yield from _parts(held._replace(text=f"{held.text}[{key!r}]", value=item), left, depth + 1)
    elif _is_module(kind) or _is_of_program(kind):
        for name, item, inner in _attributes(value, kind, depth):
            if inner <= _DEPTH and type(item) not in _PLAIN:
                part = Holder(held.code, held.function, f"{held.text}.{name}", item, kind)
                yield from _parts(part, left, inner)


def _attributes(value: Any, kind: type, depth: int) -> Iterator[tuple[str, Any, int]]:
    """An object's attributes, and the depth at which each is; of torch's own modules their children alone."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    if type(found) is not dict:
        return
    if _is_module(kind):
        for part in ("_modules", "_buffers") if _is_of_program(kind) else ("_modules",):
            for key, item in list(found.get(part, {}).items()):
                yield key, item, depth  # however deep modules are in modules
    if _is_of_program(kind):
        for key, item in list(found.items()):
            if key not in _MODULES_OWN and not key.startswith("__"):
                yield key, item, depth + 1


@lru_cache(_MOST)
def _is_module(kind: type) -> bool:
    return issubclass(kind, torch.nn.Module)


@lru_cache(_MOST)
def _is_of_program(kind: type) -> bool:
    """Whether a class is the program's own, not one of Python's or torch's."""
    file = _file_of(kind)
    return bool(file) and not places.is_outside_file(file)


def _file_of(kind: type) -> str:
    name = type.__getattribute__(kind, "__module__")
    return str(getattr(sys.modules.get(name), "__file__", None) or "") if type(name) is str else ""


# ---- where something is added ------------------------------------------------------------------


def adding_place(held: Holder) -> tuple[Place, str]:
    """The line that adds to what is held, or else makes or assigns it, and its text; line 0 where there is none."""
    root = held.text.split("[", 1)[0]
    best = (0, 0, held.code.co_filename, held.function)
    for file, function, tree in _syntax(held):
        for node in tree:
            certainty = _adds(node, root.rpartition(".")[2], attribute="." in root)
            if certainty:
                best = max(best, (certainty, node.lineno, file, function))  # type: ignore[attr-defined]
    _, line, file, function = best
    text = linecache.getline(file, line).strip() if line else ""
    return Place(places.writable(file), line, places.writable(function)), text


def _syntax(held: Holder) -> Iterator[tuple[str, str, list[ast.AST]]]:
    """The code that may add to it: its function or module, and for an attribute the classes of its object too."""
    file = held.code.co_filename
    if held.owner is None:
        yield file, held.function, places.syntax_in(file) if held.function == _MODULE else places.syntax_of(held.code)
        return
    yield file, held.function, places.syntax_in(file)
    for kind in held.owner.__mro__:
        if _is_of_program(kind):
            own = (node for node in places.syntax_in(_file_of(kind)) if isinstance(node, ast.ClassDef))
            for found in own:
                if found.name == kind.__name__:
                    yield _file_of(kind), kind.__name__, list(ast.walk(found))


def _adds(node: ast.AST, name: str, *, attribute: bool) -> int:
    """How sure it is that a statement adds to a name: 3 where it says so, 2 where it makes it of itself, 1 assigns."""

    def means(one: ast.AST) -> bool:
        while isinstance(one, ast.Subscript):
            one = one.value
        if isinstance(one, ast.Attribute):
            return attribute and one.attr == name
        return not attribute and isinstance(one, ast.Name) and one.id == name

    if isinstance(node, ast.AugAssign):
        return 3 * means(node.target)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return 3 * (node.func.attr in _ADDING and means(node.func.value))
    if isinstance(node, ast.Assign) and any(map(means, node.targets)):
        of_itself = any(map(means, ast.walk(node.value)))
        into = any(isinstance(one, ast.Subscript) for one in node.targets)
        return 2 if of_itself or into else 1
    return 0
