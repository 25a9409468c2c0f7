"""A cut through a graph that is there: exact gradients, one traversal, nothing left behind."""

import gc
import warnings
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import multiback as mb
from zoo import ZOO, one_thread

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Outputs:
    scores: torch.Tensor
    hidden: torch.Tensor
    name: str = "outputs"


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def gradients(module):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]


def assert_close(found, expected, tolerance=1e-5):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-6)


class Calls:
    """Counts how often a module's part is traversed."""

    def __init__(self, tensor):
        self.count = 0
        tensor.register_hook(self._called)

    def _called(self, _grad):
        self.count += 1


@pytest.mark.parametrize("entry", [e for e in ZOO if "backward only" not in e.traits], ids=lambda entry: entry.name)
def test_it_equals_the_gradient_without_a_cut_on_every_model(entry):
    case, again = entry.build(), entry.build()
    weights = torch.rand(len(case.rows())) + 0.5
    cut = mb.cut(case.rows())
    targets = {**case.parameters, **({} if case.data is None else {"data": case.data})}
    expected = mb.grad((again.rows() * weights).sum(), _targets_of(again))
    found = cut.grad_of((cut.value * weights).sum(), wrt=targets)
    largest = max(float(one.abs().double().norm()) for one in expected.values())
    for name, other in expected.items():
        gap = float((found[name].to_dense() - other.to_dense()).abs().double().norm())
        assert gap <= case.tolerance * max(float(other.to_dense().abs().double().norm()), largest / 100), name


def _targets_of(case):
    return {**case.parameters, **({} if case.data is None else {"data": case.data})}


def test_slices_and_masks_and_reductions_add_up_and_one_traversal_follows(net):
    x = torch.randn(6, 4)
    hidden = net[:2](x)
    calls = Calls(hidden)
    cut = mb.cut(net[2](hidden))
    cut.value[0].sum().backward()
    cut.value[2:4].square().sum().backward()
    cut.value[cut.value > 0].sum().backward()
    cut.value.logsumexp(1)[[1, 5]].sum().backward()
    assert calls.count == 0
    cut.backward()
    assert calls.count == 1
    found = gradients(net)
    net.zero_grad()
    y = net(x)
    (y[0].sum() + y[2:4].square().sum() + y[y > 0].sum() + y.logsumexp(1)[[1, 5]].sum()).backward()
    assert_close(found, gradients(net))


def test_retain_graph_starts_afresh_and_never_counts_a_loss_twice(net):
    x = torch.randn(6, 4)
    cut = mb.cut(net(x))
    cut.value[0].sum().backward()
    cut.backward(retain_graph=True)
    cut.value[1].sum().backward()
    cut.backward()
    found = gradients(net)
    net.zero_grad()
    net(x)[:2].sum().backward()
    assert_close(found, gradients(net))


def test_a_second_backward_on_the_freed_graph_is_an_error_and_doubles_nothing(net):
    cut = mb.cut(net(torch.randn(6, 4)))
    cut.value.sum().backward()
    cut.backward()
    before = gradients(net)
    cut.value.sum().backward()
    with pytest.raises(mb.FreedGraphError, match="retain_graph=True"):
        cut.backward()
    assert_close(gradients(net), before)
    cut.value.grad = None


def test_the_context_manager_runs_one_traversal_on_a_clean_exit(net):
    hidden = net[:2](torch.randn(6, 4))
    calls = Calls(hidden)
    with mb.cut(hidden) as cut:
        for part in cut.value.chunk(3):
            net[2](part).sum().backward()
        assert calls.count == 0
    assert calls.count == 1
    assert all(gradient is not None for gradient in gradients(net))


def test_after_an_exception_nothing_is_run_and_nothing_warns(net):
    hidden = net[:2](torch.randn(6, 4))
    calls = Calls(hidden)

    def interrupted():
        with mb.cut(hidden) as cut:
            net[2](cut.value).sum().backward()
            raise KeyError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError):
            interrupted()
        gc.collect()
    assert calls.count == 0
    assert net[0].weight.grad is None


def test_a_block_without_a_loss_runs_nothing(net):
    with mb.cut(net(torch.randn(6, 4))):
        pass
    assert net[0].weight.grad is None


def test_a_forgotten_backward_warns_when_the_cut_dies(net):
    cut = mb.cut(net(torch.randn(6, 4)))
    cut.value.sum().backward()
    with pytest.warns(mb.ForgottenBackwardWarning, match=r"cut\.backward\(\)"):
        del cut


def test_a_cut_without_gradient_dies_silently(net):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut = mb.cut(net(torch.randn(6, 4)))
        cut.value.sum().backward()
        cut.backward()
        del cut


def test_a_cut_dies_without_the_garbage_collector(net):
    output = net(torch.randn(6, 4))
    gc.disable()
    try:
        cut = mb.cut(output)
        del output, cut
        assert not any(type(found) is mb.Cut for found in gc.get_objects())
    finally:
        gc.enable()


def test_structures_come_back_with_leaves_in_place(net):
    x = torch.randn(6, 4)
    hidden = net[:2](x)
    scores = net[2](hidden)
    label = scores.argmax(1)
    for output, read in (
        ((scores, hidden, label), lambda v: (v[0], v[1])),
        ([scores, {"h": hidden}], lambda v: (v[0], v[1]["h"])),
        ({"scores": scores, "hidden": hidden}, lambda v: (v["scores"], v["hidden"])),
        (Pair(scores, hidden), lambda v: (v.first, v.second)),
        (Outputs(scores, hidden), lambda v: (v.scores, v.hidden)),
    ):
        cut = mb.cut(output)
        assert type(cut.value) is type(output)
        first, second = read(cut.value)
        assert first.is_leaf
        assert first.requires_grad
        assert second.is_leaf
        assert first.data_ptr() == scores.data_ptr()
        loss = first.square().sum() + (second * 2).sum()
        found = cut.grad_of(loss, wrt=net)
        expected = mb.grad(scores.square().sum() + (hidden * 2).sum(), net, retain_graph=True)
        assert_close(list(found.values()), list(expected.values()))


def test_what_has_no_graph_stays_itself(net):
    scores = net(torch.randn(6, 4))
    labels = scores.argmax(1)
    cut = mb.cut((scores, labels, "name", None))
    assert cut.value[1] is labels
    assert cut.value[2:] == ("name", None)


def test_one_tensor_that_appears_twice_has_one_leaf(net):
    x = torch.randn(6, 4)
    scores = net(x)
    cut = mb.cut((scores, scores))
    assert cut.value[0] is cut.value[1]
    (cut.value[0].sum() + cut.value[1].square().sum()).backward()
    cut.backward()
    found = gradients(net)
    net.zero_grad()
    scores = net(x)
    (scores.sum() + scores.square().sum()).backward()
    assert_close(found, gradients(net))


def test_nested_cuts_of_a_trunk_and_heads(net):
    x, heads = torch.randn(6, 4), [nn.Linear(3, 2), nn.Linear(3, 1)]
    trunk_output = net(x)
    calls = Calls(trunk_output)
    with mb.cut(trunk_output) as trunk:
        for head in heads:
            with mb.cut(head(trunk.value)) as top:
                for row in top.value:
                    row.square().sum().backward()
    assert calls.count == 1
    found = [g for module in (net, *heads) for g in gradients(module)]
    for module in (net, *heads):
        module.zero_grad()
    y = net(x)
    sum(head(y).square().sum() for head in heads).backward()
    assert_close(found, [g for module in (net, *heads) for g in gradients(module)])


def test_grad_of_answers_for_head_and_trunk_and_touches_no_grad(net):
    x = torch.randn(6, 4, requires_grad=True)
    trunk = net[:2]
    cut = mb.cut(trunk(x))
    loss = net[2](cut.value)[1].square().sum()
    found = cut.grad_of(loss, wrt=[*net.parameters(), x])
    expected = torch.autograd.grad(net(x)[1].square().sum(), [*net.parameters(), x])
    assert_close(found, expected)
    assert cut.value.grad is None
    assert gradients(net) == [None] * 4


def test_grads_of_answers_each_loss_and_a_repeated_one_twice(net):
    x = torch.randn(6, 4)
    cut = mb.cut(net(x))
    first, second = cut.value[:2].sum(), cut.value[1:].square().sum()
    found = cut.grads_of([first, second, first], wrt=net)
    y = net(x)
    for answer, loss in zip(found, [y[:2].sum(), y[1:].square().sum(), y[:2].sum()], strict=True):
        expected = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        assert_close(list(answer.values()), expected)


def test_grads_of_takes_a_vector_as_so_many_losses(net):
    x = torch.randn(6, 4)
    cut = mb.cut(net(x))
    found = cut.grads_of(cut.value.square().sum(1), wrt=net[0].weight)
    expected = mb.jac(net(x).square().sum(1), net[0].weight)
    assert_close(found, list(expected))


def test_asking_for_a_slice_again_gives_that_slice_alone(net):
    x = torch.randn(6, 4, requires_grad=True)
    cut = mb.cut(net(x))
    losses = [cut.value[2].sum(), cut.value[1:4].sum(), cut.value[2].sum()]
    first, overlapping, again = (cut.grad_of(loss, wrt=x) for loss in losses)
    assert torch.equal(first, again)
    assert not torch.equal(first, overlapping)
    output = net(x)
    for _ in range(2):  # what the hand-written loop reads: the second time twice the gradient
        output[2].sum().backward(retain_graph=True)
    assert_close([x.grad[2]], [2 * first[2]])


def test_a_checkpointed_model_is_recomputed_once_for_k_losses(net):
    count = 0

    def counted(x):
        nonlocal count
        count += 1
        return net(x)

    for reentrant in (False, True):
        count = 0
        net.zero_grad()
        x = torch.randn(6, 4, requires_grad=True)
        cut = mb.cut(checkpoint(counted, x, use_reentrant=reentrant))
        for row in cut.value:
            row.square().sum().backward()
        cut.backward()
        assert count == 2
        found = gradients(net)
        net.zero_grad()
        net(x).square().sum().backward()
        assert_close(found, gradients(net))


def test_reentrant_checkpointing_is_refused_by_name_where_gradients_are_returned(net):
    cut = mb.cut(checkpoint(net, torch.randn(6, 4, requires_grad=True), use_reentrant=True))
    with pytest.raises(mb.RequestError, match="use_reentrant=False"):
        cut.grad_of(cut.value.sum(), wrt=net)


def test_a_compiled_model_with_donated_buffers_takes_k_losses(net):
    from torch._functorch import config

    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager")
    x = torch.randn(6, 4)
    with config.patch(donated_buffer=True):
        compiled(x).sum().backward()
        net.zero_grad()
        cut = mb.cut(compiled(x))
        for row in cut.value:
            row.square().sum().backward()
        cut.backward()
    found = gradients(net)
    net.zero_grad()
    net(x).square().sum().backward()
    assert_close(found, gradients(net))


def test_complex_and_sparse_cotangents_arrive_exactly():
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
    cut = mb.cut(weight * 2)
    (cut.value * (1 + 2j)).abs().square().sum().backward()
    cut.backward()
    found, weight.grad = weight.grad, None
    (weight * 2 * (1 + 2j)).abs().square().sum().backward()
    assert_close([found], [weight.grad])

    table = nn.Parameter(torch.randn(7, 3))
    cut = mb.cut(table.tanh())
    F.embedding(torch.tensor([1, 1, 4]), cut.value, sparse=True).square().sum().backward()
    cut.backward()
    found, table.grad = table.grad, None
    F.embedding(torch.tensor([1, 1, 4]), table.tanh()).square().sum().backward()
    assert_close([found], [table.grad])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net, opt: opt.step(), "[02].(weight|bias)"),
        (lambda net, opt: net[0].bias.data.sub_(0.1), "0.bias"),
        (lambda net, opt: net[2].weight.data[1, 1].add_(1.0), "2.weight"),
        (lambda net, opt: net[0].weight.data.copy_(net[0].weight.data.flip(1)), "0.weight"),
        (lambda net, opt: net[0].weight.data.neg_(), "0.weight"),
    ],
    ids=["optimiser step", "through .data", "one element", "flipped", "negated"],
)
def test_a_changed_parameter_is_named_and_nothing_is_lost(net, change, name):
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(6, 4)
    net(x).sum().backward()
    cut = mb.cut(net(x))
    cut.value.sum().backward()
    before = gradients(net)
    change(net, opt)
    with pytest.raises(mb.StaleForwardError, match=f'parameter "{name}" of Sequential has changed since'):
        cut.backward()
    with pytest.raises(mb.StaleForwardError, match="run a forward after it"):
        cut.grad_of(cut.value.sum(), wrt=net)
    assert_close(gradients(net), before)
    cut.value.grad = None


def test_a_lone_linear_layer_whose_backward_needs_no_weight_is_caught_too():
    layer, x = nn.Linear(4, 3), torch.randn(6, 4)
    opt = torch.optim.SGD(layer.parameters(), lr=5.0)
    cut = mb.cut(layer(x))
    cut.value[:2].sum().backward()
    cut.backward(retain_graph=True)
    opt.step()
    cut.value[2:].sum().backward()
    with pytest.raises(mb.StaleForwardError, match='parameter "weight" of Linear'):
        cut.backward()
    cut.value.grad = None


def test_writing_the_same_values_is_no_change(net):
    cut = mb.cut(net(torch.randn(6, 4)))
    net[2].bias.data.copy_(net[2].bias.data.clone())
    cut.value.sum().backward()
    cut.backward()
    assert net[0].weight.grad is not None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net, cut: mb.cut(torch.zeros(3)), "must be given an output with a graph; got Tensor with none that"),
        (lambda net, cut: mb.cut("text"), "got str with no tensor"),
        (lambda net, cut: mb.cut(net), r"data: must be given with a model.*mb\.cut\(model, data\)"),
        (lambda net, cut: mb.cut(cut.value, torch.zeros(2)), "model: must be a module or a function"),
        (lambda net, cut: cut.backward(), r"must follow a loss on cut\.value"),
        (lambda net, cut: cut.grad_of(cut.value.sum()), "wrt: must be given for a cut through an existing output"),
        (lambda net, cut: cut.grad_of(cut.value, wrt=net), r"loss: must be one scalar; got shape \[6, 3\].*grads_of"),
        (lambda net, cut: cut.grad_of(3.0, wrt=net), "loss: must be a tensor; got float"),
        (lambda net, cut: cut.grad_of(net(torch.ones(1, 4)).sum(), wrt=net), r"must be computed from cut\.value"),
        (lambda net, cut: cut.grad_of(cut.value.sum().detach(), wrt=net), "must have a graph"),
        (lambda net, cut: cut.grad_of(cut.value.sum(), wrt=torch.zeros(2)), "wrt: must require grad"),
        (lambda net, cut: cut.grads_of([], wrt=net), "losses: must hold at least one loss; got none"),
    ],
)
def test_bad_input_gets_one_sentence(net, call, message):
    cut = mb.cut(net(torch.randn(6, 4)))
    with pytest.raises(mb.InputError, match=message):
        call(net, cut)


def test_inference_mode_is_refused(net):
    output = net(torch.randn(6, 4))
    with torch.inference_mode(), pytest.raises(mb.RequestError, match="inference_mode"):
        mb.cut(output)


def test_a_loss_asked_for_twice_needs_its_own_graph_kept(net):
    cut = mb.cut(net(torch.randn(6, 4)))
    losses = cut.value.square().sum(1)
    cut.grad_of(losses[0], wrt=net, retain_graph=True)
    cut.grad_of(losses[1], wrt=net)
    with pytest.raises(mb.FreedGraphError, match="retain_graph=True"):
        cut.grad_of(losses[2], wrt=net)


def test_an_output_that_is_written_to_in_place_is_refused(net):
    output = net[0](torch.randn(6, 4))
    cut = mb.cut(output)
    loss = cut.value.sum()
    F.leaky_relu(output, 0.1, inplace=True)
    with pytest.raises(mb.StaleForwardError, match="written to in place"):
        cut.grad_of(loss, wrt=net)
    loss.backward()
    with pytest.raises(mb.StaleForwardError, match="written to in place"):
        cut.backward()
    cut.value.grad = None


def test_a_gradient_on_the_value_of_a_cut_that_is_gone_warns(net):
    value = mb.cut(net(torch.randn(6, 4))).value
    with pytest.warns(mb.ForgottenBackwardWarning, match="Keep the cut until"):
        value.sum().backward()


def test_blocks_that_change_places_change_a_fingerprint():
    from multiback.cuts import fingerprints

    weight = torch.randn(6, 122)
    assert fingerprints.of_tensor(weight) == fingerprints.of_tensor(weight.clone())
    assert fingerprints.of_tensor(weight) != fingerprints.of_tensor(weight.flip(0))
    tokens = torch.arange(200)[None]
    swapped = tokens.clone()
    swapped[0, [0, 61]] = tokens[0, [61, 0]]
    assert bool((fingerprints.of_rows(tokens) != fingerprints.of_rows(swapped)).all())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
)
@pytest.mark.parametrize("size", [1, 3, 8, 123, 70001])
def test_fingerprints_see_one_element_of_any_dtype(dtype, size):
    from multiback.cuts import fingerprints

    rows = torch.zeros(3, size, dtype=dtype)
    changed = rows.clone()
    changed[1, size // 2] = 1
    same = fingerprints.of_rows(rows) == fingerprints.of_rows(changed)
    assert same.tolist() == [True, False, True]
