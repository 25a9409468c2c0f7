"""Layouts of rows in a tensor, and what an operation's step knows of its shapes."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Element i, in row-major order, is of row `(i // inner) % rows`."""

    inner: int


@dataclass(frozen=True)
class Shared:
    """All rows use all of it, by way of the node named `origin`; harmless at parameters."""

    origin: str


@dataclass(frozen=True)
class Mixed:
    """Rows meet, or nothing is known of the operation named `where`."""

    where: str


State = Layout | Shared | Mixed
SHARED = Shared("")

Shape = tuple[int, ...]


def merged(first: State, second: State) -> State:
    """The state of an edge that two operations lead to."""
    if isinstance(first, Layout) and isinstance(second, Layout):
        return first if first == second else Mixed("two layouts of the rows")
    for state in (first, second):
        if isinstance(state, Mixed):
            return state
    if isinstance(first, Shared) and isinstance(second, Shared):
        return first
    return Mixed(first.origin if isinstance(first, Shared) else second.origin)  # pyrefly: ignore[missing-attribute]


def signed(value: int) -> int:
    """A number that a node saved: negative ones appear unsigned, in 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def locate(shape: Shape, inner: int, rows: int) -> tuple[int, int] | None:
    """The axis that holds the rows and `inner` within that axis; None where no one axis holds them."""
    after = 1
    for axis in range(len(shape) - 1, -1, -1):
        size = shape[axis]
        if size > 1 and after <= inner and inner * rows <= after * size:
            within, rest = divmod(inner, after)
            return None if rest or size % (within * rows) else (axis, within)
        after *= size
    return None


def place(shape: Shape, axis: int, within: int) -> Layout:
    """The layout of rows held by `axis` of a tensor of `shape`."""
    return Layout(within * math.prod(shape[axis + 1 :]))


class Step:
    """One node on the walk: the layouts of its outputs, and shapes, read when they are asked for."""

    def __init__(self, node: Any, arriving: dict[int, Layout], rows: int) -> None:
        self.node = node
        self.name: str = node.name()
        self.arriving = arriving
        self.rows = rows

    @cached_property
    def inputs(self) -> list[Shape]:
        """Shapes of the inputs that want a gradient, () for others."""
        return [
            () if child is None else tuple(child._input_metadata[number].shape)
            for child, number in self.node.next_functions
        ]

    @cached_property
    def outputs(self) -> list[Shape]:
        """Shapes of the outputs."""
        return [tuple(metadata.shape) for metadata in self.node._input_metadata]

    @property
    def mixed(self) -> list[State]:
        """No input keeps rows apart."""
        return [Mixed(self.name)] * len(self.node.next_functions)

    @property
    def kept(self) -> list[State]:
        """Rows stay on their axis in every input that has it, and are not in others."""
        number = next(iter(self.arriving), None)
        found = None if number is None else self.located(number)
        if number is None or found is None:
            return self.mixed
        size = self.outputs[number][found[0]]
        return [
            place(shape, *found) if found[0] < len(shape) and shape[found[0]] == size else SHARED
            for shape in self.inputs
        ]

    def located(self, number: int = 0) -> tuple[int, int] | None:
        """Axis and `inner` within it, in an output."""
        layout = self.arriving.get(number)
        return None if layout is None else locate(self.outputs[number], layout.inner, self.rows)

    def same_axis(self, number: int, axis: int, within: int, output: int = 0) -> State:
        """The layout of an input whose axis is the output's; mixed where their sizes differ."""
        shape = self.inputs[number]
        if axis >= len(shape) or shape[axis] != self.outputs[output][axis]:
            return Mixed(self.name)
        return place(shape, axis, within)

    def broadcast(self, number: int, axis: int, within: int) -> State:
        """The layout of an input that was broadcast to the output; shared where it has no rows."""
        shape, output = self.inputs[number], self.outputs[0]
        own = axis - (len(output) - len(shape))
        if own < 0 or shape[own] != output[axis]:
            return SHARED
        return place(shape, own, within)
