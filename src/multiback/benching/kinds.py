"""The ways to one kind of answer, each from the data on: one forward, then the answer for the parameters.

A way is a preparation, which is not timed and gives the call that is; a library that must see the
forward pass could not be given a finished graph, so every way runs its own.
"""

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from multiback.api import gradients, products, samples
from multiback.benching import functional, peers
from multiback.benching.bound import Bound
from multiback.benching.names import KINDS
from multiback.benching.targets import first_line
from multiback.errors import MultibackError, ProblemError
from multiback.nested import dense
from multiback.records import Grads

Calls = Generator[Callable[[], object], None, None]
Run = Callable[[Bound, Grads], Calls]
_T = TypeVar("_T")
_Prepare = Callable[[Bound], Callable[[], _T]]
_Stacked = Callable[[Bound], Callable[[], Sequence[Tensor]]]


def check(bound: Bound, questions: Iterable[str], target: str) -> None:
    """ProblemError where the problem has not what a kind among `questions` is about."""
    for kind in [question for question in questions if question in KINDS]:
        if not bound.parameters:
            raise ProblemError(
                f"--kind {kind}: the target must have trainable parameters to differentiate; {target} has none. "
                "Set requires_grad_() on them, or leave --kind out."
            )
        if kind == "rows" and not bound.has_row_losses:
            raise ProblemError(
                f"--kind rows: the target must have one loss per row, by one function; {target} has "
                f"K = {bound.num_losses} losses and B = {bound.num_rows} rows. "
                'Give a loss with reduction="none", or use --kind each.'
            )


def name_of_part(kind: str, bound: Bound, position: int) -> str:
    """Which part of an answer stands at that position of its list."""
    if kind in ("gram", "norms"):
        return f"loss {position + 1}"
    names = bound.parameter_names
    return f"loss {position // len(names) + 1}, {names[position % len(names)]}"


# ---- the answers' common form: a list of tensors, one loss after the other --------------------------


def _parts_of_stacked(bound: Bound, found: Sequence[Tensor]) -> list[Tensor]:
    """Loss by loss, so that a small loss is not hidden by a large one when answers are compared."""
    count = bound.num_losses
    expected = [(count, *parameter.shape) for parameter in bound.parameters]
    shapes = [tuple(tensor.shape) for tensor in found]
    if shapes != expected:
        differing = next(
            (pair for pair in zip(shapes, expected, strict=False) if pair[0] != pair[1]), (shapes, expected)
        )
        raise ProblemError(f"its answer has shape {differing[0]} where {differing[1]} was expected")
    return [tensor[loss] for loss in range(count) for tensor in found]


def _parts_of_loop(_bound: Bound, found: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [gradient for row in found for gradient in row]


def _parts_of_tensor(_bound: Bound, found: Tensor) -> list[Tensor]:
    """Rows of a Gramian, or single norms."""
    return list(found)


# ---- the ways to all gradients ----------------------------------------------------------------------


def _loop(bound: Bound) -> Callable[[], list[tuple[Tensor, ...]]]:
    return lambda: list(_one_by_one(bound))


def _one_by_one(bound: Bound) -> Iterator[tuple[Tensor, ...]]:
    losses = bound.losses(bound.forward())
    for number, loss in enumerate(losses, 1):
        yield torch.autograd.grad(
            loss, bound.parameters, retain_graph=number < len(losses), allow_unused=True, materialize_grads=True
        )


def _batched(bound: Bound) -> Callable[[], list[Tensor]]:
    def call() -> list[Tensor]:
        losses = bound.vector(bound.forward())
        unit = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
        found = torch.autograd.grad(losses, bound.parameters, unit, is_grads_batched=True, allow_unused=True)
        return [
            parameter.new_zeros(len(losses), *parameter.shape) if one is None else one
            for one, parameter in zip(found, bound.parameters, strict=True)
        ]

    return call


def _jac(bound: Bound) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: gradients.jac(bound.loss_tensors(bound.forward()), bound.parameters)


def _rows(bound: Bound) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: samples.rows(bound.loss_tensors(bound.forward()), bound.parameters)


# ---- the ways to products and norms -----------------------------------------------------------------


def _gram_of(stacked: Sequence[Tensor]) -> Tensor:
    """The Gramian layer by layer, so that the gradients are never copied into one matrix."""
    flat = [dense(tensor).reshape(len(tensor), -1) for tensor in stacked]
    return torch.stack([one @ one.T for one in flat]).sum(0)


def _loop_gram(bound: Bound) -> Callable[[], Tensor]:
    def call() -> Tensor:
        columns = zip(*_one_by_one(bound), strict=True)
        return _gram_of([torch.stack([dense(one) for one in column]) for column in columns])

    return call


def _loop_norms(bound: Bound) -> Callable[[], Tensor]:
    return lambda: torch.stack([
        torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(dense(one)) for one in row]))
        for row in _one_by_one(bound)
    ])  # fmt: skip


def _norms_of(stacked: Sequence[Tensor]) -> Tensor:
    each = [torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1) for tensor in stacked]
    return torch.linalg.vector_norm(torch.stack(each), dim=0)


def _then(prepare: _Stacked, finish: Callable[[Sequence[Tensor]], Tensor]) -> _Prepare[Tensor]:
    """What follows from all gradients, in the same timed call."""

    def prepared(bound: Bound) -> Callable[[], Tensor]:
        step = prepare(bound)
        return lambda: finish(step())

    return prepared


def _gram(bound: Bound) -> Callable[[], Tensor]:
    return lambda: products.gram(bound.loss_tensors(bound.forward()), bound.parameters)


def _norms(bound: Bound) -> Callable[[], Tensor]:
    return lambda: products.norms(bound.loss_tensors(bound.forward()), bound.parameters)


def _engine_norms(bound: Bound) -> Callable[[], Tensor]:
    step = peers.torchjd_gramian(bound)
    return lambda: step().diagonal().sqrt()


# ---- all of them ------------------------------------------------------------------------------------


def _way(prepare: _Prepare[_T], parts: Callable[[Bound, _T], list[Tensor]]) -> Run:
    """One timed call: its answer is kept as it comes, and brought into the common form only to be compared."""

    def calls(bound: Bound, _grads: Grads) -> Calls:
        # some warn of their own slowness, or of coupled rows, where the comparison tells more
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _reasons():
                step = prepare(bound)

            def call() -> None:
                with _reasons():
                    found = step()
                    bound.returned = lambda: parts(bound, found)

            try:
                yield call
            finally:
                peers.release(bound)

    return calls


@contextmanager
def _reasons() -> Generator[None, None, None]:
    """Whatever a library raises becomes the reason why its way is left out."""
    try:
        yield
    except MultibackError:
        raise
    except Exception as error:
        raise ProblemError(f"{type(error).__name__}: {first_line(error)}") from error


def _stacked(**prepares: _Stacked) -> dict[str, Run]:
    return {name: _way(prepare, _parts_of_stacked) for name, prepare in prepares.items()}


_GRADIENTS: dict[str, _Stacked] = {"batched": _batched, "torch.func": functional.gradients}


def _derived(
    loop: _Prepare[Tensor],
    finish: Callable[[Sequence[Tensor]], Tensor],
    **others: _Prepare[Tensor],
) -> dict[str, Run]:
    """The ways to what follows from the gradients."""
    prepares = {"loop": loop, **{name: _then(prepare, finish) for name, prepare in _GRADIENTS.items()}, **others}
    return {name: _way(prepare, _parts_of_tensor) for name, prepare in prepares.items()}


_LOOP = {"loop": _way(_loop, _parts_of_loop)}
RUNS: dict[str, dict[str, Run]] = {
    "each": _LOOP | _stacked(**_GRADIENTS, multiback=_jac, TorchJD=peers.torchjd_jacobian),
    "rows": _LOOP
    | _stacked(
        **_GRADIENTS,
        multiback=_rows,
        TorchJD=peers.torchjd_jacobian,
        Opacus=peers.opacus_rows,
        BackPACK=peers.backpack_rows,
    ),
    "gram": _derived(_loop_gram, _gram_of, multiback=_gram, TorchJD=peers.torchjd_gramian),
    "norms": _derived(_loop_norms, _norms_of, multiback=_norms, TorchJD=_engine_norms),
}
