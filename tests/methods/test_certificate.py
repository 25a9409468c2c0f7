"""The certificate says which loss owns which rows only where that is so, whatever the losses' scales and order."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multiback as mb
from methods.reference import Reference, separate
from zoo import one_thread

WIDTH = 4


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Opaque(torch.autograd.Function):
    """The identity, of which a walk knows nothing."""

    @staticmethod
    def forward(_ctx, given):
        return given.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient.clone()


def net(rows, dtype=torch.float32):
    """Outputs [rows, 4] that a walk cannot follow, and what they may be differentiated by."""
    layer, x = nn.Linear(WIDTH, WIDTH).to(dtype), torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True)
    return Opaque.apply(layer(x)).tanh(), {"weight": layer.weight, "bias": layer.bias, "x": x}


def reference(losses, targets, tolerance=1e-4):
    scalars = list(losses.unbind()) if isinstance(losses, torch.Tensor) else losses
    return Reference(targets, dict(zip(targets, separate(scalars, list(targets.values())), strict=True)), tolerance)


def check(losses, targets, tolerance=1e-4):
    """`jac` and `rows` hold what separate calls give, loss by loss; the plan for rows."""
    wanted = reference(losses, targets, tolerance)
    plan = mb.plan(losses, targets, kind="rows")
    found = mb.jac(losses, targets, retain_graph=True)
    for name, expected in wanted.jacobians.items():
        gap, norm = ((found[name] - expected), expected)
        gap, norm = (one.flatten(1).double().norm(dim=1) for one in (gap, norm))
        assert bool((gap <= tolerance * norm).all()), name
    if plan.independence in ("proven", "certified") and plan.losses == len(losses):
        rows = mb.rows(losses, targets, retain_graph=True)
        assert wanted.agrees(rows["x"], wanted.jacobians["x"].sum(0))
    return plan


@pytest.mark.parametrize("coupling", [1e-1, 1e-4, 1e-7])
@pytest.mark.parametrize("how", ["neighbour", "mean"])
def test_small_coupling_is_caught(how, coupling):
    outputs, targets = net(6)
    others = outputs.roll(1, 0) if how == "neighbour" else outputs.mean(0)
    losses = (outputs + coupling * others).square().sum(1)
    assert mb.plan(losses, targets, kind="rows").independence == "coupled"
    with pytest.warns(mb.CoupledRowsWarning):
        mb.rows(losses, targets)


def test_losses_that_cancel_in_the_sum_are_caught():
    outputs, targets = net(4)
    one = (outputs[0] * torch.randn(WIDTH)).sum()
    assert check([one, -one, outputs[2:].square().sum()], targets).independence == "coupled"


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.0, -0.5, 3.0, 0.25])
@pytest.mark.parametrize("count", [3, 7, 26, 27])
def test_proportional_losses_are_caught(count, factor):
    outputs, targets = net(count)
    losses = list(outputs.square().sum(1).unbind())
    for place in range(count):
        for other in (place - 1, (place + 5) % count):
            changed = [*losses]
            changed[other] = losses[place] * factor
            if other != place:
                assert mb.plan(changed, targets, kind="rows").independence == "coupled", (place, other)


@pytest.mark.parametrize("count", [3, 7, 9, 23, 26, 31])
@pytest.mark.parametrize("factor", [1.0, -1.0, 0.5, 2.0])
def test_one_row_that_two_losses_share_is_caught(count, factor):
    for place in range(count - 1):
        outputs, targets = net(2 * count)
        rows = outputs.square().sum(1)
        losses = [rows[2 * number : 2 * number + 2].sum() for number in range(count)]
        losses[place] = losses[place] + factor * rows[2 * place + 2]
        assert mb.plan(losses, targets, kind="rows").independence == "coupled", place


def test_slices_that_overlap_by_one_row_are_answered_in_full():
    layer, x = nn.Linear(WIDTH, 3), torch.randn(16, WIDTH, requires_grad=True)
    outputs = layer(x).tanh()
    losses = [outputs[2 * number : 2 * number + 2 + (number == 5)].square().sum() for number in range(8)]
    check(losses, {"weight": layer.weight, "x": x})


def test_ragged_slices_in_any_order_with_rows_of_no_loss_are_discovered():
    outputs, targets = net(12)
    turned = outputs[torch.randperm(12)]
    losses = [turned[7:9].square().sum(), turned[:1].sin().sum(), turned[2:7].exp().mean()]
    plan = check(losses, targets)
    assert plan.independence == "certified"
    assert plan.method == "partition"
    assert int((mb.rows(losses, targets)["x"].abs().sum(1) == 0).sum()) == 4


def test_repeated_losses_are_answered_each_time():
    outputs, targets = net(4)
    losses = [outputs[:2].square().sum(), outputs[2:].sin().sum()]
    plan = check([losses[0], losses[1], losses[0]], targets)
    assert (plan.losses, plan.independence) == (2, "certified")


@pytest.mark.parametrize("count", [2, 26, 27, 130, 131, 200])
def test_many_losses_behind_a_custom_function_are_certified(count):
    outputs, targets = net(count)
    assert check(outputs.square().sum(1), targets).independence == "certified"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [5, 40])
def test_precisions_other_than_single_are_certified(count, dtype):
    outputs, targets = net(count, dtype)
    assert check(outputs.square().sum(1), targets, 5e-2).independence == "certified"


@pytest.mark.parametrize("count", [5, 40])
def test_rows_in_half_precision_are_not_called_coupled(count):
    outputs, targets = net(count, torch.float16)
    assert mb.plan(outputs.square().sum(1), targets, kind="rows").independence == "certified"


@pytest.mark.parametrize("count", [4, 40])
@pytest.mark.parametrize("scale", [1e-8, 1e8, "mixed"])
def test_losses_of_any_scale_are_certified(scale, count):
    outputs, targets = net(count)
    scales = torch.full((count,), scale) if scale != "mixed" else torch.logspace(-8, 8, count)
    assert check(outputs.square().sum(1) * scales, targets).independence == "certified"


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8, 65536.0])
def test_weights_may_hold_the_scale_of_the_losses(scale):
    outputs, targets = net(5)
    losses = outputs.square().sum(1)
    wanted = reference(losses, targets)
    found = mb.grad(losses * scale, targets, weights=[1 / scale] * 5, retain_graph=True)
    for name, expected in wanted.jacobians.items():
        assert wanted.agrees(found[name], expected.sum(0)), name


def test_batch_norm_in_train_mode_is_warned_of_by_name():
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    losses = model(torch.randn(5, WIDTH)).square().sum(1)
    targets = dict(model.named_parameters())
    wanted = reference(losses, targets)
    with pytest.warns(mb.CoupledRowsWarning, match=r"BatchNorm.*train mode"):
        found = mb.rows(losses, model)
    for name, expected in wanted.jacobians.items():
        assert wanted.agrees(found[name], expected), name


@pytest.mark.parametrize("independence", ["assume", "off", "certify"])
def test_rows_that_are_apart_are_answered_alike_in_every_mode(independence):
    outputs, targets = net(5)
    losses = outputs.square().sum(1)
    wanted = reference(losses, targets)
    found = mb.rows(losses, targets, independence=independence, retain_graph=True)
    for name in ("weight", "bias"):
        assert wanted.agrees(found[name], wanted.jacobians[name])
    assert wanted.agrees(found["x"], wanted.jacobians["x"].sum(0))
    plan = mb.plan(losses, targets, kind="rows", independence=independence)
    assert plan.independence == {"assume": "assumed", "off": "unchecked", "certify": "certified"}[independence]
    assert (plan.method == "partition") == (independence != "off")


def test_rows_never_meet_in_a_mode_that_is_off():
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))
    losses = model(torch.randn(5, WIDTH)).square().sum(1)
    wanted = reference(losses, dict(model.named_parameters()))
    found = mb.rows(losses, model, independence="off")
    assert all(wanted.agrees(found[name], expected) for name, expected in wanted.jacobians.items())


def test_the_same_structure_is_certified_anew_on_other_data():
    targets = torch.randn(4, WIDTH).abs().requires_grad_()
    for shift, expected in ((9.0, "certified"), (-9.0, "coupled")):
        losses = (targets + F.relu(targets.mean(0) - shift)).square().sum(1)
        assert mb.plan(losses, {"x": targets}, kind="rows").independence == expected
