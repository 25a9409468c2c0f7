"""What users call for whole gradients that are returned: grad, jac, each."""

from collections.abc import Generator, Iterable, Iterator
from typing import Any, overload

from torch import Tensor
from typing_extensions import TypedDict, Unpack

from multiback import graph, traversals
from multiback.api.answering import Options, Prepared, columns, freed_graphs_named, looked_at, prepare
from multiback.api.filling import Slot, filled, repeated
from multiback.arguments import Bare, Differentiable, Losses, Named, Weights, Wrt
from multiback.methods import check_method, summed
from multiback.methods.columns import Columns
from multiback.planner import Plan
from multiback.request import request, weights_of


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
    seen = looked_at(asked)
    with freed_graphs_named():
        found, kept = summed.gradient(seen, factors)
    if not (retain_graph or create_graph):
        if kept:
            traversals.release(seen)
        graph.mark_freed(asked.losses)
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
    Losses on separate rows of a batch take one traversal, and two to five where traversals must prove it;
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
    found = filled(prepared, [Slot(target) for target in asked.targets])
    return asked.mirrored([repeated(asked, one) for one in found])


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
    prepared = prepare(asked, "each", options)
    return _Gradients(prepared, _each(prepared, reuse=reuse))


class _Gradients(Iterator[Any]):
    """The gradients one by one; abandoned, even before the first, it gives up what it holds as if it had ended."""

    def __init__(self, prepared: Prepared, stream: Generator[Any, None, None]) -> None:
        self._prepared: Prepared | None = prepared
        self._stream = stream

    def __next__(self) -> Any:
        self._prepared = None  # from here on the stream sees to it
        return next(self._stream)

    def close(self) -> None:
        """End it now."""
        self._stream.close()
        if self._prepared is not None:
            work, self._prepared = self._prepared.work, None
            work.ready(work.request.count, kept=True)

    def __del__(self) -> None:
        self.close()


def _each(prepared: Prepared, *, reuse: bool) -> Generator[Any, None, None]:
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


def _each_repeated(prepared: Prepared, kept: list[Tensor] | None) -> Generator[Any, None, None]:
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
