"""What users call for inner products and norms of gradients: gram, norms."""

import torch
from torch import Tensor

from multiback.api.answering import Options, Prepared, columns, prepare
from multiback.arguments import Losses, Wrt
from multiback.independence import Mode
from multiback.methods.columns import Columns
from multiback.planner import Plan
from multiback.request import request


def gram(
    losses: Losses,
    wrt: Wrt,
    *,
    independence: Mode = "certify",
    budget: int | str | None = None,
    retain_graph: bool = False,
    method: str | Plan = "auto",
) -> Tensor:
    """The inner products [K, K] of K losses' gradients, over all of `wrt` together.

    Parameters
    ----------
    losses, wrt, budget, retain_graph, method : as for `jac`.
    independence : as for `rows`; where losses own separate rows, one traversal answers all of them.

    Raises
    ------
    RequestError : an argument breaks its rule, or nothing fits the budget.
    FreedGraphError : the graph has been freed before.

    Notes
    -----
    Traversals as for `jac`. Layer by layer, so that the K gradients are never held together: for a
    linear layer the products of what reached it and of its inputs are multiplied instead
    ((g g^T) * (a a^T), Rochette et al. 2019, arXiv:1912.06015).

    Examples
    --------
    >>> import torch, multiback as mb
    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> mb.gram([weight.sum(), (weight ** 2).sum()], weight)
    tensor([[ 2.,  6.],
            [ 6., 20.]])
    """
    asked = request(losses, wrt, retain_graph=retain_graph)
    prepared = prepare(asked, "gram", Options(independence, budget=budget, method=method))
    found = _gram(prepared)
    if asked.repeats is not None:
        places = list(asked.repeats)
        found = found[places][:, places]
    return found


def _gram(prepared: Prepared) -> Tensor:
    pieces: list[Columns] = []
    for found in columns(prepared):
        if len(found) == prepared.work.request.count:
            return found.gram()
        pieces.append(found)
    targets = prepared.work.request.targets
    together = Columns(0, prepared.work.request.count, targets, [
        None
        if all(piece.answers[number] is None for piece in pieces)
        else torch.cat([piece.gradients(number) for piece in pieces])
        for number in range(len(targets))
    ])  # fmt: skip
    return together.gram()


def norms(
    losses: Losses,
    wrt: Wrt,
    *,
    independence: Mode = "certify",
    budget: int | str | None = None,
    retain_graph: bool = False,
    method: str | Plan = "auto",
) -> Tensor:
    """The L2 norms [K] of K losses' gradients, over all of `wrt` together.

    Parameters
    ----------
    losses, wrt, independence, budget, retain_graph, method : as for `gram`.

    Raises
    ------
    RequestError : an argument breaks its rule, or nothing fits the budget.
    FreedGraphError : the graph has been freed before.

    Notes
    -----
    Traversals as for `jac`; at most about one gradient is held at a time. With a gradient scaler,
    divide by its scale: norms are homogeneous.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> mb.norms([weight.sum(), (weight ** 2).sum() / 2], weight)
    tensor([1.4142, 5.0000])
    """
    asked = request(losses, wrt, retain_graph=retain_graph)
    prepared = prepare(asked, "norms", Options(independence, budget=budget, method=method))
    found = torch.cat(list(map(Columns.squares, columns(prepared)))).sqrt()
    return found if asked.repeats is None else found[list(asked.repeats)]
