"""The ways that a question compares, each written as a user would write it.

A way is a generator over the calls to be timed: what stands before a `yield` is preparation and
is not timed, what is yielded is. A way that is one whole function yields once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from multiback.api.accumulate import backward
from multiback.benching.bound import Bound
from multiback.benching.kinds import RUNS, Calls, Run
from multiback.benching.names import CARRIED_DETACHED, WAYS
from multiback.benching.questions import GROWTH_STEPS, SUCCESSIVE_CALLS
from multiback.cuts.making import cut
from multiback.records import Grads


@dataclass(frozen=True)
class Way:
    """One way to answer a question; `calls` yields `num_calls` calls to time.

    `adds_up`: each call finds in `.grad` what the earlier ones left there, where the policy lets it.
    """

    name: str
    calls: Run
    num_calls: int = 1
    adds_up: bool = False

    def multiple(self, grads: Grads, call_index: int) -> int:
        """How many times its gradient the answer holds after that call, by the policy asked for."""
        return call_index if self.adds_up and grads == "accumulate" else 1


def _whole(run: Callable[[Bound], object]) -> Run:
    """A way that is timed as one function."""

    def calls(bound: Bound, _grads: Grads) -> Calls:
        yield lambda: run(bound)

    return calls


def _func1(bound: Bound, *, retain_graph: bool = False) -> None:
    for index in range(bound.num_losses):
        bound.loss(index, bound.forward()).backward(retain_graph=retain_graph)


def _func2(bound: Bound, *, retain_graph: bool = False) -> None:
    total = bound.loss(0, bound.forward())
    for index in range(1, bound.num_losses):
        total = total + bound.loss(index, bound.forward())
    total.backward(retain_graph=retain_graph)


def _one_forward_retained(bound: Bound) -> None:
    losses = bound.losses(bound.forward())
    for index, loss in enumerate(losses, 1):
        loss.backward(retain_graph=index < len(losses))


def _one_forward_summed(bound: Bound) -> None:
    bound.total(bound.forward()).backward()


def _multiback(bound: Bound) -> None:
    backward(bound.loss_tensors(bound.forward()))


def _summed_in_the_loop(bound: Bound) -> None:
    output = bound.forward()
    total: Tensor | float = 0.0
    for loss in bound.losses(output):
        total = total + loss
    if isinstance(total, Tensor):
        total.backward()


def _mean(bound: Bound) -> None:
    torch.cat([tensor.reshape(-1) for tensor in bound.loss_tensors(bound.forward())]).mean().backward()


def _forward_per_slice(bound: Bound) -> None:
    for row in range(bound.num_rows):
        output = bound.forward(bound.row_of(bound.data, row))
        bound.row_loss(output, row).backward()


def _cut(bound: Bound) -> None:
    with cut(bound.forward()) as made:
        losses = bound.losses(made.value)
        for index, loss in enumerate(losses, 1):
            loss.backward(retain_graph=index < len(losses))


def _retain(bound: Bound, *, retain_graph: bool) -> Calls:
    total = bound.total(bound.forward())
    yield lambda: total.backward(retain_graph=retain_graph)


def _successive_backward(bound: Bound, grads: Grads) -> Calls:
    loss = bound.loss(0, bound.forward())
    # accumulating starts from None, as it does in a program: the first call makes .grad
    bound.reset_grads("none" if grads == "accumulate" else grads)
    for index in range(SUCCESSIVE_CALLS):
        if index and grads != "accumulate":
            bound.reset_grads(grads)
        yield lambda: loss.backward(retain_graph=True)


def _successive_grad(bound: Bound, _grads: Grads) -> Calls:
    loss, wrt = bound.loss(0, bound.forward()), bound.wrt

    def call() -> None:
        found = torch.autograd.grad(loss, wrt, retain_graph=True, allow_unused=True, materialize_grads=True)
        bound.returned = lambda: list(found)

    for _ in range(SUCCESSIVE_CALLS):
        bound.returned = None
        yield call


def _one_graph(bound: Bound, grads: Grads) -> Calls:
    total = bound.total(bound.forward())
    for _ in range(GROWTH_STEPS):
        bound.reset_grads(grads)
        yield lambda: total.backward(retain_graph=True)


def _forward_per_step(bound: Bound, grads: Grads, *, detach: bool = False) -> Calls:
    for _ in range(GROWTH_STEPS):
        bound.reset_grads(grads)
        yield lambda: bound.total(bound.forward()).backward(retain_graph=True)
        if detach:
            bound.detach_carried()


_ALL: dict[str, tuple[Way, ...]] = {
    "successive": (
        Way("backward", _successive_backward, SUCCESSIVE_CALLS, adds_up=True),
        Way("autograd.grad", _successive_grad, SUCCESSIVE_CALLS),
    ),
    "retain": (
        Way("retain_graph=False", lambda bound, _: _retain(bound, retain_graph=False)),
        Way("retain_graph=True", lambda bound, _: _retain(bound, retain_graph=True)),
    ),
    "combine": (
        Way("func1", _whole(_func1)),
        Way("func2", _whole(_func2)),
        Way("func3", _whole(lambda bound: _func1(bound, retain_graph=True))),
        Way("func4", _whole(lambda bound: _func2(bound, retain_graph=True))),
        Way("one-forward retained", _whole(_one_forward_retained)),
        Way("one-forward summed", _whole(_one_forward_summed)),
        Way("multiback", _whole(_multiback)),
    ),
    "slices": (
        Way("retained loop", _whole(_one_forward_retained)),
        Way("loss summed in the loop", _whole(_summed_in_the_loop)),
        Way("reduction=sum", _whole(_one_forward_summed)),
        Way("reduction=mean", _whole(_mean)),
        Way("forward per slice", _whole(_forward_per_slice)),
        Way("multiback cut", _whole(_cut)),
        Way("multiback", _whole(_multiback)),
    ),
    "growth": (
        Way("one graph, retained", _one_graph, GROWTH_STEPS),
        Way("a forward per step", _forward_per_step, GROWTH_STEPS),
        Way(CARRIED_DETACHED, lambda b, grads: _forward_per_step(b, grads, detach=True), GROWTH_STEPS),
    ),
    **{kind: tuple(Way(name, run) for name, run in runs.items()) for kind, runs in RUNS.items()},
}


def way_of(question: str, name: str) -> Way:
    """The way of that name."""
    return next(way for way in _ALL[question] if way.name == name)


def ways_of(question: str) -> tuple[Way, ...]:
    """The ways of a question, in the order of its report."""
    return _ALL[question]


if any([way.name for way in ways] != list(WAYS[question]) for question, ways in _ALL.items()):
    raise AssertionError("every way that is listed must be built, under the same name and in the same order")
