"""A proof without a traversal: which edges of a graph hold each loss's rows apart.

The walk starts at one tensor of K losses, whose element k is row k, and follows the gradient. A
*layout* says which row an element of an edge's tensor belongs to: in row-major order, element i is of
row `(i // inner) % K`. Views keep it whatever the shape; other operations keep rows apart where
their output's row depends on the same row of an input alone. What is not known to do so is not
believed, and everything below it is left to a traversal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.autograd.graph import Node

from multiback.independence.layouts import SHARED, Layout, Mixed, Shared, State, Step, merged
from multiback.independence.operations import HANDLERS

Edges = dict[tuple[Node, int], State]


@dataclass(frozen=True)
class Locality:
    """What the walk proved: a layout for every edge that holds rows apart, and where rows first meet."""

    states: Edges
    rows: int
    coupling: str

    def inner(self, node: Node, output: int = 0) -> int | None:
        """The layout's `inner` at an edge; None where rows are not proven apart."""
        state = self.states.get((node, output))
        return state.inner if isinstance(state, Layout) else None


def prove(root: Node, output: int, rows: int, nodes: list[Node], *, assume: bool = False) -> Locality:
    """Walk from the losses' tensor, each node after everything that leads to it; O(nodes + edges).

    With `assume`, what is not known to keep rows apart is taken to keep them on the axis where they
    are, and to do nothing to them by way of inputs that have no such axis.
    """
    waiting = _dependencies(nodes)
    states: Edges = {(root, output): Layout(1)}
    coupling = ""
    ready = [root]
    while ready:
        node = ready.pop()
        for (child, number), state in zip(node.next_functions, _through(node, states, rows, assume), strict=True):
            if child is None:
                continue
            known = states.get((child, number))
            states[child, number] = now = state if known is None else merged(known, state, assume=assume)
            if isinstance(now, Mixed) and not coupling:
                coupling = now.where
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
    return Locality(states, rows, coupling)


def _dependencies(nodes: list[Node]) -> dict[Node, int]:
    """How many edges lead into each node."""
    waiting: dict[Node, int] = {}
    for node in nodes:
        for child, _ in node.next_functions:
            if child is not None:
                waiting[child] = waiting.get(child, 0) + 1
    return waiting


def _through(node: Any, states: Edges, rows: int, assume: bool) -> list[State]:
    """The state of every edge out of `node`, in order of its inputs."""
    children = node.next_functions
    metadata = node._input_metadata if children else ()
    arriving = [states.get((node, number)) for number in range(len(metadata))]
    present = [state for state in arriving if state is not None]
    for state in present:
        if isinstance(state, Mixed) or (isinstance(state, Shared) and len(present) == 1):
            return [state] * len(children)
    name = node.name()
    handler: Callable[[Step], list[State]] | None = HANDLERS.get(name.rstrip("0123456789"))
    layouts = [state if isinstance(state, Layout) else None for state in arriving]
    inputs = [() if child is None else tuple(child._input_metadata[nr].shape) for child, nr in children]
    step = Step(node, name, layouts, metadata, inputs, rows)
    unknown = not present or handler is None or any(not isinstance(state, Layout) for state in present)
    found = step.mixed if unknown or handler is None else handler(step)
    if assume and any(isinstance(state, Mixed) for state in found):
        found = step.kept
    found = [*found, *(SHARED for _ in range(len(children) - len(found)))]
    return [
        Shared(child.name()) if state is SHARED and child is not None else state
        for (child, _), state in zip(children, found, strict=True)
    ]
