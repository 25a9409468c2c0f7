"""What users call for the gradient of every row's own loss: rows."""

from collections.abc import Iterable
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from multiback.api.answering import Options, Prepared, columns, prepare, warn_of_coupling
from multiback.api.filling import Slot, repeated
from multiback.arguments import Bare, Differentiable, Dim0, Losses, Named, Wrt
from multiback.errors import RequestError
from multiback.independence import Mode
from multiback.methods.columns import Columns, Spread
from multiback.planner import Plan
from multiback.request import request


class RowsOptions(TypedDict, total=False, closed=True):
    """Keywords of `rows`."""

    independence: Mode
    dim0: Dim0 | None
    budget: int | str | None
    retain_graph: bool
    method: str | Plan


@overload
def rows(losses: Losses, wrt: Bare, **options: Unpack[RowsOptions]) -> Tensor: ...
@overload
def rows(losses: Losses, wrt: Named, **options: Unpack[RowsOptions]) -> dict[str, Tensor]: ...
@overload
def rows(losses: Losses, wrt: Iterable[Differentiable], **options: Unpack[RowsOptions]) -> tuple[Tensor, ...]: ...
def rows(
    losses: Losses,
    wrt: Wrt,
    *,
    independence: Mode = "certify",
    dim0: Dim0 | None = None,
    budget: int | str | None = None,
    retain_graph: bool = False,
    method: str | Plan = "auto",
) -> Any:
    """The gradient of every row's own loss: per-sample gradients, by one traversal where rows are independent.

    Parameters
    ----------
    losses, wrt, budget, retain_graph, method : as for `jac`; loss k is the loss of its own rows, one or many.
    independence : `certify` proves that no loss touches another's rows, by a walk of the graph where
        its operations are known to keep rows apart, else by extra traversals; `assume` believes it
        of operations that the walk does not know; `off` uses no method that needs it.
    dim0 : for tensors that could be either, by wrt's own keys: "rows" (a row of it per sample) or
        "shared" (used by all samples). By default parameters are shared and other tensors hold rows.

    Returns
    -------
    For a parameter [K, *shape]. For a tensor of rows its own shape: row n is the derivative of the
    loss that owns it with respect to row n, zero where no loss does.

    Raises
    ------
    RequestError : an argument breaks its rule, or K losses match neither the rows nor a partition of them.
    FreedGraphError : the graph has been freed before.

    Warns
    -----
    CoupledRowsWarning : a loss depends on other rows than its own, such as with batch norm in train
        mode. Parameters then get every loss's full gradient, and tensors of rows each row's own part.

    Notes
    -----
    One traversal where proven or assumed; three where certified by signed powers of two, bit for bit
    (two for two losses, five for more than 130); K where rows are coupled. Tensor hooks see the
    sum's gradients; one that mixes rows cannot be seen from Python where the walk proves
    independence: use "off" with those. The answer is K times the parameters' bytes.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> data = torch.tensor([[1.0], [2.0]], requires_grad=True)
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> _ = layer.weight.data.fill_(3.0)
    >>> mb.rows(layer(data).square().flatten(), {"weight": layer.weight, "data": data})
    {'weight': tensor([[[ 6.]],
    <BLANKLINE>
            [[24.]]]), 'data': tensor([[18.],
            [36.]])}
    """
    asked = request(losses, wrt, retain_graph=retain_graph, rows=True, dim0=dim0)
    prepared = prepare(asked, "rows", Options(independence, budget=budget, method=method))
    owners = _row_owners(prepared)
    count = asked.count
    answers: list[Any] = [None if target.rows else Slot(target) for target in asked.targets]
    for found in columns(prepared):
        for number in prepared.work.survey.reached:
            if not asked.targets[number].rows:
                answers[number].put(found, number, count)
            else:
                answers[number] = _with_rows(answers[number], found, number, owners.get(number))
        del found  # before the next chunk is made
    return asked.mirrored(
        [
            repeated(asked, one.answer(count)) if isinstance(one, Slot) else target.zeros() if one is None else one
            for target, one in zip(asked.targets, answers, strict=True)
        ]
    )


def _row_owners(prepared: Prepared) -> dict[int, Tensor]:
    """The owner of every row of row targets where several losses may meet: loss n owns row n.

    Warns where rows are coupled; refuses where no owner can be told.
    """
    asked, found = prepared.work.request, prepared.work.independence
    named = [number for number in prepared.work.survey.rows if asked.targets[number].rows]
    owners = {number: found.rows[number].index(torch.device("cpu")) for number in named if number in found.rows}
    unknown = [number for number in named if number not in owners]
    for number in unknown:
        target = asked.targets[number]
        if target.shape[0] != asked.asked:
            raise RequestError(
                f"{target.name}: must hold one row per loss, or losses must own separate rows of it; got "
                f"{asked.asked} losses and {target.shape[0]} rows, and no partition of them was found. "
                "Use mb.jac for every loss's whole gradient."
            )
        places = torch.arange(asked.asked)
        owners[number] = places if asked.repeats is None else torch.tensor(asked.repeats)
    if found.basis == "coupled":
        warn_of_coupling(found, [asked.targets[number].name for number in unknown])
    return owners


def _with_rows(answer: Tensor | None, found: Columns, number: int, owner: Tensor | None) -> Tensor | None:
    """The answer of a row target with the rows that a chunk of losses owns."""
    given = found.answers[number]
    if isinstance(given, Spread):
        return given.owned()
    if given is None or owner is None:
        return answer
    answer = found.targets[number].zeros() if answer is None else answer
    mine = ((owner >= found.start) & (owner < found.stop)).nonzero().flatten()
    answer[mine] = found.gradients(number)[owner[mine] - found.start, mine]
    return answer
