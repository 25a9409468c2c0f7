"""Lines of the program that add to what a name holds, found in its source."""

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from multiback.traces import Place
from multiback.tracing import insides, places
from multiback.tracing.holders import MODULE, Holder

_ADDING = ("append", "extend", "insert", "add_", "setdefault", "update")
_MOST_FILES = 8
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Scope: TypeAlias = int | None  # the line where the function begins to which a name belongs; None for the module


class _Adds(NamedTuple):
    """A statement that adds to a name, or to an attribute of `base`, and how sure that is.

    `certainty` is 3 where it says so, 2 where it makes the name of itself, 1 where it assigns it. `scope` is the
    function to which the name, or `base`, belongs; `owner` the class in which the statement stands.
    """

    certainty: int
    line: int
    base: str
    scope: _Scope
    owner: str


def adding_place(held: Holder) -> tuple[Place, str]:
    """The line that adds to what is held, or else makes or assigns it, and its text; line 0 where there is none."""
    file, line = max(_candidates(held), key=lambda one: one[1][:2], default=(held.code.co_filename, _NOWHERE))[0:2]
    text = linecache.getline(file, line.line).strip() if line.line else ""
    return Place(places.writable(file), line.line, places.writable(held.function)), text


_NOWHERE = _Adds(0, 0, "", None, "")


def _candidates(held: Holder) -> list[tuple[str, _Adds]]:
    """Statements that add to it: by its name in its own scope, and for an attribute in its object's classes."""
    file, root = held.code.co_filename, held.text.split("[", 1)[0]
    scope = None if held.function == MODULE else held.code.co_firstlineno
    base, dot, name = root.split(".", 1)[0], "." * ("." in root), root.rpartition(".")[2]
    found = [(file, one) for one in _index(file).get(dot + name, ()) if (one.base, one.scope) == (base, scope)]
    for kind in insides.mro_of(held.owner) if held.owner is not None else ():
        its_file, its_name = insides.file_of(kind), type.__getattribute__(kind, "__name__")
        found += [(its_file, one) for one in _index(its_file).get(dot + name, ()) if one.owner == its_name]
    return found


@lru_cache(_MOST_FILES)
def _index(file: str) -> dict[str, list[_Adds]]:
    """By name, or an attribute's with a dot before it, all statements of a file that add to it."""
    found: dict[str, list[_Adds]] = {}
    for node, functions, owner in _nodes(places.tree_of(file), (), ""):
        for target, certainty in _targets(node):
            base = target
            while isinstance(base, (ast.Attribute, ast.Subscript)):
                base = base.value
            if isinstance(base, ast.Name):
                one = _Adds(certainty, node.lineno, base.id, _scope_of(base.id, functions), owner)
                found.setdefault(_named(target), []).append(one)
    return found


def _nodes(
    node: ast.AST | None, functions: tuple[_Function, ...], owner: str
) -> Iterator[tuple[ast.stmt | ast.expr, tuple[_Function, ...], str]]:
    """Every node with the functions around it, innermost last, and the class."""
    for child in ast.iter_child_nodes(node) if node is not None else ():
        if isinstance(child, (ast.stmt, ast.expr)):
            yield child, functions, owner
        inner = (*functions, child) if isinstance(child, _FUNCTIONS) else functions
        yield from _nodes(child, inner, child.name if isinstance(child, ast.ClassDef) else owner)


def _targets(node: ast.AST) -> Iterator[tuple[ast.expr, int]]:
    """What a statement adds to, without its indices, and how sure that is."""
    if isinstance(node, ast.AugAssign):
        yield _whole(node.target), 3
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
        yield _whole(node.func.value), 3
    elif isinstance(node, ast.Assign):
        used = {_named(one) for one in ast.walk(node.value)} - {""}
        for target in node.targets:
            yield _whole(target), 2 if _named(target) in used or isinstance(target, ast.Subscript) else 1


def _whole(node: ast.expr) -> ast.expr:
    """What is indexed."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _named(node: ast.AST) -> str:
    """A name, or an attribute's with a dot before it; empty for all else."""
    return node.id if isinstance(node, ast.Name) else f".{node.attr}" if isinstance(node, ast.Attribute) else ""


def _scope_of(name: str, functions: tuple[_Function, ...]) -> _Scope:
    """The function to which a name belongs, inside these; None for the module."""
    for function in reversed(functions):
        if name in _bound_by(function):
            return places.first_line(function)
    return None


@lru_cache(256)
def _bound_by(function: _Function) -> frozenset[str]:
    """The names that are a function's own: its arguments, and what it assigns and declares neither global nor outer."""
    given = function.args
    bound = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if one}
    others = set[str]()
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            others.update(node.names)
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
    return frozenset(bound - others)
