"""What layers and hooks do that is easily got wrong: every kind gives what K separate calls give, or refuses."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import multiback as mb
from methods.reference import Reference, separate
from multiback.methods import METHODS, failures
from zoo import one_thread

ROWS, WIDTH = 3, 4


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def data(*shape):
    return torch.randn(*shape or (ROWS, WIDTH), requires_grad=True)


def parameter(*shape):
    return nn.Parameter(torch.randn(shape) / 2)


def tied_to_an_embedding():
    table = nn.Embedding(6, WIDTH)
    outputs = F.linear(table(torch.arange(ROWS)).tanh(), table.weight)
    return outputs, {"table": table.weight}


def used_twice():
    layer, x = nn.Linear(WIDTH, WIDTH), data()
    return layer(layer(x).relu()), {"weight": layer.weight, "bias": layer.bias, "x": x}


def used_in_two_ways():
    weight, x = parameter(WIDTH, WIDTH), data()
    return (x @ weight).tanh() @ weight.t() + weight.sum(0), {"weight": weight, "x": x}


def regulariser():
    layer, x = nn.Linear(WIDTH, WIDTH), data()
    return layer(x) + layer.weight.square().sum(), {"weight": layer.weight, "bias": layer.bias}


def row_added_below_a_mixture():
    """A leaf that one layer takes as a bias, and from which the weight of a layer above that one is made."""
    layer, x = nn.Linear(6, 6), data(ROWS, 6)
    gate, value = layer((x + x[0])[:, None].transpose(0, 1))[0].chunk(2, 1)
    hidden = torch.stack([gate.sin() * value.tanh()]).transpose(0, 1)[:, 0]
    return torch.randn(ROWS, ROWS) @ hidden, {"x": x, "weight": layer.weight}


def mean_added_below_a_weight():
    x, scale = data(ROWS, WIDTH), parameter(WIDTH)
    return F.linear(torch.randn(2, WIDTH), (x + x.mean(0)).tanh() * scale).t(), {"x": x, "scale": scale}


def addmm_with_factors():
    weight, bias, x = parameter(WIDTH, 2), parameter(2), data()
    return torch.addmm(bias, x, weight, alpha=0.5, beta=2), {"weight": weight, "bias": bias, "x": x}


def bias_of(*shape):
    def case():
        weight, bias, x = parameter(WIDTH, 2), parameter(*shape), data()
        return torch.addmm(bias, x.tanh(), weight), {"weight": weight, "bias": bias}

    return case


def hooked_output():
    layer, head, x = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), data()
    hidden = layer(x)
    hidden.register_hook(lambda gradient: None if gradient is None else gradient * 3)
    return head(hidden.tanh()), {"weight": layer.weight, "bias": layer.bias, "head": head.weight, "x": x}


def retained_output():
    layer, head, x = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), data()
    hidden = layer(x)
    hidden.retain_grad()
    return head(hidden.tanh()), {"weight": layer.weight, "hidden": hidden, "x": x}


def hooked_parameter():
    layer, x = nn.Linear(WIDTH, WIDTH), data()
    layer.weight.register_hook(lambda gradient: None if gradient is None else gradient * 2)
    return layer(x), {"weight": layer.weight, "bias": layer.bias}


def hooked_data():
    layer, x = nn.Linear(WIDTH, WIDTH), data()
    x.register_hook(lambda gradient: None if gradient is None else gradient * 2)
    return layer(x), {"weight": layer.weight, "x": x}


def norm_over_two_dimensions():
    norm, x = nn.LayerNorm((2, WIDTH)), data(ROWS, 2, WIDTH)
    return norm(x), {"scale": norm.weight, "shift": norm.bias, "x": x}


def embedding_with(**options):
    def case():
        table = nn.Embedding(5, WIDTH, **options)
        indices = torch.tensor([[0, 1, 1], [1, 2, 4], [0, 0, 4]])
        return table(indices).sin().sum(1), {"table": table.weight}

    return case


def column_major_weight():
    layer, x = nn.Linear(WIDTH, 2), data()
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer(x), {"weight": layer.weight, "x": x}


def complex_weight():
    weight, x = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.complex64)), data()
    return torch.view_as_real(x.to(torch.complex64) @ weight), {"weight": weight, "x": x}


def checkpointed():
    layer, head, x = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), data()
    hidden = checkpoint(lambda given: layer(given).tanh(), x, use_reentrant=False)
    return head(hidden), {"weight": layer.weight, "head": head.weight, "x": x}


def saved_elsewhere():
    layer, head, x = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), data()
    with torch.autograd.graph.save_on_cpu():
        return head(layer(x).tanh()), {"weight": layer.weight, "head": head.weight, "x": x}


def half_of_the_output_in_place():
    layer, x = nn.Linear(WIDTH, WIDTH), data()
    outputs = layer(x).clone()
    outputs[:, :2] *= layer.bias[:2]
    return outputs, {"weight": layer.weight, "bias": layer.bias, "x": x}


def group_of_heads():
    attention, x = nn.MultiheadAttention(WIDTH, 2, batch_first=False), data(2, ROWS, WIDTH)
    outputs = attention(x, x, x, need_weights=False)[0]
    return outputs.transpose(0, 1), {"in": attention.in_proj_weight, "bias": attention.out_proj.bias}


PITFALLS = {
    "tied to an embedding": tied_to_an_embedding,
    "used twice": used_twice,
    "used in two ways": used_in_two_ways,
    "row added below a mixture": row_added_below_a_mixture,
    "mean added below a weight": mean_added_below_a_weight,
    "regulariser": regulariser,
    "addmm with factors": addmm_with_factors,
    "bias of one row": bias_of(1, 2),
    "bias of one number": bias_of(1),
    "bias without dimensions": bias_of(),
    "bias of every element": bias_of(ROWS, 2),
    "bias of every row": bias_of(ROWS, 1),
    "hooked output": hooked_output,
    "retained output": retained_output,
    "hooked parameter": hooked_parameter,
    "hooked data": hooked_data,
    "norm over two dimensions": norm_over_two_dimensions,
    "embedding scaled by frequency": embedding_with(scale_grad_by_freq=True),
    "embedding with padding": embedding_with(padding_idx=1),
    "embedding padded from the end": embedding_with(padding_idx=-1),
    "sparse embedding": embedding_with(sparse=True),
    "column-major weight": column_major_weight,
    "complex weight": complex_weight,
    "checkpointed": checkpointed,
    "saved elsewhere": saved_elsewhere,
    "half in place": half_of_the_output_in_place,
    "batch in the middle": group_of_heads,
}

LOSSES = {
    "per row": lambda y: y.square().flatten(1).sum(1),
    "slices": lambda y: [y[1:].exp().mean(), y[:1].square().sum()],
    "mixtures": lambda y: [(y * torch.randn(y.shape)).square().sum(), y.sin().mean(), y.abs().sum()],
    "repeated": lambda y: [loss := y.square().sum(), y[:2].sum(), loss],
}


def reference(losses, targets, tolerance=1e-4):
    scalars = list(losses.unbind()) if isinstance(losses, torch.Tensor) else losses
    return Reference(targets, dict(zip(targets, separate(scalars, list(targets.values())), strict=True)), tolerance)


def answered(function, losses, targets, method, **options):
    """The answer, None where the method refuses; `auto` may not. The graph is kept."""
    try:
        return function(losses, targets, method=method, retain_graph=True, **options)
    except mb.RequestError as error:
        refusal = str(error)
    assert method != "auto", refusal
    assert "must be exact" in refusal
    return None


def check(losses, targets, method, wanted=None):
    wanted = wanted or reference(losses, targets)
    jac = answered(mb.jac, losses, targets, method)
    if jac is None:
        return False
    each = [dict(answer) for answer in answered(mb.each, losses, targets, method)]
    for name, expected in wanted.jacobians.items():
        assert wanted.agrees(jac[name], expected), name
        assert wanted.agrees(torch.stack([answer[name] for answer in each]), expected), name
    gram, norms = (answered(function, losses, targets, method).double() for function in (mb.gram, mb.norms))
    assert torch.allclose(gram, wanted.gram, rtol=1e-3, atol=1e-4 * float(wanted.gram.abs().max()))
    assert torch.allclose(norms, wanted.matrix.norm(dim=1), rtol=1e-3)
    return True


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("name", PITFALLS)
def test_a_pitfall_gives_what_separate_calls_give(name, which, method):
    outputs, targets = PITFALLS[name]()
    answered_at_all = check(LOSSES[which](outputs), targets, method)
    assert answered_at_all or method in ("partition", "contract", "contract-batched", "batched")


@pytest.mark.filterwarnings("ignore::multiback.CoupledRowsWarning")
@pytest.mark.parametrize("independence", ["certify", "off"])
@pytest.mark.parametrize("name", PITFALLS)
def test_a_pitfall_s_rows_are_its_losses_own(name, independence):
    outputs, targets = PITFALLS[name]()
    losses = LOSSES["per row"](outputs)
    shared = {key: one for key, one in targets.items() if isinstance(one, nn.Parameter)}
    wanted = reference(losses, shared)
    found = mb.rows(losses, shared, independence=independence)
    for key, expected in wanted.jacobians.items():
        assert wanted.agrees(found[key], expected), key


@pytest.mark.parametrize("name", PITFALLS)
def test_a_pitfall_s_weighted_sum_is_the_sum_of_its_gradients(name):
    outputs, targets = PITFALLS[name]()
    losses, weights = LOSSES["repeated"](outputs), [0.5, -2.0, 3.0]
    wanted = reference(losses, targets)
    found = mb.grad(losses, targets, weights=weights)
    for key, expected in wanted.jacobians.items():
        summed = sum(weight * one for weight, one in zip(weights, expected, strict=True))
        assert wanted.agrees(found[key].to_dense(), summed), key


@pytest.mark.parametrize("kind", ["grad", "jac", "each", "rows", "gram", "norms"])
def test_errors_of_hooks_pass_and_leave_nothing_behind(kind):
    layer, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    hidden = layer(torch.randn(ROWS, WIDTH))
    losses = head(hidden.tanh()).square().sum(1)

    def failing(_gradient):
        raise ValueError("of the user")

    handle = hidden.register_hook(failing)
    with pytest.raises(ValueError, match="of the user"):
        list(getattr(mb, kind)(losses, layer, retain_graph=True))
    handle.remove()
    check(losses, dict(layer.named_parameters()), "auto")
    assert not hidden._backward_hooks


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("kind", ["jac", "each", "rows", "gram", "norms"])
def test_weights_changed_in_place_raise_torch_s_own_error_and_leave_nothing_behind(kind, method):
    failures.forget()
    layer, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    outputs = head(layer(torch.randn(ROWS, WIDTH)).tanh())
    losses = outputs.square().sum(1) if method == "partition" else LOSSES["mixtures"](outputs)
    with torch.no_grad():
        head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        list(getattr(mb, kind)(losses, layer, method=method))
    fresh = LOSSES["mixtures"](head(layer(torch.randn(ROWS, WIDTH)).tanh()))
    assert not any("batched traversal failed" in reason for reason in mb.plan(fresh, layer).refused.values())
    check(fresh, dict(layer.named_parameters()), "auto")


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_a_traversal_of_the_same_graph_in_another_thread_changes_nothing(method):
    layer, head, x = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), data()
    losses = head(layer(x).tanh()).square().sum(1)
    targets = {"weight": layer.weight, "head": head.weight, "x": x}
    wanted, finished = reference(losses, targets), threading.Event()

    def others():
        while not finished.is_set():
            torch.autograd.grad(losses.sum(), list(targets.values()), retain_graph=True)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        assert all(check(losses, targets, method, wanted) for _ in range(5))
    finally:
        finished.set()
        thread.join()


@pytest.mark.parametrize("kind", ["grad", "jac", "each", "rows", "gram", "norms"])
def test_an_empty_batch_is_answered_by_zeros_or_has_no_loss(kind):
    layer = nn.Linear(WIDTH, 2)
    outputs = layer(torch.zeros(0, WIDTH)).relu()
    found = list(getattr(mb, kind)([outputs.sum(), outputs.square().sum()], layer.weight, retain_graph=True))
    assert all(bool((one == 0).all()) for one in found)
    with pytest.raises(mb.RequestError, match="losses: must hold at least one loss"):
        getattr(mb, kind)(outputs.sum(1), layer.weight)


@pytest.mark.parametrize("kind", ["jac", "grad"])
def test_answers_with_a_graph_of_their_own_are_differentiated_again(kind):
    layer, norm, x = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), data()
    layer, norm, x = layer.double(), norm.double(), x.detach().double().requires_grad_()
    losses = norm(layer(x).tanh()).square().mul(torch.arange(1.0, 5)).sum(1)
    targets = [norm.weight, norm.bias, layer.weight, x]
    pieces = [torch.autograd.grad(loss, targets, create_graph=True) for loss in losses]
    expected = [torch.stack(column) for column in zip(*pieces, strict=True)]
    found = getattr(mb, kind)(losses, targets, create_graph=True)
    if kind == "grad":
        expected = [one.sum(0) for one in expected]
    seconds = [
        torch.autograd.grad(sum(one.square().sum() for one in ones), targets, retain_graph=True, allow_unused=True)
        for ones in (found, expected)
    ]
    for one, other in zip((*found, *seconds[0]), (*expected, *seconds[1]), strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_requests_are_answered_under_no_grad(method):
    outputs, targets = used_twice()
    losses = LOSSES["per row"](outputs)
    wanted = reference(losses, targets)
    with torch.no_grad():
        check(losses, targets, method, wanted)


def test_requests_inside_transforms_are_refused_or_answered():
    layer, x = nn.Linear(WIDTH, 2), torch.randn(ROWS, WIDTH)

    def inside(weight):
        return mb.jac(F.linear(x, weight).square().sum(1), weight).square().sum()

    with pytest.raises((mb.RequestError, RuntimeError)) as caught:
        torch.func.grad(inside)(layer.weight.detach())
    assert "Assertion" not in str(caught.value)
