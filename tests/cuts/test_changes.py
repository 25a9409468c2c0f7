"""What has changed since inference is noticed, however it was changed; what a request gives and leaves is its own."""

import copy
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import multiback as mb
from multiback.cuts import fingerprints

ROWS, WIDTH = 12, 4


@pytest.fixture
def data():
    return torch.randn(ROWS, WIDTH)


# ---- fingerprints ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
@pytest.mark.parametrize("count", [2, 6, 200, 70_000])
def test_a_sign_that_flips_is_seen_alone_and_in_pairs(dtype, count):
    values = torch.rand(1, count, dtype=dtype) + 1
    before = fingerprints.of_rows(values)
    for flipped in ([0], [0, 1], range(count), range(0, count, 2)):
        other = values.clone()
        other[0, list(flipped)] = -other[0, list(flipped)]
        assert fingerprints.of_rows(other) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64])
def test_one_hot_rows_have_prints_of_their_own(dtype):
    assert len(set(fingerprints.of_rows(torch.eye(512).to(dtype)).tolist())) == 512


def test_rows_have_the_same_print_wherever_their_memory_begins():
    values = torch.randn(97)
    odd = values[1:].view(16, 6)
    assert torch.equal(fingerprints.of_rows(odd), fingerprints.of_rows(odd.clone()))


# ---- what is noticed ---------------------------------------------------------------------------


class Equal(nn.Linear):
    """Compares equal to any other of its kind."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 1


class Strong(nn.Module):
    kind = 2.0

    def __init__(self):
        super().__init__()
        self.register_buffer("strength", torch.tensor(1.0))
        self._private, self.empty, self.pair, self.scalar = 1.0, None, (1.0, 2), np.float64(1.0)

    def forward(self, rows):
        return rows * self.strength * self._private * self.kind


def replace_child(net):
    net[0] = copy.deepcopy(net[0])


def reorder_children(net):
    net._modules = dict(reversed(net._modules.items()))


def replace_buffer(net):
    net[1].strength = torch.tensor(1.0)


def conjugate(net):
    net[0].weight.data = torch._neg_view(net[0].weight.data)


def free(net):
    net[0].weight.untyped_storage().resize_(0)


def prune(net):
    nn.utils.parametrizations.weight_norm(net[0])


def setting(name, value):
    return lambda net: setattr(net[1], name, value)


@pytest.mark.parametrize(
    "change",
    [
        replace_child,
        reorder_children,
        replace_buffer,
        conjugate,
        free,
        prune,
        pytest.param(setting("_private", 3.0), id="private"),
        pytest.param(setting("empty", 3.0), id="empty"),
        pytest.param(setting("pair", (1.0, 3)), id="pair"),
        pytest.param(setting("scalar", np.float64(3.0)), id="scalar"),
        pytest.param(setting("kind", 3.0), id="kind"),
    ],
)
@pytest.mark.parametrize("keep", ["recompute", "graph"])
def test_whatever_has_changed_is_an_error(data, change, keep):
    torch.manual_seed(0)
    net = nn.Sequential(Equal(WIDTH, 3), Strong())
    cut = mb.cut(net, data, batch_size=5, keep=keep)
    cut.grad_of(cut.value[3].sum())
    change(net)
    with pytest.raises(mb.StaleForwardError, match="has changed since inference"):
        cut.grad_of(cut.value[3].sum())


@pytest.mark.parametrize("scale", [1e-30, 1e-23, 1e25])
def test_outputs_of_any_size_are_checked(data, scale):
    factor = [1.0]
    cut = mb.cut(lambda rows: rows * scale * factor[0], data, batch_size=5, keep="recompute")
    cut.grad_of(cut.value[3].sum())
    factor[0] = 2.0
    with pytest.raises(mb.RecomputationError):
        cut.grad_of(cut.value[3].sum())


# ---- what is left alone ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw", [np.random.rand, random.random, lambda: torch.rand(1)], ids=["numpy", "python", "torch"]
)
def test_numbers_that_single_rows_draw_are_put_back(data, draw):
    def model(rows):
        return torch.tanh(rows + (0 * float(draw()) if len(rows) == 1 else 0))

    cut = mb.cut(model, data, batch_size=5, keep="recompute")
    before = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    cut.grad_of(cut.value[3].sum())
    assert float(draw()) == float(expected)
    del before


def test_numpy_s_cached_normal_counts_as_a_number_drawn(data):
    np.random.seed(0)
    cut = mb.cut(lambda rows: rows * float(np.random.randn()), data, batch_size=3, keep="recompute")
    state = np.random.get_state()
    for row in range(0, ROWS, 3):
        cut.grad_of(cut.value[row].sum())
    assert np.random.get_state()[2:] == state[2:]


def test_a_gradient_that_the_caller_put_on_the_value_stays_the_caller_s(net, data):
    cut = mb.cut(net, data, batch_size=5)
    mine = torch.ones(ROWS, 3)
    cut.value.grad = mine
    cut.backward()
    assert mine.eq(1).all()


def test_an_expanded_gradient_on_the_value_is_sent_on(net, data):
    cut = mb.cut(net, data, batch_size=5)
    cut.value.grad = torch.ones(1, 1).expand(ROWS, 3)
    cut.backward()
    expected = torch.autograd.grad(net(data).sum(), net[0].weight)[0]
    torch.testing.assert_close(net[0].weight.grad, expected)


def test_returned_gradients_have_memory_of_their_own():
    one, two = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    cut = mb.cut(lambda a, b: (a + b).sum(1), (one, two), batch_size=5, keep="recompute")
    values = cut.grad_of(cut.value[3]).values
    values[0].mul_(100)
    values[0][0, 0] = 5
    assert values[0].tolist() == [[5, 100, 100, 100]]
    assert values[1].tolist() == [[1, 1, 1, 1]]


def test_a_frozen_value_is_refused(net, data):
    cut = mb.cut(net, data, batch_size=5)
    loss = cut.value.sum()
    cut.value.requires_grad_(False)
    with pytest.raises(mb.RequestError, match="must require grad, as it is made"):
        cut.grad_of(loss)


def test_an_attribute_that_a_request_makes_is_gone_afterwards(net, data):
    class Born(nn.Module):
        def forward(self, rows):
            if len(rows) == 1:
                self.born = 1
            return torch.tanh(rows)

    model = nn.Sequential(net, Born())
    cut = mb.cut(model, data, batch_size=5, keep="recompute")
    cut.grad_of(cut.value[3].sum())
    assert "born" not in vars(model[1])


def test_the_first_use_moves_no_generator():
    code = (
        "import random; random.seed(0); import multiback as mb, torch\n"
        "before = random.getstate(); mb.cut; mb.trace\n"
        "with mb.trace() as traced: torch.ones(1, requires_grad=True).sum().backward()\n"
        "str(traced); mb.cut(lambda rows: rows * 2, torch.ones(4, 2), progress=True)\n"
        "assert random.getstate() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
