"""A bound problem runs again and again from the same state, and refuses what breaks a rule."""

import collections
import random

import numpy as np
import pytest
import torch
from torch import nn

from multiback.benching.bound import Bound, tensors_in
from multiback.benching.problems import Problem
from multiback.errors import ProblemError

DATA = torch.rand(4, 3)


def total(output, _data):
    return output.sum()


def bind(model=None, data=DATA, losses=total, **options):
    return Bound(Problem(nn.Linear(3, 3) if model is None else model, data, losses), **options)


def frozen():
    model = nn.Linear(3, 3)
    model.requires_grad_(False)
    return model


REFUSED = {
    "no trainable parameter": (lambda: bind(frozen()), "must have a trainable parameter"),
    "a model that is no function": (lambda: bind(3), "model: must be callable; got int"),
    "a loss that is no function": (lambda: bind(losses=[3]), "losses: must be a function or a sequence"),
    "no tensor in the data": (lambda: bind(data=4), "data: must hold at least one tensor"),
    "a complex loss": (
        lambda: bind(losses=lambda o, _: (o * 1j).sum()).num_losses,
        "must be real; got torch.complex64",
    ),
    "an integer loss": (lambda: bind(losses=lambda o, _: o.argmax()).num_losses, "must be floating; got torch.int64"),
    "a loss without graph": (lambda: bind(losses=lambda o, _: o.detach().sum()).num_losses, "must have a graph"),
    "no loss at all": (lambda: bind(losses=lambda o, _: o[:0].sum(1)).num_losses, "at least one loss; got none"),
    "a loss that is no tensor": (lambda: bind(losses=lambda _o, _d: 3.0).num_losses, "must be a tensor; got float"),
    "a bad loss among several": (lambda: bind(losses=lambda o, _: [o.sum(), 1]).num_losses, "loss 2 of <lambda>"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_breaks_a_rule_is_refused_by_name(case):
    build, message = REFUSED[case]
    with pytest.raises(ProblemError) as caught:
        build()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_frozen_models_are_welcome_where_the_data_require_grad():
    bound = bind(frozen(), DATA.clone().requires_grad_())
    bound.begin("none")
    bound.total(bound.forward()).backward()
    assert bound.gradients()[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (DATA, lambda x: x.sum()),
        ((DATA, DATA), lambda x, y: (x * y).sum()),
        ({"x": DATA, "y": DATA}, lambda x, y: (x * y).sum()),
    ],
)
def test_data_reach_the_model_as_tensor_arguments_or_keywords(data, model):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, *args, **kwargs):
            return self.scale * model(*args, **kwargs)

    bound = bind(Wrapped(), data, lambda output, _data: output)
    assert bound.num_losses == 1


def test_losses_flatten_to_scalars_in_order():
    bound = bind(losses=[total, lambda o, _: o.sum(1), lambda o, _: o[:2, :2]])
    assert bound.num_losses == 1 + 4 + 4
    bound.begin("none")
    output = bound.forward()
    assert torch.equal(torch.stack(bound.losses(output)[1:5]), output.sum(1))
    assert torch.allclose(bound.total(output), sum(bound.losses(output)))


def test_targets_take_the_place_of_data_in_losses():
    targets = torch.tensor([0, 1, 2, 0])
    bound = Bound(Problem(nn.Linear(3, 3), DATA, nn.CrossEntropyLoss(reduction="none"), targets=targets))
    assert bound.num_losses == 4
    bound.begin("none")
    output = bound.forward()
    row = bound.row_loss(bound.row_of(output, 2), 2)
    assert torch.allclose(row, bound.losses(output)[2])


def test_a_row_loss_needs_one_loss_per_row():
    bound = bind(losses=[total, total])
    bound.begin("none")
    with pytest.raises(ProblemError, match="one row must give one loss, by one function"):
        bound.row_loss(bound.row_of(bound.forward(), 0), 0)


class Wandering(nn.Module):
    """Changes all that a forward can change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.hidden = None
        self.history = []

    def forward(self, data):
        self.seen += 1
        with torch.no_grad():
            self.linear.weight += 1
        self.hidden = self.linear(data)
        self.history.append(self.hidden)
        self.fresh = random.random() + torch.rand(())
        return self.hidden + self.fresh


def test_everything_that_a_run_changes_is_put_back():
    model = Wandering()
    before = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    bound = bind(model)
    outputs = []
    for _ in range(3):
        bound.begin("none")
        outputs.append(bound.forward().detach())
        bound.end()
    assert all(torch.equal(outputs[0], output) for output in outputs)
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *model.buffers()), strict=True))
    assert model.hidden is None
    assert model.history == []
    assert not hasattr(model, "fresh")


class Assigning(nn.Module):
    """Changes what a version counter does not show, and assigns where others write."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, data):
        self.linear.weight.data.mul_(2)
        output = self.linear(data) + self.mean
        self.mean = output.mean(0)
        self.extra = nn.Parameter(torch.ones(3))
        return output + float(np.random.rand())


def test_assigned_buffers_new_parameters_data_edits_and_numpy_randomness_are_put_back():
    bound = bind(Assigning())
    outputs = []
    for _ in range(3):
        bound.begin("none")
        outputs.append(bound.forward().detach())
        bound.end()
    assert all(torch.equal(outputs[0], output) for output in outputs)
    assert torch.equal(bound.model.mean, torch.zeros(3))
    assert not hasattr(bound.model, "extra")


def test_named_tuples_and_lists_stay_what_they_are():
    Pair = collections.namedtuple("Pair", "x y")

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, pair, items):
            items.append(1)
            return self.linear(pair.x + pair.y)

    bound = bind(Adding(), (Pair(DATA, DATA), [DATA]))
    assert bound.num_losses == 1


@pytest.mark.parametrize(("policy", "expected"), [("none", None), ("accumulate", 5.0), ("prealloc", 0.0)])
def test_the_gradient_policy_decides_what_grad_holds_at_the_start(policy, expected):
    bound = bind()
    for parameter in bound.parameters:
        parameter.grad = torch.full_like(parameter, 5.0)
    bound.begin(policy)
    grads = [parameter.grad for parameter in bound.parameters]
    if expected is None:
        assert grads == [None, None]
    else:
        assert all((grad == expected).all() for grad in grads)


def test_policies_that_keep_buffers_make_them_where_missing():
    bound = bind()
    bound.begin("accumulate")
    assert all((parameter.grad == 0).all() for parameter in bound.parameters)


def test_every_run_gets_fresh_data_leaves():
    bound = bind(data=DATA.clone().requires_grad_())
    bound.begin("none")
    first = bound.data
    bound.total(bound.forward()).backward()
    bound.begin("none")
    assert bound.data is not first
    assert bound.data.grad is None


def test_the_dtype_reaches_model_and_floating_data_only():
    bound = Bound(
        Problem(nn.Embedding(5, 3), torch.tensor([1, 2]), lambda o, d: (o * d.sum()).sum()), dtype=torch.float64
    )
    assert bound.parameters[0].dtype == torch.float64
    assert bound.shapes() == ({"data": [2]}, {"data": "int64"})


def test_carried_tensors_are_found_and_detached():
    class Carrying(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.state = {"h": torch.zeros(4, 3)}

        def forward(self, data):
            self.state = {"h": self.linear(data + self.state["h"])}
            return self.state["h"]

    bound = bind(nn.Sequential(Carrying()))
    bound.begin("none")
    bound.forward()
    assert [name for name, _ in bound.carried()] == ["h"]
    bound.detach_carried()
    assert bound.carried() == []


def test_a_plain_function_carries_nothing():
    bound = Bound(Problem(lambda x: x * 2, DATA.clone().requires_grad_(), total))
    assert bound.carried() == []
    bound.detach_carried()


def test_tensors_are_found_in_nested_containers():
    assert len(tensors_in({"a": [DATA, (DATA, 3)], "b": "text"})) == 2
