"""Every way gives the gradients of K separate calls to autograd.grad, or its stated multiple."""

import pytest
import torch
from torch import nn

from multiback.benching.bound import Bound
from multiback.benching.names import WAYS
from multiback.benching.problems import Problem, build_preset, tutorial_net
from multiback.benching.questions import GROWTH_STEPS
from multiback.benching.ways import way_of, ways_of
from multiback.measure.agreement import difference_between

POLICIES = ("none", "accumulate", "prealloc")
PROBLEMS = {
    "two losses": lambda: Problem(
        nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)),
        torch.rand(3, 5).requires_grad_(),
        [lambda o, d: (o * d).sum(), lambda o, _: o.square().mean()],
    ),
    "one loss per row": lambda: Problem(
        tutorial_net(), torch.rand(4, 3, 32, 32).requires_grad_(), nn.CrossEntropyLoss(reduction="none"),
        targets=torch.randint(10, (4,)),
    ),
    "one function, several losses": lambda: Problem(
        nn.Linear(5, 5), torch.rand(3, 5), lambda o, d: (o.sum(), (o * d).sum(), o.exp().mean())
    ),
    "heads": lambda: build_preset("heads", batch=2, num_losses=3),
    "transformer": lambda: build_preset("transformer", batch=2, num_losses=3),
}  # fmt: skip


def reference(bound, weights=None):
    """K calls of autograd.grad on one forward, added up."""
    bound.begin("none")
    losses, wrt = bound.losses(bound.forward()), bound.wrt
    total = [torch.zeros_like(tensor) for tensor in wrt]
    for index, loss in enumerate(losses):
        found = torch.autograd.grad(loss, wrt, retain_graph=True, allow_unused=True, materialize_grads=True)
        weight = 1.0 if weights is None else weights[index]
        total = [sum_ + weight * part for sum_, part in zip(total, found, strict=True)]
    bound.end()
    return total


def run(bound, way, grads):
    """The gradients after each call of a way."""
    bound.begin(grads)
    bound.zero_grads()
    calls = way.calls(bound, grads)
    found = []
    for _ in range(way.num_calls):
        next(calls)()
        found.append([gradient.clone() for gradient in bound.gradients()])
    calls.close()
    bound.end()
    return found


WHOLE = [
    (question, name, problem)
    for question in ("combine", "slices", "retain")
    for name in WAYS[question]
    for problem in PROBLEMS
    if question != "slices" or problem == "one loss per row"
]


@pytest.mark.parametrize("grads", POLICIES)
@pytest.mark.parametrize(("question", "name", "problem"), WHOLE)
def test_every_whole_way_gives_the_sum_of_the_separate_gradients(question, name, problem, grads):
    torch.manual_seed(0)
    bound = Bound(PROBLEMS[problem]())
    expected = reference(bound)
    factor = 1 / bound.num_losses if name == "reduction=mean" else 1.0
    assert difference_between(run(bound, way_of(question, name), grads)[0], expected, factor) < 1e-5


@pytest.mark.parametrize("grads", POLICIES)
@pytest.mark.parametrize("name", WAYS["successive"])
def test_every_successive_call_gives_its_multiple_of_the_first_loss_gradient(name, grads):
    torch.manual_seed(0)
    bound = Bound(PROBLEMS["two losses"]())
    expected = reference(bound, weights=[1.0, 0.0])
    way = way_of("successive", name)
    for index, found in enumerate(run(bound, way, grads), 1):
        assert difference_between(found, expected, way.multiple(grads, index)) < 1e-5


@pytest.mark.parametrize("name", WAYS["growth"])
def test_growth_ways_take_a_fixed_number_of_steps(name):
    torch.manual_seed(0)
    bound = Bound(build_preset("recurrent", batch=2, num_losses=None))
    assert len(run(bound, way_of("growth", name), "none")) == GROWTH_STEPS


def test_every_listed_way_is_built():
    for question in WAYS:
        if question != "cold":
            assert [way.name for way in ways_of(question)] == list(WAYS[question])
