"""Reads the graph of every traversal of a run, just before the engine walks it."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from multiback import graph
from multiback.benching.bound import Bound
from multiback.cuts.cotangents import STAND_INS

_WALKED_TRAVERSALS = 4  # of one run; more would say the same and cost a walk each


@dataclass
class Seen:
    """What the traversals of one run were about to walk."""

    nodes: int | None = None
    saved_bytes: int | None = None
    hooked: bool = False
    outside: int = 0
    traversals: int = 0
    reached: list[str] = field(default_factory=list)


@contextmanager
def watched(bound: Bound, candidates: list[tuple[str, Any]] | None = None) -> Generator[Seen, None, None]:
    """Read the graph of every traversal just before the engine runs it.

    The one place through which `Tensor.backward` and `autograd.grad` both enter the engine is
    replaced for the duration; nothing else is touched, and the graph is not kept.
    """
    seen = Seen()
    engine = torch.autograd._engine_run_backward

    def watch(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.traversals += 1
        if seen.traversals <= _WALKED_TRAVERSALS:
            facts = graph.read(outputs, parameters=bound.parameters, inputs=bound.inputs())
            seen.nodes = max(seen.nodes or 0, facts.nodes)
            seen.saved_bytes = max(seen.saved_bytes or 0, facts.saved_bytes)
            seen.hooked |= bool(facts.unreadable)
            others = {id(leaf) for leaf in facts.leaves if leaf not in STAND_INS}  # a cut's own are not the problem's
            seen.outside = max(seen.outside, len(others - {id(t) for t in bound.wrt}))
            if candidates:
                nodes = set(graph.walk(graph.roots_of(outputs)))
                seen.reached += [name for name, node in candidates if node in nodes]
        return engine(outputs, *args, **kwargs)

    with mock.patch.object(torch.autograd, "_engine_run_backward", watch):
        yield seen
