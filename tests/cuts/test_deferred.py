"""Rows are inferred first and differentiated later: exact whatever the model, or refused by name."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import multiback as mb
from multiback.states import Randomness
from zoo import one_thread

ROWS, WIDTH, SIZE = 12, 4, 5
WAYS = ["recompute", "graph", "auto"]


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def data():
    return torch.randn(ROWS, WIDTH)


def in_batches(model, data, size=SIZE):
    """The outputs that a hand-written loop over batches gives, with their graph."""
    return torch.cat([model(part.clone()) for part in data.split(size)])


def assert_close(found, expected, tolerance=1e-4):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    largest = max(float(one.norm()) for one in expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).norm()) <= tolerance * max(float(other.norm()), largest / 100)


def check_requests(model, data, parameters, cut, losses, size=SIZE):
    """Data and parameter gradients of each loss, alone and together, and what is accumulated."""
    leaf = data.detach().clone().requires_grad_()
    state = Randomness.read()
    cut.start.restore()
    output = in_batches(model, leaf, size)
    state.restore()
    expected = [torch.autograd.grad(loss(output), [leaf, *parameters], retain_graph=True) for loss in losses]
    for loss, (of_data, *of_parameters) in zip(losses, expected, strict=True):
        assert_close([cut.it.grad_of(loss(cut.it.value)).dense()], [of_data])
        assert_close(cut.it.grad_of(loss(cut.it.value), wrt=parameters), of_parameters)
    together = [loss(cut.it.value) for loss in losses]
    for found, (of_data, *_) in zip(cut.it.grads_of(together, retain_graph=True), expected, strict=True):
        assert_close([found.dense()], [of_data])
    for found, (_, *of_parameters) in zip(cut.it.grads_of(together, wrt=parameters), expected, strict=True):
        assert_close(found, of_parameters)
    if isinstance(model.model, Scaled):
        return  # its gradient of a sum is not the sum of its gradients
    for parameter in parameters:
        parameter.grad = None
    for loss in losses:
        loss(cut.it.value).backward()
    cut.it.backward()
    summed = [sum(column) for column in zip(*(of_parameters for _, *of_parameters in expected), strict=True)]
    assert_close([parameter.grad for parameter in parameters], summed)


class Made:
    """A cut, and the random state from which its inference began."""

    def __init__(self, model, data, **options):
        self.start = Randomness.read()
        self.it = mb.cut(model, data, **{"batch_size": SIZE, **options})


LOSSES = [
    lambda y: y[7:8].square().sum(),
    lambda y: y[:3].sin().sum(),
    lambda y: (y[2] * y[9]).sum(),
    lambda y: y.logsumexp(0).sum(),
]


def normed():
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 6)), nn.Tanh(), nn.Linear(6, 3))


class Straight(nn.Module):
    """Row-local by its graph; its gradient is scaled by a statistic of the batch that the value does not show."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x):
        h = self.layer(x)
        y = (h / h.detach().abs().amax()).clamp(-1, 1)
        return torch.sign(h).detach() + y - y.detach()


class Baseline(Straight):
    def forward(self, x):
        p = self.layer(x).sigmoid()
        reward = x.sum(1, keepdim=True)
        return (p - p.detach()) * (reward - reward.mean()) + x[:, :3]


class Hooked(Straight):
    def forward(self, x):
        h = self.layer(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient - gradient.mean(0))
        return h.tanh()


class Scaled(Hooked):
    def forward(self, x):
        h = self.layer(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        return h.tanh()


class HookedByBatch(Straight):
    """A hook that only some batches have."""

    def forward(self, x):
        h = self.layer(x)
        if x.detach().mean().item() > 0 and h.requires_grad:
            h.register_hook(lambda gradient: gradient * 4)
        return h.tanh()


class Changing(Straight):
    """Other operations, or other dimensions of the same, for some batches."""

    def forward(self, x):
        h = self.layer(x)
        return h - h.mean(1 if len(x) == SIZE else 0, keepdim=True)


class Softening(Straight):
    def forward(self, x):
        return self.layer(x).softmax(1 if x.detach().sum().item() > 0 else 0)


class Offset(Straight):
    """Seeds itself, so that the random state ends as it began, and hides its dropout behind an offset."""

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return F.dropout(self.layer(x), 0.5) - 1e4


class Mean(Straight):
    def forward(self, x):
        h = self.layer(x)
        return h + (h.mean(0) - h.mean(0).detach())


class Branching(Straight):
    def forward(self, x):
        h = self.layer(x)
        return h.tanh() if len(x) > 3 else h.sin()


class Gated(Straight):
    """A statistic of the batch that is a number scales the gradient, and not the value."""

    def forward(self, x):
        h = self.layer(x)
        gate = 1.0 if x.detach().mean().item() > 0 else 0.25
        return h.detach() + gate * (h - h.detach())


class Detaching(Straight):
    def forward(self, x):
        h = self.layer(x)
        return (h if x.detach().mean().item() > 0 else h.detach()).tanh() + self.layer(x)


class Squeezed(Straight):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return torch.stack([self.last(self.layer(x).tanh()).squeeze(), x[:, 0]], -1)


class Energy(Straight):
    """Differentiates inside its forward, as models of forces do."""

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            energy = self.layer(x).tanh().square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


class InPlace(Straight):
    def forward(self, x):
        x[x > 1] = 0
        return self.layer(x).tanh()


class Checkpointed(Straight):
    def forward(self, x):
        return checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False)


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.4), nn.Linear(8, 3)),
    "batch norm in train mode": normed,
    "batch norm in eval mode": lambda: normed().eval(),
    "spectral norm": spectral,
    "checkpointed": Checkpointed,
    "statistic behind detach": Straight,
    "baseline behind detach": Baseline,
    "hook that mixes rows": Hooked,
    "hook that scales": Scaled,
    "hook by the batch": HookedByBatch,
    "dimensions that change": Changing,
    "softmax that changes": Softening,
    "mean that cancels": Mean,
    "branch by size": Branching,
    "force": Energy,
    "gate by the batch": Gated,
    "detached by the batch": Detaching,
    "squeezed": Squeezed,
    "in place": InPlace,
}


@pytest.mark.parametrize("keep", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_every_request_equals_the_loop_over_batches(name, keep, data):
    model = MODELS[name]()
    cut = Made(model, data.clone(), keep=keep)
    buffers = [buffer.clone() for buffer in model.buffers()]
    again = MODELS[name]()
    again.load_state_dict(model.state_dict())
    again.train(model.training)
    if name == "spectral norm":  # power iterations go on at each forward
        torch.manual_seed(0)
        data = torch.randn(ROWS, WIDTH)
        again = MODELS[name]()
        copied = list(again.parameters())
    if name == "spectral norm":
        output = in_batches(again, data)
        for loss in LOSSES:
            expected = torch.autograd.grad(loss(output), copied, retain_graph=True)
            assert_close(cut.it.grad_of(loss(cut.it.value), wrt=list(model.parameters())), expected)
    else:
        reference = Reference(again, model)
        check_requests(reference, data, list(model.parameters()), cut, LOSSES)
    for buffer, expected in zip(model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, expected)


class Reference:
    """Another copy of the model, by the parameters of the first."""

    def __init__(self, again, model):
        self._again, self.model = again, model

    def __call__(self, x):
        named = dict(self.model.named_parameters())
        return torch.func.functional_call(self._again, named, (x,))


def test_graphs_that_were_asked_for_are_what_answers():
    net, calls = nn.Linear(WIDTH, 3), []

    def model(x):
        calls.append(len(x))
        return net(x).tanh()

    data = torch.randn(ROWS, WIDTH)
    cut = mb.cut(model, data, batch_size=SIZE, keep="graph")
    calls.clear()
    cut.grad_of(cut.value[3].sum())
    assert calls == []
    cut = mb.cut(model, data, batch_size=SIZE)
    calls.clear()
    cut.grad_of(cut.value[3].sum())
    assert calls == [1]


def test_what_lies_behind_another_cut_is_an_error_and_not_zero():
    first, second, data = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3), torch.randn(ROWS, WIDTH)
    one, other = mb.cut(first, data), mb.cut(second, data)
    with pytest.raises(mb.RequestError, match=r"wrt\['weight'\]: must not lie behind another cut"):
        one.grad_of((one.value * other.value).sum(), wrt=second)
    assert one.grad_of((one.value * other.value).sum(), wrt=first)["weight"].shape == (3, WIDTH)
    trunk = mb.cut(first(data))
    head = mb.cut(nn.Linear(3, 2)(trunk.value))
    with pytest.raises(mb.RequestError, match="must not lie behind another cut"):
        head.grad_of(head.value.sum(), wrt=first)


def test_a_tensor_that_inference_made_is_no_target():
    net, seen = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh()), []
    net[0].register_forward_hook(lambda _module, _given, output: seen.append(output))
    cut = mb.cut(net, torch.randn(ROWS, WIDTH), batch_size=SIZE, keep="recompute")
    with pytest.raises(mb.RequestError, match="must be a leaf, or part of the loss's or the data's own graph"):
        cut.grad_of(cut.value[3].sum(), wrt=seen[0])


def test_the_data_tensor_as_wrt_says_to_leave_it_out():
    data = torch.randn(ROWS, WIDTH)
    cut = mb.cut(nn.Linear(WIDTH, 3), data)
    with pytest.raises(mb.RequestError, match="Leave wrt out"):
        cut.grad_of(cut.value[3].sum(), wrt=data)


@pytest.mark.parametrize(
    "option", [{"batch_size": 4}, {"keep": "graph"}, {"budget": 10}, {"device": "cpu"}, {"workers": 1}], ids=str
)
def test_options_of_the_other_form_are_refused(option):
    with pytest.raises(mb.InputError, match=f"{next(iter(option))}: must go with a model and its data"):
        mb.cut(nn.Linear(WIDTH, 3)(torch.randn(ROWS, WIDTH)), **option)
