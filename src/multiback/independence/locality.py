"""A proof without a traversal: which edges of a graph hold each loss's rows apart.

The walk starts at one tensor of K losses, whose element k is row k, and follows the gradient. A
*layout* says which row an element of an edge's tensor belongs to: in row-major order, element i is of
row `(i // inner) % K`. Views keep it whatever the shape; other operations keep rows apart where
their output's row depends on the same row of an input alone. What is not known to do so is not
believed, and everything below it is left to a traversal.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.autograd.graph import Node

from multiback.independence.layouts import SHARED, Layout, Mixed, Shared, State, Step, merged
from multiback.independence.operations import HANDLERS
from multiback.rules import convolution, embedding, linear, norms

_LAYERS = (*linear.KINDS, *convolution.KINDS, *norms.KINDS, *embedding.KINDS)
Arrived = dict[int, State]  # the states of a node's outputs


@dataclass(frozen=True)
class Locality:
    """What the walk proved: a layout for every edge that holds rows apart, and where rows first meet.

    `dense` says that every loss uses the same tensors whole, before any parameter is met.
    """

    states: dict[Node, Arrived]
    coupling: str
    dense: bool = False

    def inner(self, node: Node, output: int = 0) -> int | None:
        """The layout's `inner` at an edge; None where rows are not proven apart."""
        state = self.states.get(node, {}).get(output)
        return state.inner if isinstance(state, Layout) else None


def prove(root: Node, output: int, rows: int, *, inner: int = 1, assume: bool = False) -> Locality:
    """Walk from a tensor that holds the losses, or their rows, last made first, as long as something holds rows apart.

    With `assume`, operations of which nothing is known are taken to keep rows on the axis where they
    are, and to do nothing to them by way of inputs that have no such axis.
    """
    states: dict[Node, Arrived] = {root: {output: Layout(inner)}}
    coupling = ""
    order = itertools.count()  # nodes themselves have no order
    ready = [(-root._sequence_nr(), next(order), root)]
    passed: set[Node] = set()
    apart = {root}  # nodes ahead that something holding rows apart leads to
    dense = True
    while ready and apart:
        *_, node = heapq.heappop(ready)
        passed.add(node)
        if node in apart:
            apart.discard(node)
            dense = dense and not _uses_parameters(node)
        for (child, number), state in zip(node.next_functions, _through(node, states[node], rows, assume), strict=True):
            if child is None:
                continue
            if child in passed:  # made by several threads, whose orders do not compare
                return Locality({}, node.name())
            arrived = states.get(child)
            if arrived is None:
                arrived = states.setdefault(child, {})
                if child.next_functions:
                    heapq.heappush(ready, (-child._sequence_nr(), next(order), child))
            known = arrived.get(number)
            arrived[number] = now = state if known is None else merged(known, state)
            if type(now) is Layout:
                apart.add(child)
            elif type(now) is Mixed and not coupling:
                coupling = now.where
    return Locality(states, coupling, dense=dense and not coupling)


def _uses_parameters(node: Any) -> bool:
    """Whether a node may use a parameter, or be one."""
    children = node.next_functions
    return (
        not children
        or type(node).__name__ in _LAYERS
        or any(child is not None and not child.next_functions for child, _ in children)
    )


def _through(node: Any, arrived: Arrived, rows: int, assume: bool) -> list[State]:
    """The state of every edge out of `node`, in order of its inputs."""
    children = node.next_functions
    for state in arrived.values():
        if type(state) is Mixed or (type(state) is Shared and len(arrived) == 1):
            return [state] * len(children)
    step = Step(node, {number: state for number, state in arrived.items() if isinstance(state, Layout)}, rows)
    handler: Callable[[Step], list[State]] | None = HANDLERS.get(step.name.rstrip("0123456789"))
    found = step.mixed if handler is None or len(step.arriving) < len(arrived) else handler(step)
    if assume and handler is None and len(step.arriving) == len(arrived):
        found = step.kept
    found = [*found, *(SHARED for _ in range(len(children) - len(found)))]
    return [
        Shared(child.name()) if state is SHARED and child is not None else state
        for (child, _), state in zip(children, found, strict=True)
    ]
