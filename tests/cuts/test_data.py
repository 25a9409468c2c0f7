"""Data of a cut: tensors, tuples, dicts and data sets; structures of outputs; what is refused."""

import functools
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import multiback as mb
from multiback.report import progress
from zoo import one_thread

ROWS = 11


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Items(Dataset):
    """Rows of a table, counted as they are read."""

    def __init__(self, table):
        self.table, self.read = table, []

    def __len__(self):
        return len(self.table)

    def __getitem__(self, row):
        self.read.append(row)
        return self.table[row]


class Pairs(Items):
    def __getitem__(self, row):
        return {"x": self.table[row], "scale": self.table[row, :1]}


class Augmented(Items):
    def __getitem__(self, row):
        return self.table[row] + torch.randn(4)


class Noisy(Items):
    """Draws as it reads, to no effect."""

    def __getitem__(self, row):
        torch.rand(3)
        return self.table[row]


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4)


def tanh(net):
    return nn.Sequential(net, nn.Tanh())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, scale):
        return self.layer(x * scale).tanh()


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_data_set_is_read_again_by_number_and_only_where_rows_are_asked_for():
    items, net = Items(torch.randn(ROWS, 4)), nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    cut = mb.cut(net, items, batch_size=4, keep="recompute")
    assert items.read == list(range(ROWS))
    items.read.clear()
    found = cut.grad_of(cut.value[[2, 9]].square().sum())
    assert items.read == [2, 9]
    assert found.rows.tolist() == [2, 9]
    x = items.table.clone().requires_grad_()
    (expected,) = torch.autograd.grad(net(x)[[2, 9]].square().sum(), x)
    assert_close(found.values, expected[[2, 9]])
    assert_close(found.dense(), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_items_that_are_dicts_go_in_as_keywords(workers):
    items, net = Pairs(torch.randn(ROWS, 4)), Scaled()
    cut = mb.cut(net, items, batch_size=4, workers=workers)
    cut.value[1:7].square().sum().backward()
    cut.backward()
    found = [parameter.grad for parameter in net.parameters()]
    table = items.table
    expected = torch.autograd.grad(net(table, table[:, :1])[1:7].square().sum(), list(net.parameters()))
    assert_close(found, list(expected))


def test_collate_fn_chooses_what_the_model_takes():
    labelled = [(row, 0) for row in torch.randn(ROWS, 4)]

    class Labelled(Items):
        pass

    net = nn.Linear(4, 3)
    cut = mb.cut(net, Labelled(labelled), batch_size=4, collate_fn=lambda items: torch.stack([x for x, _ in items]))
    assert_close(cut.value.detach(), net(torch.stack([x for x, _ in labelled])).detach())


def test_drawing_as_items_are_read_changes_neither_the_answer_nor_the_random_state():
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    cut = mb.cut(net, Noisy(torch.randn(ROWS, 4)), batch_size=4, keep="recompute")
    state = torch.get_rng_state()
    cut.grad_of(cut.value[[0, 10]].sum())
    cut.grad_of(cut.value.sum(), wrt=net)
    assert torch.equal(torch.get_rng_state(), state)


def test_tuples_and_dicts_of_tensors_and_functions_of_them():
    x, scale, net = torch.randn(ROWS, 4), torch.rand(ROWS, 1), Scaled()
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(net(leaf, scale)[5].sum(), leaf)
    for model, data in (
        (net, (x, scale)),
        (net, {"scale": scale, "x": x}),
        (lambda x, scale: net(x, scale) * 1, (x, scale)),
        (functools.partial(net.forward, scale=torch.ones(1)), x),
    ):
        cut = mb.cut(model, data, batch_size=4)
        found = cut.grad_of(cut.value[5].sum())
        values = found.values if isinstance(found.values, torch.Tensor) else None
        if isinstance(data, tuple):
            values = found.values[0]
        elif isinstance(data, dict):
            assert list(found.values) == ["scale", "x"]
            values = found.values["x"]
        else:
            leaf = x.clone().requires_grad_()
            (expected,) = torch.autograd.grad(net(leaf, torch.ones(1))[5].sum(), leaf)
        assert_close(values[0], expected[5])


def test_integer_data_have_no_gradient_of_their_own():
    tokens, net = torch.randint(0, 7, (ROWS, 3)), nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2))
    cut = mb.cut(net, tokens, batch_size=4)
    with pytest.raises(mb.RequestError, match="no floating tensor"):
        cut.grad_of(cut.value[0].sum())
    found = cut.grad_of(cut.value[[0, 10]].sum(), wrt=net)
    expected = mb.grad(net(tokens)[[0, 10]].sum(), net)
    assert_close(found, expected)


def test_outputs_keep_their_structure_and_integers_beside_them():
    net = nn.Linear(4, 3)

    def model(x):
        scores = net(x)
        return {"scores": scores, "label": scores.argmax(1), "cache": object(), "name": "scores", "count": len(x)}

    x = torch.randn(ROWS, 4)
    cut = mb.cut(model, x, batch_size=4)
    assert_close(cut.value["scores"].detach(), net(x).detach())
    assert torch.equal(cut.value["label"], net(x).argmax(1))
    assert cut.value["scores"].is_leaf
    assert not cut.value["label"].requires_grad
    # objects and numbers of one batch would stand for all
    assert (cut.value["cache"], cut.value["name"], cut.value["count"]) == (None, "scores", None)


def test_several_outputs_one_of_them_frozen():
    trunk, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)
    x = torch.randn(ROWS, 4)
    for keep in ("recompute", "graph"):
        cut = mb.cut(lambda x: (head(trunk(x)), trunk(x)), x, batch_size=4, keep=keep)
        loss = (cut.value[0][3] * cut.value[1][3].sum()).sum()
        found = cut.grad_of(loss, wrt=head.weight)
        y = trunk(x)
        expected = torch.autograd.grad((head(y)[3] * y[3].sum()).sum(), head.weight)
        assert_close(found, expected[0])


def test_data_that_require_grad_get_theirs_by_every_way():
    net, base = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(ROWS, 4)
    for keep in ("recompute", "graph"):
        leaf = base.clone().requires_grad_()
        images = leaf * 2
        cut = mb.cut(net, images, batch_size=4, keep=keep)

        def loss(value, images):
            return (value[2:9] * images[1:8, :3]).sum()

        other = base.clone().requires_grad_()
        (of_images,) = torch.autograd.grad(loss(net(other * 1), other), other)
        twice = base.clone().requires_grad_()
        expected = torch.autograd.grad(loss(net(twice * 2), twice * 2), [twice, *net.parameters()])
        found = cut.grad_of(loss(cut.value, images), wrt=[leaf, *net.parameters()])
        assert_close(list(found), list(expected))
        rows = cut.grad_of(loss(cut.value, images))
        halved = (base * 2).requires_grad_()
        (of_images,) = torch.autograd.grad(loss(net(halved), halved), halved)
        assert_close(rows.dense(), of_images)
        loss(cut.value, images.detach()).backward()
        cut.backward()
        (expected_leaf,) = torch.autograd.grad(loss(net(twice * 2), (twice * 2).detach()), twice)
        assert_close(leaf.grad, expected_leaf)


def test_a_model_that_reads_the_data_from_elsewhere_needs_wrt():
    net, x = nn.Linear(4, 3), torch.randn(ROWS, 4, requires_grad=True)
    cut = mb.cut(lambda part: net(part) + x.mean(), x, batch_size=4)
    with pytest.raises(mb.RequestError, match="also uses the data tensor itself"):
        cut.grad_of(cut.value[0].sum())
    found = cut.grad_of(cut.value[0].sum(), wrt=x)
    (expected,) = torch.autograd.grad((net(x) + x.mean())[0].sum(), x)
    assert_close(found, expected)


def test_a_loss_that_touches_no_row_has_no_rows():
    cut = mb.cut(nn.Linear(4, 3), torch.randn(ROWS, 4), batch_size=4)
    found = cut.grad_of((cut.value * 0).sum())
    assert found.rows.tolist() == []
    assert found.values.shape == (0, 4)
    assert found.dense().shape == (ROWS, 4)
    assert "RowGradient(rows=[] of 11, values [0, 4])" in repr(found)


def test_keep_on_and_device_place_outputs_and_batches():
    net = nn.Linear(4, 3)
    cut = mb.cut(net, torch.randn(ROWS, 4), batch_size=4, device="cpu", keep_on="cpu")
    assert cut.value.device.type == "cpu"
    assert cut.grad_of(cut.value[3].sum()).rows.device.type == "cpu"


def test_auto_keeps_graphs_that_fit_the_budget():
    net, x = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 3)), torch.randn(ROWS, 4)
    large = mb.cut(net, x, batch_size=4, budget="1MiB")
    small = mb.cut(net, x, batch_size=4, budget=1000)
    assert (large.keep, small.keep) == ("graph", "recompute")
    assert large.graph_bytes == small.graph_bytes == 11 * 300 * 4
    assert "graphs kept" in repr(large)
    assert "recompute the rows asked for" in repr(small)


def test_kept_graphs_are_freed_by_backward_and_rows_run_again_afterwards():
    net, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), torch.randn(ROWS, 4)
    cut = mb.cut(net, x, batch_size=4, keep="graph")
    for retain, keep in ((True, "graph"), (False, "recompute")):
        net.zero_grad()
        cut.value.square().sum().backward()
        cut.backward(retain_graph=retain)
        assert cut.keep == keep
        expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        assert_close([p.grad for p in net.parameters()], list(expected))
    assert_close(cut.grad_of(cut.value[3].sum(), wrt=net), mb.grad(net(x)[3].sum(), net))


def test_weights_made_beforehand_keep_their_graph():
    weight, x = torch.randn(3, 4, requires_grad=True), torch.randn(ROWS, 4)
    made = weight * 2
    for keep in ("recompute", "graph"):
        weight.grad = None
        cut = mb.cut(lambda x: (x @ made.t()).tanh(), x, batch_size=4, keep=keep)
        for _ in range(2):
            assert_close(
                cut.grad_of(cut.value.sum(), wrt=weight),
                torch.autograd.grad((x @ (weight * 2).t()).tanh().sum(), weight)[0],
            )
        cut.value.sum().backward()
        cut.backward()
        assert_close(weight.grad, torch.autograd.grad((x @ (weight * 2).t()).tanh().sum(), weight)[0])


def test_progress_is_shown_where_asked(capsys, monkeypatch):
    net, x = nn.Linear(4, 3), torch.randn(ROWS, 4)
    for wanted in (False, None):
        mb.cut(net, x, batch_size=2, progress=wanted)
    assert capsys.readouterr().err == ""
    seen = []

    @contextmanager
    def showing(wanted):
        seen.append(wanted)
        yield lambda status: seen.append((status.label, status.share))

    monkeypatch.setattr(progress, "showing", showing)
    cut = mb.cut(net, x, batch_size=4, progress=True)
    assert seen == [True, *((f"inferring batch {n} of 3", (n - 1) / 3) for n in (1, 2, 3))]
    seen.clear()
    cut.value.sum().backward()
    cut.backward()
    assert seen[1] == ("back-propagating batch 1 of 3", 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net, x: mb.cut(net, x, batch_size=0), "batch_size: must be a positive whole number; got 0"),
        (lambda net, x: mb.cut(net, x, batch_size="4"), "batch_size: must be a positive whole number; got '4'"),
        (lambda net, x: mb.cut(net, x, keep="all"), "keep: must be one of graph, recompute, auto; got 'all'"),
        (
            lambda net, x: mb.cut(net, x, budget="much"),
            'budget: must be a positive number of bytes or a text such as "2',
        ),
        (
            lambda net, x: mb.cut(tanh(net), x, keep="graph", budget=10),
            "budget: must be at least 132 bytes for keep",
        ),
        (lambda net, x: mb.cut(net, x, device="nowhere"), 'device: must be a device of this machine such as "cpu"'),
        (lambda net, x: mb.cut(net, x, keep_on=[3]), 'keep_on: must be a device of this machine such as "cpu"'),
        (lambda net, x: mb.cut(net, x, collate_fn=torch.stack), "collate_fn: must go with a data set"),
        (lambda net, x: mb.cut(net, x, workers=2), "workers: must go with a data set"),
        (lambda net, x: mb.cut(net, Items(x), workers=-1), "workers: must be a whole number from 0 up; got -1"),
        (lambda net, x: mb.cut(net, DataLoader(Items(x))), r"got a DataLoader. Give its data set, loader\.dataset"),
        (lambda net, x: mb.cut(net, Endless()), "got Endless, which can only be iterated"),
        (lambda net, x: mb.cut(net, (row for row in x)), "got generator, which can only be iterated"),
        (lambda net, x: mb.cut(net, x.numpy()), r"got ndarray. Convert arrays with torch\.as_tensor"),
        (lambda net, x: mb.cut(net, 3), "data: must be a tensor, a tuple or dict of tensors, or a map-style"),
        (lambda net, x: mb.cut(net, (x, x[:3])), r"the same number of rows.*got \[\[11, 4\], \[3, 4\]\]"),
        (lambda net, x: mb.cut(net, torch.tensor(1.0)), "the same number of rows, at least one, in dimension 0"),
        (lambda net, x: mb.cut(net, x[:0]), "at least one, in dimension 0"),
        (lambda net, x: mb.cut(net, Items(x[:0])), "data: must hold at least one row; got none"),
        (lambda net, x: mb.cut(net, {"x": x, "flag": True}), "must hold tensors only; got bool in a dict"),
        (lambda net, x: mb.cut(lambda x: net(x).sum(), x), r"rows in dimension 0; got shape \[\] for 11 rows"),
        (lambda net, x: mb.cut(lambda x: x.long(), x), "must give an output that depends on floating data or on a"),
        (
            lambda net, x: mb.cut(lambda x: net(x)[:, : len(x)], x[:5], batch_size=2),
            "names, shapes and dtypes for every",
        ),
        (lambda net, x: mb.cut(net, Items(x.clone().requires_grad_())), "must give items that require no grad"),
        (lambda net, x: mb.cut(net, Items(x), collate_fn=lambda items: torch.stack(items, 1)), "items in dimension 0"),
        (lambda net, x: mb.cut("net", x), "model: must be a module or a function where data follow; got str"),
        (lambda net, x: mb.cut(net, x).backward(), r"must follow a loss on cut\.value"),
        (lambda net, x: mb.cut(net, x).grad_of(net(x).sum()), r"must be computed from cut\.value"),
    ],
    ids=range(28),
)
def test_bad_input_gets_one_sentence(call, message):
    net, x = nn.Linear(4, 3), torch.randn(ROWS, 4)
    with pytest.raises(mb.InputError, match=message):
        call(net, x)


def test_inference_mode_is_refused_wherever_a_gradient_would_be_needed():
    net, x = nn.Linear(4, 3), torch.randn(ROWS, 4)
    with torch.inference_mode():
        inside = torch.randn(ROWS, 4)
        with pytest.raises(mb.RequestError, match="inference_mode"):
            mb.cut(net, x)
    with pytest.raises(mb.InputError, match="inference_mode"):
        mb.cut(net, inside)
    cut = mb.cut(net, x)
    loss = cut.value[0].sum()
    with torch.inference_mode(), pytest.raises(mb.RequestError, match="inference_mode"):
        cut.grad_of(loss)


def test_under_no_grad_the_cut_itself_still_works():
    net, x = nn.Linear(4, 3), torch.randn(ROWS, 4)
    with torch.no_grad():
        cut = mb.cut(net, x, batch_size=4)
    found = cut.grad_of(cut.value[3].sum())
    assert_close(found.values[0], net.weight.detach().sum(0))
