"""What a cut leaves alone or puts back, what it notices, and what it refuses as stale."""

import copy
import gc
import random
import signal
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import multiback as mb
from multiback.states import Randomness
from zoo import one_thread

ROWS = 11


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def x():
    return torch.randn(ROWS, 4)


def block(*more):
    return nn.Sequential(nn.Linear(4, 6), *more, nn.Tanh(), nn.Linear(6, 3))


class World:
    """All that a request might leave changed."""

    def __init__(self, *modules):
        self.modules = modules
        self.random = Randomness.read()
        self.modes = [part.training for module in modules for part in module.modules()]
        self.buffers = [buffer.clone() for module in modules for buffer in module.buffers()]
        self.grads = [parameter.grad for module in modules for parameter in module.parameters()]
        self.hooks = [len(part._forward_hooks) for module in modules for part in module.modules()]
        self.flags = self._flags()

    @staticmethod
    def _flags():
        return (
            torch.is_grad_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
            torch.is_autocast_enabled("cpu"),
            len(nn.modules.module._global_forward_pre_hooks),
            len(nn.modules.module._global_forward_hooks),
        )

    def assert_same(self, *, randomness=True):
        now = World(*self.modules)
        assert not randomness or self.random.same_as(now.random)
        assert (now.modes, now.hooks, now.flags) == (self.modes, self.hooks, self.flags)
        assert all(one is two for one, two in zip(self.grads, now.grads, strict=True))
        assert all(torch.equal(one, two) for one, two in zip(self.buffers, now.buffers, strict=True))


@pytest.mark.parametrize("keep", ["recompute", "graph"])
def test_requests_leave_everything_as_it_was(x, keep):
    net = block(nn.BatchNorm1d(6), nn.Dropout(0.3))
    cut = mb.cut(net, x, batch_size=4, keep=keep)
    net.eval()
    world = World(net)
    cut.grad_of(cut.value[2].sum())
    cut.grad_of(cut.value[[1, 10]].sum(), wrt=net)
    cut.grads_of([cut.value[0].sum(), cut.value[5].sum()], wrt=net)
    world.assert_same()
    cut.value.sum().backward()
    cut.backward()
    world.grads = [parameter.grad for parameter in net.parameters()]
    world.assert_same()


def test_batch_norm_s_statistics_are_updated_once_as_by_a_loop_over_batches(x):
    net = block(nn.BatchNorm1d(6))
    again = copy.deepcopy(net)
    cut = mb.cut(net, x, batch_size=4, keep="recompute")
    cut.value.square().sum().backward()
    cut.backward()
    sum(again(part).square().sum() for part in x.split(4)).backward()
    for one, other in zip(net.buffers(), again.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(net.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert "BatchNorm" in cut.coupling


def test_the_modes_of_inference_are_replayed(x):
    net = block(nn.Dropout(0.5)).eval()
    cut = mb.cut(net, x, batch_size=4, keep="recompute")
    net.train()
    found = cut.grad_of(cut.value[3].sum(), wrt=net)
    assert net.training
    expected = mb.grad(net.eval()(x)[3].sum(), net)
    for name, one in found.items():
        torch.testing.assert_close(one, expected[name])


def test_modules_that_a_function_calls_are_met_as_it_calls_them(x):
    parts = {"norm": nn.BatchNorm1d(4), "head": block(nn.Dropout(0.4))}

    def helper(x):
        return parts["head"](parts["norm"](x))

    cut = mb.cut(lambda x: helper(x) * 1, x, batch_size=4, keep="recompute")
    assert parts["norm"].num_batches_tracked == 3
    parts["head"].eval()
    parts["norm"].eval()
    world = World(*parts.values())
    cut.grad_of(cut.value[[1, 9]].sum())
    cut.grad_of(cut.value.sum(), wrt=parts["head"])
    world.assert_same()
    parts["norm"].weight.data.mul_(2)
    with pytest.raises(mb.StaleForwardError, match='parameter "weight"'):
        cut.grad_of(cut.value.sum(), wrt=parts["head"])


def test_python_s_and_numpy_s_random_numbers_are_replayed(x):
    layer = nn.Linear(4, 3)

    def model(x):
        scale = random.random() + np.random.rand()
        return layer(x).tanh() * scale

    random.seed(1)
    np.random.seed(1)
    cut = mb.cut(model, x, batch_size=4, keep="recompute")
    before = random.getstate()
    random.seed(1)
    np.random.seed(1)
    y = torch.cat([model(part) for part in x.split(4)])
    random.setstate(before)
    expected = torch.autograd.grad(y[[2, 10]].sum(), layer.weight)
    found = cut.grad_of(cut.value[[2, 10]].sum(), wrt=layer.weight)
    torch.testing.assert_close(found, expected[0])
    assert random.getstate() == before


def test_autocast_is_replayed(x):
    net = block()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cut = mb.cut(net, x, batch_size=4, keep="recompute")
        y = net(x)
    assert cut.value.dtype == torch.bfloat16
    found = cut.grad_of(cut.value[[2, 9]].float().square().sum(), wrt=net)
    expected = mb.grad(y[[2, 9]].float().square().sum(), net)
    for name, one in found.items():
        torch.testing.assert_close(one, expected[name], rtol=2e-2, atol=2e-2)


def test_padded_positions_are_as_with_a_graph():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(ROWS, 5, 8), torch.zeros(ROWS, 5, dtype=torch.bool)
    padding[:, 3:] = True
    model = lambda x, padding: encoder(x, src_key_padding_mask=padding)  # noqa: E731
    cut = mb.cut(model, (x, padding), batch_size=4, keep="recompute")
    torch.testing.assert_close(cut.value.detach(), model(x, padding).detach())
    found = cut.grad_of(cut.value[7].square().sum())
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(leaf, padding)[7].square().sum(), leaf)
    torch.testing.assert_close(found.values[0], expected[found.rows], rtol=1e-4, atol=1e-5)


class Hidden(nn.Module):
    """Each forward differs from the last."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), []

    def forward(self, x):
        self.calls.append(len(x))
        return self.layer(x) * len(self.calls)


class OwnGenerator(Hidden):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.layer(x) * torch.rand(len(x), 1, generator=self.generator) - 1e3


class Outlier(OwnGenerator):
    def forward(self, x):
        scale = torch.ones(len(x), 1)
        scale[0] = 1e6
        return super().forward(x) * scale


class Seeded(Hidden):
    """Seeds its dropout itself, so that the random state ends as it began."""

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return F.dropout(self.layer(x), 0.5) - 1e4


@pytest.mark.parametrize("kind", [Hidden, OwnGenerator, Outlier])
def test_an_output_that_differs_when_run_again_is_an_error(x, kind):
    cut = mb.cut(kind(), x, batch_size=4, keep="recompute")
    loss = cut.value[5].sum()
    with pytest.raises(mb.RecomputationError, match=r"output 0 of row \d+ differs by [\d.]+% .*hidden state"):
        cut.grad_of(loss, retain_graph=True)
    kept = mb.cut(kind(), x, batch_size=4, keep="graph")
    assert kept.grad_of(kept.value[4:8].sum()).rows.tolist() == [4, 5, 6, 7]


def test_a_model_that_seeds_itself_is_run_again_whole(x):
    model = Seeded()
    cut = mb.cut(model, x, batch_size=4, keep="recompute")
    found = cut.grad_of(cut.value[6].sum(), wrt=model)
    y = torch.cat([model(part) for part in x.split(4)])
    torch.testing.assert_close(found, mb.grad(y[6].sum(), model))


@pytest.mark.parametrize("keep", ["recompute", "graph"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net, x: torch.optim.SGD(net.parameters(), 0.1).step(), 'parameter "0.weight" has changed'),
        (lambda net, x: net[0].bias.data.add_(1), 'parameter "0.bias" has changed'),
        (lambda net, x: net[3].weight.data[0, 0].add_(1), 'parameter "3.weight" has changed'),
        (lambda net, x: net.load_state_dict(changed(net), assign=True), 'parameter "0.weight" has changed'),
        (lambda net, x: net.__setitem__(0, nn.Linear(4, 6)), None),
        (lambda net, x: net[1].running_mean.add_(1), 'buffer "1.running_mean" has changed'),
        (lambda net, x: x[6].mul_(2), "row 6 is not what it was at inference"),
        (lambda net, x: x.data[6].flip(0).copy_(x[6]), None),
        (lambda net, x: x.numpy()[6].fill(0), "row 6 is not what it was"),
    ],
    ids=["step", "data", "element", "assigned", "replaced", "buffer", "row", "nothing", "numpy"],
)
def test_what_changed_between_inference_and_backward_is_named(x, change, message, keep):
    net = block(nn.BatchNorm1d(6)).eval()
    net(x).sum().backward()
    cut = mb.cut(net, x, batch_size=4, keep=keep)
    change(net, x)
    if message is None:
        return
    with pytest.raises(mb.StaleForwardError, match=message):
        cut.grad_of(cut.value[6].sum(), wrt=net)
    cut.value[6].sum().backward()
    with pytest.raises(mb.StaleForwardError, match=message):
        cut.backward()
    cut.value.grad = None


def changed(net):
    return {name: value + 1 if value.is_floating_point() else value for name, value in net.state_dict().items()}


def test_a_replaced_parameter_is_named(x):
    net = block()
    cut = mb.cut(net, x, batch_size=4)
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    with pytest.raises(mb.StaleForwardError, match=r'parameter "0\.weight"'):
        cut.grad_of(cut.value.sum(), wrt=net)


def test_a_parameter_in_a_model_without_modules_is_named_by_its_shape(x):
    weight = torch.randn(4, 3, requires_grad=True)
    cut = mb.cut(lambda x: (x @ weight).tanh(), x, batch_size=4)
    weight.data.add_(1)
    with pytest.raises(mb.StaleForwardError, match=r"a leaf of shape \[4, 3\] has changed"):
        cut.grad_of(cut.value.sum())


def test_an_error_between_traversals_loses_nothing_and_counts_nothing_twice(x):
    net, calls = block(), []

    def model(part):
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return net(part)

    stop = 10**6
    cut = mb.cut(model, x, batch_size=4, keep="recompute")
    cut.value.square().sum().backward()
    stop = len(calls) + 2  # in the forward of the second batch
    with pytest.raises(KeyboardInterrupt):
        cut.backward()
    cut.backward()
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", ["recompute", "graph"])
def test_an_error_inside_a_traversal_must_be_followed_by_a_fresh_start(x, keep):
    net = block()
    leaf = x.clone().requires_grad_()
    cut = mb.cut(net, leaf, batch_size=4, keep=keep)
    calls = []

    def fail_once(gradient):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return gradient

    cut.value.square().sum().backward()
    handle = net[0].weight.register_hook(fail_once)
    with pytest.raises(KeyboardInterrupt):
        cut.backward()
    handle.remove()
    with pytest.raises(mb.RequestError, match=r"must not follow one that an error stopped.*Set all \.grad to None"):
        cut.backward()
    net.zero_grad()
    leaf.grad = cut.value.grad = None
    cut.value.square().sum().backward()
    cut.backward()
    twin = x.clone().requires_grad_()
    expected = torch.autograd.grad(net(twin).square().sum(), [twin, *net.parameters()])
    for tensor, gradient in zip([leaf, *net.parameters()], expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-4, atol=1e-5)


def test_a_hook_that_acts_on_complete_gradients_is_refused_where_there_are_several_batches(x):
    net = block()
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    handle = net[0].weight.register_post_accumulate_grad_hook(lambda _: optimiser.step())
    cut = mb.cut(net, x, batch_size=4)
    cut.value.sum().backward()
    with pytest.raises(mb.RequestError, match=r'post-accumulate hook.*got one on parameter "0\.weight"'):
        cut.backward()
    handle.remove()
    cut.backward()
    net[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    assert 'A hook on parameter "0.weight" acts on each batch' in mb.cut(net, x, batch_size=4).report()


def test_attributes_that_a_forward_changes_are_replayed_and_ones_that_are_set_are_noticed(x):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.strength = nn.Linear(4, 3), 0, 1.0

        def forward(self, given):
            self.calls += 1
            hidden = self.layer(given)
            return hidden.detach() + self.calls * self.strength * (hidden - hidden.detach())

    model = Counting()
    cut = mb.cut(model, x, batch_size=4, keep="recompute")
    assert model.calls == 3
    found = cut.grad_of(cut.value[[1, 9]].sum(), wrt=model.layer.weight)
    torch.testing.assert_close(found, (x[1] + 3 * x[9]).expand(3, 4))
    assert model.calls == 3
    model.strength = 2.0
    with pytest.raises(mb.StaleForwardError, match='attribute "strength" of Counting'):
        cut.grad_of(cut.value[1].sum())


@pytest.mark.parametrize("where", ["model", "data", "loss"])
def test_interruptions_leave_no_global_state(x, where):
    net = block(nn.BatchNorm1d(6), nn.Dropout(0.2))
    stop = {"after": 10**6}

    class Stopping(Dataset):
        def __len__(self):
            return ROWS

        def __getitem__(self, row):
            stop["after"] -= where == "data"
            if stop["after"] < 0:
                raise KeyboardInterrupt
            return x[row]

    def model(x):
        found = net(x)
        stop["after"] -= where == "model"
        if stop["after"] < 0:
            raise KeyboardInterrupt
        return found

    def asked():
        cut = mb.cut(model, Stopping(), batch_size=4, keep="recompute")
        stop["after"] = 0
        if where == "loss":
            with cut:
                cut.value.sum().backward()
                raise KeyboardInterrupt
        cut.grad_of(cut.value.sum())

    for after in (2, 10**6):
        stop["after"] = after
        net.train()
        world = World(net)
        with pytest.raises(KeyboardInterrupt):
            asked()
        world.buffers = [buffer.clone() for buffer in net.buffers()]  # inference updates statistics
        world.assert_same(randomness=False)
        stop["after"] = 10**6
    cut = mb.cut(net, x, batch_size=4)
    cut.grad_of(cut.value.sum())


def test_a_failing_model_s_own_error_comes_through_and_it_is_run_once(x):
    calls = []

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, given):
            if torch.equal(given, x[4:8]):
                calls.append(1)
                raise ZeroDivisionError("mine")
            return self.layer(given)

    with pytest.raises(ZeroDivisionError, match="mine"):
        mb.cut(Failing(), x, batch_size=4)
    assert len(calls) == 1


def test_a_killed_process_leaves_no_workers_behind(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, time, torch, multiback as mb
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 1000
            def __getitem__(self, row):
                if row == 3:
                    print(os.getpid(), flush=True)
                if row > 3:
                    time.sleep(60)
                return torch.zeros(4)
        if __name__ == "__main__":
            mb.cut(torch.nn.Linear(4, 2), Slow(), batch_size=2, workers=1)
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as running:
        worker = psutil.Process(int(running.stdout.readline()))
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) != 0
    _, alive = psutil.wait_procs([worker], timeout=30)  # a worker looks for its parent every few seconds
    assert not alive


def test_a_request_leaves_no_graph_of_its_batch(x):
    net, alive = block(), []

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            hidden = self.net[0](x)
            if hidden.requires_grad:
                alive.append(weakref.ref(hidden))
            return self.net[2](self.net[1](hidden))

    gc.disable()
    try:
        cut = mb.cut(Seen(), x, batch_size=4, keep="recompute")
        cut.grad_of(cut.value[3].sum())
        cut.grad_of(cut.value.sum(), wrt=net)
        cut.value.sum().backward()
        cut.backward()
        assert len(alive) > 3
        assert all(one() is None for one in alive)
        whole = weakref.ref(cut)
        del cut
        assert whole() is None
    finally:
        gc.enable()
