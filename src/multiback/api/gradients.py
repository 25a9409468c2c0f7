"""What users call for gradients that are returned: grad, jac, each, rows, gram, norms."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from typing_extensions import TypedDict, Unpack

from multiback.api.answering import Options, Prepared, columns, freed_graphs_named, prepare, warn_of_coupling
from multiback.errors import RequestError
from multiback.independence import Mode
from multiback.methods import check_method, summed
from multiback.methods.columns import Columns, Spread
from multiback.planner import Plan
from multiback.request import Differentiable, Dim0, Losses, Request, Target, Weights, Wrt, request, weights_of

Bare = Tensor | GradientEdge
Named = nn.Module | Mapping[str, Differentiable]


class GradOptions(TypedDict, total=False, closed=True):
    """Keywords of `grad`."""

    weights: Weights | None
    create_graph: bool
    retain_graph: bool
    method: str


class JacOptions(TypedDict, total=False, closed=True):
    """Keywords of `jac`."""

    chunk: int | None
    budget: int | str | None
    create_graph: bool
    retain_graph: bool
    method: str | Plan


class EachOptions(TypedDict, total=False, closed=True):
    """Keywords of `each`."""

    reuse: bool
    chunk: int | None
    budget: int | str | None
    retain_graph: bool
    method: str | Plan


class RowsOptions(TypedDict, total=False, closed=True):
    """Keywords of `rows`."""

    independence: Mode
    dim0: Dim0 | None
    budget: int | str | None
    retain_graph: bool
    method: str | Plan


@overload
def grad(losses: Losses, wrt: Bare, **options: Unpack[GradOptions]) -> Tensor: ...
@overload
def grad(losses: Losses, wrt: Named, **options: Unpack[GradOptions]) -> dict[str, Tensor]: ...
@overload
def grad(losses: Losses, wrt: Iterable[Differentiable], **options: Unpack[GradOptions]) -> tuple[Tensor, ...]: ...
def grad(
    losses: Losses,
    wrt: Wrt,
    *,
    weights: Weights | None = None,
    create_graph: bool = False,
    retain_graph: bool = False,
    method: str = "auto",
) -> Any:
    """The gradient of the weighted sum of K losses, returned; `.grad` is not touched.

    Parameters
    ----------
    losses : a tensor of any shape, or a sequence of tensors, flattened in order to K real scalars.
        A tensor of N elements is N losses, where `Tensor.backward` would raise.
    wrt : a module (its trainable parameters, by name), a mapping, an iterable, a tensor, leaf or
        not, or a `GradientEdge`. The answer has its structure: dict, tuple, or bare.
    weights : K finite numbers, by default ones.
    create_graph : make the answer differentiable itself.
    retain_graph : keep the graph for further requests; otherwise all of it is freed.
    method : `auto` or `summed`.

    Raises
    ------
    RequestError : an argument breaks its rule; nothing has been changed.
    FreedGraphError : the graph has been freed before.

    Notes
    -----
    One traversal; bytes as `torch.autograd.grad`. What no loss reaches is answered by zeros.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> mb.grad([weight.sum(), (weight ** 2).sum()], weight, weights=[1.0, 0.5])
    tensor([2., 3.])
    """
    check_method(method, ("summed",))
    asked = request(losses, wrt, retain_graph=retain_graph, create_graph=create_graph)
    factors = None if weights is None else weights_of(weights, losses)
    prepared = prepare(asked, "each", Options(independence="off", method="loop"))
    with freed_graphs_named():
        found = summed.gradient(prepared.work.survey, factors)
    prepared.work.ready(asked.count)
    answers = [target.zeros() if one is None else one for target, one in zip(asked.targets, found, strict=True)]
    return asked.mirrored(answers)


@overload
def jac(losses: Losses, wrt: Bare, **options: Unpack[JacOptions]) -> Tensor: ...
@overload
def jac(losses: Losses, wrt: Named, **options: Unpack[JacOptions]) -> dict[str, Tensor]: ...
@overload
def jac(losses: Losses, wrt: Iterable[Differentiable], **options: Unpack[JacOptions]) -> tuple[Tensor, ...]: ...
def jac(
    losses: Losses,
    wrt: Wrt,
    *,
    chunk: int | None = None,
    budget: int | str | None = None,
    create_graph: bool = False,
    retain_graph: bool = False,
    method: str | Plan = "auto",
) -> Any:
    """The gradients of K losses, each its own: [K, *shape] for every tensor of `wrt`.

    Parameters
    ----------
    losses, wrt, create_graph, retain_graph : as for `grad`.
    chunk : losses that are differentiated at a time, by default as many as memory allows in comfort.
    budget : bytes, or a text such as "2GiB", that the call may allocate above what is live at entry,
        the answer included. Met by smaller chunks, or refused with the smallest that would do.
    method : `auto`, `partition`, `contract`, `contract-batched`, `batched`, `loop`, or a `Plan`.

    Raises
    ------
    RequestError : an argument breaks its rule, or nothing fits the budget; the graph is as before.
    FreedGraphError : the graph has been freed before.

    Notes
    -----
    Losses on separate rows of a batch take one traversal, two or three where traversals must prove it;
    others one each, batched where torch can. The answer alone is K times the bytes of `wrt`.
    The result is what TorchJD's aggregators take, once flattened to [K, P].

    Examples
    --------
    >>> import torch, multiback as mb
    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> mb.jac([weight.sum(), (weight ** 2).sum()], weight)
    tensor([[1., 1.],
            [2., 4.]])
    """
    asked = request(losses, wrt, retain_graph=retain_graph, create_graph=create_graph)
    prepared = prepare(asked, "each", Options(chunk=chunk, budget=budget, method=method))
    found = _filled(prepared, [_whole(target) for target in asked.targets])
    return asked.mirrored([_repeated(asked, one) for one in found])


def _whole(target: Target) -> "_Slot":
    return _Slot(target)


class _Slot:
    """One target's answer [K, *shape], filled chunk by chunk; a single chunk is taken as it is."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._parts: Tensor | None = None

    def put(self, found: Columns, number: int, count: int) -> None:
        """Take the gradients of a chunk of losses."""
        rows = found.gradients(number)
        if len(found) == count:
            self._parts = rows
            return
        if self._parts is None:
            self._parts = rows.new_empty((count, *self._target.shape))
        if rows.requires_grad:  # a graph of its own: nothing may be written in place
            raise AssertionError("answers with a graph are stacked")
        self._parts[found.start : found.stop] = rows

    def answer(self, count: int) -> Tensor:
        """[K, *shape]."""
        return self._target.zeros(count) if self._parts is None else self._parts


def _filled(prepared: Prepared, slots: list[_Slot]) -> list[Tensor]:
    """All chunks put in place."""
    count, reached = prepared.work.request.count, prepared.work.survey.reached
    if prepared.work.request.create_graph:
        return _stacked(prepared)
    for found in columns(prepared):
        for number in reached:
            slots[number].put(found, number, count)
        del found  # before the next chunk is made
    return [slot.answer(count) for slot in slots]


def _stacked(prepared: Prepared) -> list[Tensor]:
    pieces = list(columns(prepared))
    targets = prepared.work.request.targets
    return [torch.cat([piece.gradients(number) for piece in pieces]) for number in range(len(targets))]


def _repeated(asked: Request, answer: Tensor) -> Tensor:
    """One row per loss that the caller gave."""
    return answer if asked.repeats is None else answer[list(asked.repeats)]


@overload
def each(losses: Losses, wrt: Bare, **options: Unpack[EachOptions]) -> Iterator[Tensor]: ...
@overload
def each(losses: Losses, wrt: Named, **options: Unpack[EachOptions]) -> Iterator[dict[str, Tensor]]: ...
@overload
def each(
    losses: Losses, wrt: Iterable[Differentiable], **options: Unpack[EachOptions]
) -> Iterator[tuple[Tensor, ...]]: ...
def each(
    losses: Losses,
    wrt: Wrt,
    *,
    reuse: bool = False,
    chunk: int | None = None,
    budget: int | str | None = None,
    retain_graph: bool = False,
    method: str | Plan = "auto",
) -> Any:
    """The gradients of K losses one after the other, so that only one need be held.

    Parameters
    ----------
    losses, wrt, chunk, budget, retain_graph, method : as for `jac`.
    reuse : give every gradient in the same tensors: valid until the next one is asked for.

    Raises
    ------
    RequestError : an argument breaks its rule, or nothing fits the budget; at the call, not at the first gradient.
    FreedGraphError : the graph has been freed before.

    Notes
    -----
    Traversals as for `jac`. Holds about twice the bytes of `wrt` where the consumer drops each
    gradient for the next, once with `reuse`. A generator that is abandoned frees the graph too.

    Examples
    --------
    >>> import torch, multiback as mb
    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> [gradient.tolist() for gradient in mb.each([weight.sum(), (weight ** 2).sum()], weight)]
    [[1.0, 1.0], [2.0, 4.0]]
    """
    asked = request(losses, wrt, retain_graph=retain_graph)
    options = Options(chunk=chunk, budget=budget, method=method, returned=False, reuse=reuse)
    return _each(prepare(asked, "each", options), reuse=reuse)


def _each(prepared: Prepared, *, reuse: bool) -> Iterator[Any]:
    asked = prepared.work.request
    kept = [target.zeros() for target in asked.targets] if reuse else None
    if asked.repeats is not None:
        yield from _each_repeated(prepared, kept)
        return
    for found in columns(prepared):
        for loss in range(found.start, found.stop):
            yield asked.mirrored(_given(found, loss, kept))
        del found  # before the next chunk is made


def _given(found: Columns, loss: int, kept: list[Tensor] | None) -> list[Tensor]:
    if kept is None:
        return [one.clone() if one._base is not None and len(found) > 1 else one for one in found.one(loss)]
    found.write(loss, kept)
    return kept


def _each_repeated(prepared: Prepared, kept: list[Tensor] | None) -> Iterator[Any]:
    """Repeated losses are held until their last turn has come."""
    asked = prepared.work.request
    order = asked.repeats or ()
    held: dict[int, list[Tensor]] = {}
    turn = 0
    for found in columns(prepared):
        for loss in range(found.start, found.stop):
            held[loss] = found.one(loss)
        while turn < len(order) and order[turn] in held:
            answer = [one.clone() for one in held[order[turn]]]
            if kept is not None:
                for own, one in zip(kept, answer, strict=True):
                    own.copy_(one)
            if order[turn] not in order[turn + 1 :]:
                del held[order[turn]]
            turn += 1
            yield asked.mirrored(answer if kept is None else kept)


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
        its operations are known to keep rows apart, else by an extra traversal or two; `assume`
        believes it of operations that the walk does not know; `off` uses no method that needs it.
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
    One traversal where proven or assumed; two (three for more than 130 losses; one more where a loss
    owns nothing at a layer) where certified by signed powers of two, bit for bit; K where rows are
    coupled. Tensor hooks see the sum's gradients; one that mixes rows cannot be seen from Python
    where the walk proves independence: use "off" with those. The answer is K times the parameters' bytes.

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
    answers: list[Any] = [_Slot(target) if not target.rows else target.zeros() for target in asked.targets]
    for found in columns(prepared):
        for number in prepared.work.survey.reached:
            if not asked.targets[number].rows:
                answers[number].put(found, number, count)
            else:
                _put_rows(answers[number], found, number, owners.get(number))
        del found  # before the next chunk is made
    return asked.mirrored([_repeated(asked, one.answer(count)) if isinstance(one, _Slot) else one for one in answers])


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


def _put_rows(answer: Tensor, found: Columns, number: int, owner: Tensor | None) -> None:
    given = found.answers[number]
    if isinstance(given, Spread):
        owned = given.owners.index(answer.device) >= 0
        answer[owned] = given.gradient[owned]
        return
    if given is None or owner is None:
        return
    mine = ((owner >= found.start) & (owner < found.stop)).nonzero().flatten()
    answer[mine] = found.gradients(number)[owner[mine] - found.start, mine]


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
