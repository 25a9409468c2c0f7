"""Holds gradients of rows run by themselves against those of their batch, where no graph can tell."""

import torch
from torch import Tensor

from multiback import graph, traversals
from multiback.cuts.batches import Batch, Inferred, Kept, leaves_like
from multiback.cuts.cotangents import root_of
from multiback.cuts.sources import taken
from multiback.measure.agreement import tolerance_of
from multiback.nested import map_tensors, tensors_in
from multiback.states import Randomness

_MOST_ROWS = 16
_LEEWAY = 10  # rounding in batches of other sizes, through all layers


def confirm(found: Inferred, batch: Batch, kept: Kept) -> None:
    """Try on the first batch what the walk of its graph proved; what does not hold becomes `coupling`.

    For random cotangents on some rows, these rows' data must get the same gradient when all other
    rows have cotangents as well, and the data and the parameters the same when the rows are run by
    themselves; and so for other rows. This finds statistics of the batch that are detached, and hooks
    that mix rows. Three traversals of the batch; two forwards and traversals of some of its rows.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    everywhere = [_random(output, generator) for output in kept.outputs]
    given = {id(tensor) for tensor in tensors_in(kept.inputs)}
    data = [tensor for tensor in tensors_in(kept.inputs) if tensor.requires_grad]
    parameters = [leaf for leaf in graph.leaves_of(kept.outputs) if id(leaf) not in given]
    of_all = _gradients(kept.outputs, everywhere, data)
    step = max(2, -(-len(batch.rows) // _MOST_ROWS))
    for first in (0, 1):  # where one row makes a statistic, one of the two is without it
        rows = torch.arange(first, len(batch.rows), step, device="cpu")
        some = [_only(cotangent, rows) for cotangent in everywhere]
        mine = _gradients(kept.outputs, some, [*data, *parameters])
        found.coupling = found.coupling or _met(mine[: len(data)], of_all, rows)
        own = [*(one[rows.to(one.device)] for one in mine[: len(data)]), *mine[len(data) :]]
        reason = found.coupling or found.together
        found.together = reason or _differing(found, batch, kept, everywhere, rows, own, parameters)


def _met(mine: list[Tensor], of_all: list[Tensor], rows: Tensor) -> str:
    """Where rows meet in the batch's own traversals, by the data's gradients; empty if they do not."""
    own = [(one[rows.to(one.device)], theirs[rows.to(one.device)]) for one, theirs in zip(mine, of_all, strict=True)]
    if any(bool(one.index_fill(0, rows.to(one.device), 0).any()) for one in mine) or not _agree(own):
        return "a hook, or what else no graph shows: rows have other gradients when others have some too"
    return ""


def _differing(
    found: Inferred,
    batch: Batch,
    kept: Kept,
    everywhere: list[Tensor],
    rows: Tensor,
    own: list[Tensor],
    parameters: list[Tensor],
) -> str:
    """Why rows cannot be run by themselves; empty if they were seen to have their `own` gradients then."""
    if batch.random is not None:
        return "random numbers that were drawn for the whole batch"
    with found.model.again(None, batch.replayed) as call:
        undrawn = Randomness.read()
        part = leaves_like(map_tensors(kept.inputs, lambda tensor: taken(tensor.detach(), rows.tolist())))
        try:
            outputs = found.differentiable(call(part))
        except Exception as error:
            return f"a batch of {len(rows)} rows, which raised {type(error).__name__}"
        if [output.shape[0] for output in outputs] != [len(rows)] * len(outputs):
            return f"a batch of {len(rows)} rows, which gives other numbers of rows"
        leaves = [tensor for tensor in tensors_in(part) if tensor.requires_grad]
        cotangents = [cotangent[rows.to(cotangent.device)] for cotangent in everywhere]
        alone = _gradients(outputs, cotangents, [*leaves, *parameters])
        if not undrawn.same_as(Randomness.read()):
            return "random numbers that rows by themselves draw"
    if _agree(list(zip(alone, own, strict=True))):
        return ""
    return "a statistic of the batch that no graph shows: rows by themselves have other gradients"


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    dtype = like.dtype if like.dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
    return torch.randn(like.shape, generator=generator, dtype=dtype, device="cpu").to(like.device, like.dtype)


def _only(tensor: Tensor, rows: Tensor) -> Tensor:
    """The tensor with zeros in all other rows."""
    index = rows.to(tensor.device)
    return torch.zeros_like(tensor).index_copy_(0, index, tensor[index])


def _gradients(outputs: list[Tensor], cotangents: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    root = root_of(outputs, cotangents)
    gradients = [None] * len(wanted) if root is None else traversals.plain(root, wanted, retain_graph=True)
    return [
        torch.zeros_like(one) if gradient is None else gradient.to_dense()
        for one, gradient in zip(wanted, gradients, strict=True)
    ]


def _agree(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Within rounding of the second tensor's norm, or of a hundredth of the largest one's."""
    largest = max((_norm(theirs) for _, theirs in pairs), default=0.0)
    return all(
        _norm(mine - theirs) <= _LEEWAY * tolerance_of(theirs) * max(_norm(theirs), largest / 100)
        for mine, theirs in pairs
    )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor if tensor.is_complex() else tensor.double()))
