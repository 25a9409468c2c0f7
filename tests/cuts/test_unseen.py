"""What no graph shows never makes a gradient wrong; what cannot be cut is refused by name; nothing is left behind."""

import collections
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import multiback as mb
from multiback.cuts import locality
from multiback.errors import OptionError

ROWS, WIDTH, SIZE = 12, 4, 5
KEEPS = ("recompute", "graph", "auto")


@pytest.fixture
def data():
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH)


def by_batches(model, data, losses):
    """Gradients of the data by plain torch: a forward for every batch, a traversal for every loss."""
    leaf = data.clone().requires_grad_()
    whole = torch.cat([model(part) for part in leaf.split(SIZE)])
    return [torch.autograd.grad(loss(whole), leaf, retain_graph=True)[0] for loss in losses]


LOSSES = [
    lambda value: 1000 * value[7].sum(),
    lambda value: 1000 * value[8].sin().sum(),
    lambda value: value[1].square().sum() + value[9].sum(),
]


def assert_exact(model, data, keep):
    cut = mb.cut(model, data, batch_size=SIZE, keep=keep)
    expected = by_batches(model, data, LOSSES)
    singly = [cut.grad_of(loss(cut.value)) for loss in LOSSES]
    together = cut.grads_of([loss(cut.value) for loss in LOSSES])
    for alone, shared, wanted in zip(singly, together, expected, strict=True):
        torch.testing.assert_close(alone.dense(), wanted)
        torch.testing.assert_close(shared.dense(), wanted)


# ---- rows that meet where no graph shows it, and not yet in the first batch ---------------------


def masked_tokens(layer):
    def model(rows):
        tokens = rows.view(len(rows) * 2, 2)
        hidden = layer(tokens.repeat(1, 2)).tanh()
        size = tokens.detach().norm(dim=1)
        kept = ((size.argsort(descending=True).argsort() < 6) | (size < 1))[:, None]
        return torch.where(kept, hidden, hidden.detach()).view(len(rows), -1)

    return model


def scaled_by_first_row(layer):
    def model(rows):
        hidden = layer(rows)
        return hidden.detach() + (hidden - hidden.detach()) * rows[0, :3].detach()

    return model


def scaled_by_first_row_for_each(layer):
    def model(rows):
        hidden = layer(rows)
        return hidden.detach() + (hidden - hidden.detach()) * rows[:1, :3].detach().expand(len(rows), 3)

    return model


def scaled_by_mean_for_each(layer):
    def model(rows):
        hidden = layer(rows)
        return hidden.detach() + (hidden - hidden.detach()) * rows.detach().mean(0)[:3].expand(len(rows), 3)

    return model


def centred_by_hook(layer):
    def model(rows):
        hidden = layer(rows)
        if float(rows.detach()[0, 0]) < 0:
            hidden.register_hook(lambda gradient: gradient - gradient.mean(0))
        return hidden.tanh()

    return model


def clipped_by_hook(layer):
    def model(rows):
        hidden = layer(rows)
        hidden.register_hook(lambda gradient: gradient * min(1.0, 30 / (float(gradient.norm()) + 1e-9)))
        return hidden.tanh()

    return model


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    "make",
    [
        masked_tokens,
        scaled_by_first_row,
        scaled_by_first_row_for_each,
        scaled_by_mean_for_each,
        centred_by_hook,
        clipped_by_hook,
    ],
    ids=lambda make: make.__name__,
)
def test_rows_that_meet_only_in_later_batches_have_their_own_gradients(make, keep, data):
    torch.manual_seed(0)
    data[:SIZE] *= 0.2 / data[:SIZE].norm(dim=1, keepdim=True)
    data[:SIZE, :3] = data[0, :3]
    data[0, 0], data[SIZE, 0] = 0.1, -1.0
    assert_exact(make(nn.Linear(WIDTH, 3)), data, keep)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("keep", KEEPS)
def test_a_legacy_hook_on_a_module_holds_its_batch_together(net, data, keep):
    net[0].register_backward_hook(lambda _module, given, _out: tuple(one and one * 2 for one in given))
    assert "hooks on tensors or modules" in mb.cut(net, data, batch_size=SIZE, keep=keep).coupling


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_net_that_starts_from_zeros_runs_its_rows_alone(kind):
    torch.manual_seed(0)
    layer, sequences = kind(WIDTH, 3, batch_first=True), torch.randn(ROWS, 6, WIDTH)
    seen = []

    def model(rows):
        seen.append(len(rows))
        return layer(rows)[0]

    cut = mb.cut(model, sequences, batch_size=SIZE, keep="recompute")
    seen.clear()
    found = cut.grad_of(cut.value[7].sum())
    assert (seen, cut.coupling, found.rows.tolist()) == ([1, 2], "", [7])  # one row alone takes other operations
    seen.clear()
    cut.grad_of(cut.value[9].sum())
    assert seen == [2]
    leaf = sequences.clone().requires_grad_()
    torch.testing.assert_close(found.dense(), torch.autograd.grad(layer(leaf)[0][7].sum(), leaf)[0])


def test_positions_that_are_the_same_for_every_row_leave_rows_alone():
    torch.manual_seed(0)
    places, layer = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, 3)
    cut = mb.cut(
        lambda rows: layer(rows + places(torch.arange(6).expand(len(rows), 6))),
        torch.randn(ROWS, 6, WIDTH),
        batch_size=SIZE,
    )
    assert cut.coupling == ""
    assert cut.grad_of(cut.value[7].sum()).rows.tolist() == [7]


def test_rows_that_never_match_their_batch_are_not_tried_for_ever(data):
    seen = []
    layer = nn.Linear(WIDTH, 3)

    def model(rows):
        seen.append(len(rows))
        return scaled_by_first_row(layer)(rows)

    data[:SIZE, :3] = data[0, :3]
    cut = mb.cut(model, data, batch_size=SIZE, keep="recompute")
    for _ in range(12):
        cut.grad_of(cut.value[8].sum())
    seen.clear()
    cut.grad_of(cut.value[8].sum())
    assert seen == [SIZE]


# ---- what is left behind -----------------------------------------------------------------------


def test_two_threads_that_cut_leave_torch_as_it_was(net, data):
    before = torch.Tensor.register_hook, torch.backends.mha.get_fastpath_enabled()
    first, second, done = threading.Event(), threading.Event(), threading.Event()

    def slow(rows):
        first.set()
        second.wait(20)
        return net(rows)

    def fast(rows):
        second.set()
        done.wait(20)
        return net(rows)

    threads = [threading.Thread(target=mb.cut, args=(slow, data))]
    threads[0].start()
    first.wait(20)
    threads.append(threading.Thread(target=mb.cut, args=(fast, data)))
    threads[1].start()
    threads[0].join(20)
    done.set()
    threads[1].join(20)
    assert (torch.Tensor.register_hook, torch.backends.mha.get_fastpath_enabled()) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 2])
def test_an_inference_that_fails_or_is_interrupted_leaves_everything_as_it_was(error, at, data):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(WIDTH), 0

        def forward(self, rows):
            self.calls += 1
            out = nn.functional.dropout(self.norm(rows))
            if self.calls > at:
                raise error
            return out

    model = Counting()
    state, random = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(error):
        mb.cut(model, data, batch_size=SIZE)
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert (model.calls, torch.equal(torch.get_rng_state(), random)) == (0, True)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_checkpointed_part_that_counts_or_keeps_statistics_is_run_again_unnoticed(keep, data):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.calls = nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), 0

        def part(self, rows):
            self.calls += 1
            return self.norm(self.layer(rows)).tanh()

        def forward(self, rows):
            return checkpoint(self.part, rows, use_reentrant=False)

    torch.manual_seed(0)
    model = Block()
    cut = mb.cut(model, data, batch_size=SIZE, keep=keep)
    once = (3, 3, model.norm.running_mean.clone())
    for _ in range(2):
        cut.grad_of(cut.value[3].sum())
        assert (model.calls, int(model.norm.num_batches_tracked)) == once[:2]
        assert torch.equal(model.norm.running_mean, once[2])


def test_hooks_of_the_program_hear_of_no_gradient_while_a_cut_is_made(net, data):
    heard = []
    net[0].weight.register_hook(heard.append)
    cut = mb.cut(net, data, batch_size=SIZE)
    assert heard == []
    cut.value.sum().backward()
    cut.backward()
    assert len(heard) == 3


def test_nothing_of_the_gradient_stays_once_it_was_sent_on(net, data):
    cut = mb.cut(net, data, batch_size=SIZE)
    cut.value.sum().backward()
    size = sys.getsizeof(cut._own)
    cut.backward()
    assert (cut._own, size) == ([], sys.getsizeof([]))


# ---- graphs that are shared, or freed ----------------------------------------------------------


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_weight_that_is_computed_once_serves_all_batches_in_any_thread(keep, elsewhere, data):
    torch.manual_seed(0)
    model = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
    leaf = model.parametrizations.weight.original
    wanted = torch.autograd.grad(model(data).square().sum(), leaf)[0]
    with parametrize.cached():
        cut = mb.cut(model, data, batch_size=SIZE, keep=keep)
        cut.value.square().sum().backward()
        thread = threading.Thread(target=cut.backward)
        thread.start() if elsewhere else cut.backward()
        if elsewhere:
            thread.join()
    torch.testing.assert_close(leaf.grad, wanted)


@pytest.mark.parametrize("retain", [False, True])
def test_data_whose_own_graph_was_freed_are_refused_before_anything_is_sent(retain, data):
    torch.manual_seed(0)
    below, above = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
    middle = below(data).sin()
    expected = torch.autograd.grad(
        above(middle).square().sum() + middle.square().sum(), below.weight, retain_graph=True
    )[0]
    cut = mb.cut(above, middle, batch_size=SIZE)
    (cut.value.square().sum() + middle.square().sum()).backward(retain_graph=retain)
    if retain:
        cut.backward()
        torch.testing.assert_close(below.weight.grad, expected)
        return
    for _ in range(2):
        with pytest.raises(mb.FreedGraphError, match="data: must have the graph that they come out of"):
            cut.backward()
        assert above.weight.grad is None
        assert float(cut.value.grad.abs().sum()) > 0
    cut.value.grad = None


# ---- what is refused, and what is not ----------------------------------------------------------


class Observed(nn.Module):
    """Resizes a buffer at its first batch, as observers of quantisation do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.register_buffer("largest", torch.empty(0))

    def forward(self, rows):
        with torch.no_grad():
            self.largest.resize_(3)
            self.largest.copy_(self.layer.weight.abs().amax(1))
        return self.layer(rows) / self.largest.clone()


def test_a_buffer_that_is_resized_and_modules_that_are_not_made_yet_are_no_obstacle(data):
    torch.manual_seed(0)
    for model in (Observed(), nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())):
        cut = mb.cut(model, data, batch_size=SIZE, keep="recompute")
        assert cut.grad_of(cut.value[3].sum()).dense().shape == data.shape


class Plain(nn.Module):
    """Of the program's own code, which Dynamo looks into."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, rows):
        return self.layer(rows).tanh() + 0


def test_a_module_compiled_in_place_is_not_broken_up(data):
    model = Plain()
    model.compile(backend="eager", fullgraph=True)
    cut = mb.cut(model, data, batch_size=SIZE)
    leaf = data.clone().requires_grad_()
    expected = torch.autograd.grad(model(leaf)[3].sum(), leaf)[0]
    torch.testing.assert_close(cut.grad_of(cut.value[3].sum()).dense(), expected)


def test_batches_without_tensors_have_gradients_of_parameters():
    words = nn.Embedding(128, 3)

    def model(texts):
        return words(torch.tensor([[ord(letter) for letter in text] for text in texts])).sum(1)

    cut = mb.cut(model, ["ab", "cd", "ef"], batch_size=2, collate_fn=lambda items: {"texts": items})
    assert cut.grad_of(cut.value[1].sum(), wrt=words.weight).nonzero()[:, 0].unique().tolist() == [ord("c"), ord("d")]
    with pytest.raises(mb.RequestError, match="wrt: must be given where the data hold no floating tensor"):
        cut.grad_of(cut.value[1].sum())


def test_another_default_device_is_left_to_the_program(net, data):
    torch.set_default_device("meta")
    try:
        cut = mb.cut(net, data, batch_size=SIZE)
        found = cut.grad_of(cut.value[3].sum())
    finally:
        torch.set_default_device(None)
    assert found.rows.tolist() == [3]


def ids_written(ids):
    ids[ids == 2] = 0
    return nn.Embedding(10, 3)(ids)


REFUSED = {
    "compiled by torch.jit": (lambda: torch.jit.script(nn.Linear(WIDTH, 3)), None, "must be made of Python modules"),
    "written data": (lambda: ids_written, lambda data: (data[:, 0].abs() * 3).long(), "must leave the data as they"),
    "float8": (None, lambda data: data.to(torch.float8_e4m3fn), "must be plain dense tensors"),
    "sparse": (None, lambda data: data.to_sparse(), "must be plain dense tensors"),
    "quantized": (None, lambda data: torch.quantize_per_tensor(data, 0.1, 0, torch.qint8), "must be plain dense"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("model", "given", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(net, data, model, given, said):
    with pytest.raises(OptionError, match=said):
        mb.cut(model() if model else net, given(data) if given else data, batch_size=SIZE)


def test_parameters_that_are_frozen_or_no_part_of_it_and_a_written_value_are_errors(net, data):
    net[0].weight.requires_grad_(False)
    cut = mb.cut(net, data, batch_size=SIZE)
    other = nn.Linear(WIDTH, 3)
    with pytest.raises(mb.RequestError, match="wrt: must hold a tensor that some loss depends on"):
        cut.grad_of(cut.value.sum(), wrt=other)
    existing = mb.cut(net(data))
    with pytest.raises(mb.RequestError, match="wrt: must hold a tensor that some loss depends on"):
        existing.grad_of(existing.value.sum(), wrt=other)
    net[0].weight.requires_grad_(True)
    with pytest.raises(mb.StaleForwardError, match=r'parameter "0\.weight"'):
        cut.grad_of(cut.value.sum(), wrt=net)
    net[0].weight.requires_grad_(False)
    with torch.no_grad():
        cut.value.mul_(2)
    with pytest.raises(mb.StaleForwardError, match=r"cut\.value: must stay as it is"):
        cut.grad_of(cut.value.sum(), wrt=net)


# ---- what it costs -----------------------------------------------------------------------------


def test_all_outputs_of_one_graph_are_proven_by_one_walk(data, monkeypatch):
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
    walks = collections.Counter()
    prove = locality.prove
    monkeypatch.setattr(locality, "prove", lambda *args, **options: walks.update("p") or prove(*args, **options))

    def model(rows):
        hidden = [rows]
        for layer in layers:
            hidden.append(layer(hidden[-1]).tanh())
        return tuple(hidden[1:])

    cut = mb.cut(model, data, batch_size=SIZE, keep="recompute")
    assert walks["p"] == 3  # one for each batch
    assert cut.coupling == ""


def test_a_request_looks_at_the_batches_that_it_touches(net, monkeypatch):
    torch.manual_seed(0)
    cut = mb.cut(net, torch.randn(400, WIDTH), batch_size=2, keep="recompute")
    losses = [cut.value[row].sum() for row in range(0, 400, 4)]
    routed = collections.Counter()
    of = type(cut)._touched

    def touched(self, parts):
        for batch, here in of(self, parts):
            routed.update(parts=len(here), batches=1)
            yield batch, here

    monkeypatch.setattr(type(cut), "_touched", touched)
    found = cut.grads_of(losses)
    assert (routed["batches"], routed["parts"]) == (100, 100)
    assert [one.rows.tolist() for one in found] == [[row] for row in range(0, 400, 4)]
