"""What people who infer first and back-propagate later run into, each with its right outcome."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multiback as mb
from multiback.measure import memory
from zoo import one_thread


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def flat(parameters):
    return torch.cat([parameter.grad.reshape(-1) for parameter in parameters])


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


class MessagePassing(nn.Module):
    def __init__(self, nodes):
        super().__init__()
        edges = (torch.rand(nodes, nodes) < 0.2).float() + torch.eye(nodes)
        self.register_buffer("adjacency", edges / edges.sum(1, keepdim=True))
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, features):
        return self.b(torch.relu(self.adjacency @ self.a(features)))


def test_one_step_per_forward_with_losses_by_mini_batches_of_nodes_is_one_trunk_traversal():
    net, features, labels = MessagePassing(40), torch.randn(40, 8), torch.randint(0, 3, (40,))
    F.cross_entropy(net(features), labels, reduction="sum").div(40).backward()
    expected = flat(net.parameters())
    net.zero_grad()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    with mb.cut(net(features)) as cut:
        for nodes in torch.arange(40).split(10):
            F.cross_entropy(cut.value[nodes], labels[nodes], reduction="sum").div(40).backward()
    assert distance(flat(net.parameters()), expected) < 1e-5
    optimiser.step()


@pytest.mark.parametrize("through_data", [False, True], ids=["step", "through .data"])
@pytest.mark.parametrize("net", [MessagePassing(40), nn.Linear(8, 3)], ids=["graph net", "lone linear layer"])
def test_a_step_between_mini_batches_of_one_forward_is_never_a_stale_gradient(net, through_data):
    features, labels = torch.randn(40, 8), torch.randint(0, 3, (40,))
    optimiser = torch.optim.SGD(net.parameters(), lr=5.0)
    net.zero_grad()
    cut = mb.cut(net(features))
    for number, nodes in enumerate(torch.arange(40).split(10)):
        F.cross_entropy(cut.value[nodes], labels[nodes], reduction="sum").div(40).backward()
        if number == 1:
            with pytest.raises(mb.StaleForwardError, match="has changed since the cut was made, so this forward's"):
                cut.backward(retain_graph=True)
            break
        cut.backward(retain_graph=True)
        if through_data:
            for parameter in net.parameters():
                parameter.data -= 5.0 * parameter.grad
        else:
            optimiser.step()
    cut.value.grad = None


def test_per_sample_gradients_after_one_inference_equal_a_traversal_of_the_batch_for_each():
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    x, y = torch.randn(16, 6), torch.randint(0, 4, (16,))
    cut = mb.cut(net, x, batch_size=8, keep="recompute")
    found = cut.grads_of(F.cross_entropy(cut.value, y, reduction="none"), wrt=net)
    losses = F.cross_entropy(net(x), y, reduction="none")
    parameters = list(net.parameters())
    for one, loss in zip(found, losses, strict=True):
        expected = torch.autograd.grad(loss, parameters, retain_graph=True)
        for mine, theirs in zip(one.values(), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_chunked_head_and_loss_equal_the_whole_at_a_fraction_of_its_peak():
    trunk, head = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), nn.Linear(16, 2000, bias=False)
    parameters = [*trunk.parameters(), *head.parameters()]
    x, y = torch.randn(256, 16), torch.randint(0, 2000, (256,))
    y[:50] = -100
    count = int((y != -100).sum())

    def whole():
        F.cross_entropy(head(trunk(x)), y, reduction="sum").div(count).backward()

    def chunked():
        with mb.cut(trunk(x)) as cut:
            for part, own in zip(cut.value.chunk(8), y.chunk(8), strict=True):
                F.cross_entropy(head(part), own, reduction="sum").div(count).backward()

    whole()
    expected = flat(parameters)
    for parameter in parameters:
        parameter.grad.zero_()
    peaks = {way.__name__: memory.live_bytes(way).peak for way in (whole, chunked)}
    for parameter in parameters:
        parameter.grad = None
    chunked()
    assert distance(flat(parameters), expected) < 1e-5
    assert peaks["chunked"] < peaks["whole"] / 4


def test_five_heads_take_one_trunk_traversal_and_give_the_list_call_s_gradient():
    trunk, heads = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), [nn.Linear(16, 2) for _ in range(5)]
    modules = nn.ModuleList([trunk, *heads])
    x, traversals = torch.randn(10, 8), []
    torch.autograd.backward([head(trunk(x)).square().mean() for head in heads])
    expected = flat(modules.parameters())
    modules.zero_grad()
    hidden = trunk(x)
    hidden.register_hook(lambda _: traversals.append(1))
    with mb.cut(hidden) as cut:
        for head in heads:
            head(cut.value).square().mean().backward()
    assert len(traversals) == 1
    assert distance(flat(modules.parameters()), expected) < 1e-5


def contrastive(embedded):
    normed = F.normalize(embedded, dim=1)
    return F.cross_entropy(normed @ normed.roll(1, 0).t() / 0.2, torch.arange(len(embedded)))


def encoder(middle):
    return nn.Sequential(nn.Linear(12, 24), middle, nn.ReLU(), nn.Linear(24, 8))


MIDDLES = {"plain": nn.Identity, "dropout": lambda: nn.Dropout(0.3), "batch norm": lambda: nn.BatchNorm1d(24)}


@pytest.mark.parametrize("keep", ["recompute", "graph"])
@pytest.mark.parametrize("middle", MIDDLES)
def test_a_contrastive_loss_over_all_rows_equals_the_graph_of_all_batches(middle, keep):
    net, x = encoder(MIDDLES[middle]()), torch.randn(32, 12)
    again = copy.deepcopy(net)
    torch.manual_seed(7)
    contrastive(torch.cat([again(part) for part in x.split(8)])).backward()
    torch.manual_seed(7)
    with mb.cut(net, x, batch_size=8, keep=keep) as cut:
        contrastive(cut.value).backward()
    assert distance(flat(net.parameters()), flat(again.parameters())) < 1e-4
    for one, other in zip(net.buffers(), again.buffers(), strict=True):  # statistics are updated once
        torch.testing.assert_close(one, other)
    if middle == "plain":
        again.zero_grad()
        contrastive(again(x)).backward()
        assert distance(flat(net.parameters()), flat(again.parameters())) < 1e-4


def test_a_cache_by_hand_that_forgets_the_random_state_is_far_off():
    """The counter-test: what the cut replays matters."""
    net, x = encoder(nn.Dropout(0.3)), torch.randn(32, 12)
    with torch.no_grad():
        embedded = torch.cat([net(part) for part in x.split(8)])
    leaf = embedded.requires_grad_()
    contrastive(leaf).backward()
    for part, gradient in zip(x.split(8), leaf.grad.split(8), strict=True):
        net(part).backward(gradient)
    by_hand = flat(net.parameters())
    net.zero_grad()
    torch.manual_seed(0)
    with mb.cut(net, x, batch_size=8, keep="recompute") as cut:
        contrastive(cut.value).backward()
    assert distance(by_hand, flat(net.parameters())) > 0.1


def test_why_a_cut_differs_from_one_big_batch_is_reported_by_cause():
    x = torch.randn(32, 12)
    reports = {
        name: mb.cut(encoder(middle()), x, batch_size=8, keep="recompute").report() for name, middle in MIDDLES.items()
    }
    assert reports["plain"].startswith("None but rounding")
    assert "Random numbers were drawn in 4 of 4 batches" in reports["dropout"]
    assert (
        "Rows meet at NativeBatchNormBackward0: a row depends on its batch of 8, not on all 32" in reports["batch norm"]
    )
    assert all("negatives, means and counts are over all 32 rows" in report for report in reports.values())
    assert mb.cut(encoder(nn.BatchNorm1d(24)), x, batch_size=32).report().startswith("None but rounding")


def test_several_losses_on_a_compiled_model_need_no_retained_graph():
    from torch._functorch import config

    torch._dynamo.reset()
    net, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), torch.randn(6, 8)
    compiled = torch.compile(net, backend="aot_eager")
    with config.patch(donated_buffer=True):
        compiled(x).square().mean().backward()  # after this, backward(retain_graph=True) would fail
        net.zero_grad()
        with mb.cut(compiled(x)) as cut:
            for column in range(4):
                cut.value[:, column].mean().backward()
        found = flat(net.parameters())
        net.zero_grad()
        sum(net(x)[:, column].mean() for column in range(4)).backward()
        assert distance(found, flat(net.parameters())) < 1e-5


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_compiled_model_is_inferred_and_run_again():
    torch._dynamo.reset()
    net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(12, 8)
    cut = mb.cut(torch.compile(net, backend="aot_eager"), x, batch_size=4, keep="recompute")
    found = cut.grad_of(cut.value[[1, 6]].square().sum())
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(net(leaf)[[1, 6]].square().sum(), leaf)
    torch.testing.assert_close(found.dense(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("keep", ["recompute", "graph"])
def test_a_checkpointed_model_is_run_again_once_for_many_losses(keep):
    from torch.utils.checkpoint import checkpoint

    net, calls = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), []

    def counted(x):
        calls.append(len(x))
        return net(x)

    x = torch.randn(8, 8)
    cut = mb.cut(lambda x: checkpoint(counted, x, use_reentrant=False), x, batch_size=8, keep=keep)
    calls.clear()
    for row in cut.value:
        row.square().sum().backward()
    cut.backward()
    assert calls == ([8] if keep == "graph" else [8, 8])  # the segment's own recomputation, and ours before it
    found = flat(net.parameters())
    net.zero_grad()
    net(x).square().sum().backward()
    assert distance(found, flat(net.parameters())) < 1e-5


def test_overlapping_slices_give_each_its_own_gradient_where_the_leaf_adds_them_up():
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(10, 6, requires_grad=True)
    cut = mb.cut(net, x.detach(), batch_size=4, keep="recompute")
    output, windows = net(x), list(itertools.pairwise(range(0, 10, 2)))
    read = []
    for start, stop in windows:
        output[start : stop + 1].square().sum().backward(retain_graph=True)
        read.append(x.grad[stop].clone())
    for (start, stop), from_leaf in zip(windows, read, strict=True):
        found = cut.grad_of(cut.value[start : stop + 1].square().sum())
        (expected,) = torch.autograd.grad(output[start : stop + 1].square().sum(), x, retain_graph=True)
        torch.testing.assert_close(found.dense(), expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(from_leaf, expected[stop], rtol=1e-4, atol=1e-6)
    # the row where two windows meet: the leaf holds both
    torch.testing.assert_close(x.grad[2], 2 * cut.grad_of(cut.value[2].square().sum()).values[0], rtol=1e-4, atol=1e-6)
