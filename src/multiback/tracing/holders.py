"""What the program's names hold that may keep graphs: tensors, lists and dicts, also in objects and modules.

Types are compared by identity and looked at below what classes define, so that no code of the program runs.
"""

from collections.abc import Iterator
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple

from multiback.tracing import insides, places

_MOST = 1000  # names and parts of one namespace
_MOST_FRAMES = 8
_ITEMS = 32  # of what holds other than tensors, looked into
_DEPTH = 3
MODULE = "<module>"
_LISTS = (list, tuple)
_PLAIN = (bool, int, float, str, bytes, type(None), type)


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
    for one in islice(places.frames_from(frame), _MOST_FRAMES):
        if one.f_code.co_name != MODULE and places.may_look(one.f_code):
            names = one.f_locals
            try:
                yield from _held_by(names, one.f_code, one.f_code.co_name)
            finally:
                places.let_go(one, names)
        if id(one.f_globals) not in told:
            told.add(id(one.f_globals))
            yield from _held_by(one.f_globals, one.f_code, MODULE)


def _held_by(names: Any, code: CodeType, function: str) -> Iterator[Holder]:
    if type(names) is not dict and not places.LOCALS_APART:  # a namespace with code of its own
        return
    left = [_MOST]
    for name, value in list(names.items()):
        if not name.startswith("__"):
            yield from _parts(Holder(code, function, name, value), left, 0)


def _parts(held: Holder, left: list[int], depth: int) -> Iterator[Holder]:
    """It, or what it is made of."""
    value, kind = held.value, type(held.value)
    if left[0] < 0 or insides.is_any(kind, _PLAIN):
        return
    left[0] -= 1
    if insides.is_plain_tensor(kind):
        yield held
    elif insides.is_any(kind, _LISTS) or insides.is_any(kind, insides.DICTS):
        if kind is not tuple:
            yield held
        if depth < _DEPTH:
            yield from _items(held, left, depth)
    else:
        for name, item, inner in insides.attributes_of(value, depth):
            if inner <= _DEPTH and not insides.is_any(type(item), _PLAIN):
                part = Holder(held.code, held.function, f"{held.text}.{name}", item, kind)
                yield from _parts(part, left, inner)


def _items(held: Holder, left: list[int], depth: int) -> Iterator[Holder]:
    """What a list, a tuple or a dict is made of; tensors of a long one are its own affair."""
    value, kind = held.value, type(held.value)
    items = islice(enumerate(value) if insides.is_any(kind, _LISTS) else value.items(), _ITEMS)
    by_name = kind is tuple or (insides.is_any(kind, insides.DICTS) and len(value) <= _ITEMS)
    for key, item in list(items):
        if (by_name or not insides.is_plain_tensor(type(item))) and insides.is_any(type(key), (int, str)):
            yield from _parts(held._replace(text=f"{held.text}[{key!r}]", value=item), left, depth + 1)
