"""From losses on stand-ins to their cotangents: what each brings to the stand-ins, and directly to `wrt`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from multiback import graph, traversals
from multiback.api.answering import freed_graphs_named
from multiback.api.gradients import jac
from multiback.arguments import Losses, losses_of
from multiback.errors import RequestError
from multiback.nested import dense
from multiback.request import Target, distinct_losses, scalars_of

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Cotangents:
    """d loss / d stand-in for every stand-in, and d loss / d target by ways that avoid them; None where none."""

    values: list[Tensor | None]
    direct: list[Tensor | None]


def cotangents_of(
    losses: Losses,
    leaves: Sequence[Tensor],
    targets: Sequence[Target],
    taken: Callable[[Cotangents], T],
    *,
    retain_graph: bool,
) -> list[T]:
    """By loss, what `taken` takes from its cotangents, which are let go before the next loss's are made.

    Each by a traversal of the loss's own graph, which is freed by the last one.
    """
    if not all(leaf.requires_grad for leaf in leaves):
        raise RequestError("cut.value: must require grad, as it is made; it was frozen. Set requires_grad_() again.")
    wanted = [*leaves, *(target.given for target in targets)]
    distinct, repeats = distinct_losses(losses_of(losses))
    scalars = scalars_of(distinct)
    found: list[T] = []
    for number, scalar in enumerate(scalars):
        keep = retain_graph or number + 1 < len(scalars)
        with freed_graphs_named():
            got = traversals.plain(scalar, wanted, retain_graph=keep)
        values = [None if one is None else dense(one) for one in got[: len(leaves)]]
        if all(one is None for one in values):
            raise RequestError(
                f"losses: must be computed from cut.value; loss {number} does not depend on it. Use cut.value, or a "
                "slice of it, in place of the model's output."
            )
        found.append(taken(Cotangents(values, got[len(leaves) :])))
    return found if repeats is None else [found[place] for place in repeats]


def root_of(outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> Tensor | None:
    """A scalar on the outputs' graphs whose gradient at each output is its cotangent, bit for bit.

    None where no output that a loss uses has a graph.
    (Passing cotangents to the engine would say the same, but its first use in a process imports sympy.)
    """
    with torch.enable_grad():
        parts = [
            (output * cotangent.to(output.device).conj()).real.sum()
            if output.is_complex()
            else (output * cotangent.to(output.device)).sum()
            for output, cotangent in zip(outputs, cotangents, strict=True)
            if cotangent is not None and output.requires_grad
        ]
        return reduce(add, [part.to(parts[0].device, parts[0].dtype) for part in parts]) if parts else None


def gradients_of(
    roots: Sequence[Tensor | None], targets: Sequence[Target], *, retain_graph: bool
) -> list[list[Tensor | None]]:
    """By root, the gradient of each target; None where nothing can arrive."""
    found: list[list[Tensor | None]] = [[None] * len(targets) for _ in roots]
    there = [(row, root) for row, root in zip(found, roots, strict=True) if root is not None]
    nodes = set(graph.walk(graph.roots_of(root for _, root in there)))
    places = [place for place, target in enumerate(targets) if target.edge.node in nodes]
    if not places:
        return found
    wanted = [targets[place].given for place in places]
    if len(there) == 1:
        columns = [[one] for one in traversals.plain(there[0][1], wanted, retain_graph=retain_graph)]
    else:
        columns = jac([root for _, root in there], wanted, retain_graph=retain_graph)
    for place, column in zip(places, columns, strict=True):
        for (row, _), gradient in zip(there, column, strict=True):
            row[place] = gradient
    return found


def summed(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of what is there; None where nothing is."""
    there = [part for part in parts if part is not None]
    return reduce(add, there) if there else None


def filled(targets: Sequence[Target], answers: Sequence[Tensor | None]) -> list[Tensor]:
    """Zeros where nothing arrives."""
    return [target.zeros() if one is None else one for target, one in zip(targets, answers, strict=True)]


STAND_INS: Any = WeakTensorKeyDictionary()  # every cut's, as long as they live


def refuse_unreached(answers: Sequence[Sequence[Tensor | None]]) -> None:
    """RequestError where no loss reaches any of what was asked for, which is likely another model's."""
    if answers and all(one is None for answer in answers for one in answer):
        raise RequestError(
            "wrt: must hold a tensor that some loss depends on, by way of the cut or past it; none of it is. Name "
            "parameters of this model, not of a copy."
        )


def refuse_lost(
    losses: Losses,
    outputs: Sequence[Tensor],
    own: Sequence[Tensor],
    targets: Sequence[Target],
    answers: Sequence[Tensor | None],
) -> None:
    """RequestError where nothing arrives because what leads there was cut, or is made anew when rows are run again.

    `outputs` are what the stand-ins in `own` stand for, where their graph is at hand.
    """
    missing = [target for target, answer in zip(targets, answers, strict=True) if answer is None]
    if not missing:
        return
    mine = {id(leaf) for leaf in own}
    leaves = graph.leaves_of([*losses_of(losses), *outputs])
    if any(leaf in STAND_INS and id(leaf) not in mine for leaf in leaves):
        raise RequestError(
            f"{missing[0].name}: must not lie behind another cut, whose value the loss depends on as well; nothing "
            "arrives there. Call backward() on the losses and then on each cut, or ask that cut."
        )
    inner = [target for target in missing if not (isinstance(target.given, Tensor) and target.given.is_leaf)]
    if inner:
        raise RequestError(
            f"{inner[0].name}: must be a leaf, or part of the loss's or the data's own graph; nothing arrives there, "
            "since rows that are run again make tensors anew. Name parameters or data."
        )
