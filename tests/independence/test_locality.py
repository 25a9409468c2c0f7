"""The walk proves rows apart where operations keep them apart, and stops where they meet."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import multiback as mb
from multiback.independence.layouts import Layout, Mixed, Shared, locate, merged, place, signed
from multiback.independence.locality import prove
from multiback.independence.owners import Cyclic, Named
from multiback.independence.slices import common_slice

B, D = 4, 6


def walked(function, **options):
    """The walk's word on a linear layer below `function`, a function of [B, D] to K = B losses."""
    torch.manual_seed(0)
    layer = nn.Linear(D, D)
    losses = function(layer(torch.rand(B, D)))
    found = prove(losses.grad_fn, 0, B, **options)
    node = next(n for n in found.states if n.name() == "AddmmBackward0")
    return found, found.inner(node)


APART = {
    "reduction over features": lambda h: h.square().sum(1),
    "mean with kept dimension": lambda h: h.mean(1, keepdim=True).squeeze(1),
    "softmax over features": lambda h: h.softmax(1)[:, 0],
    "views": lambda h: h.view(B, 2, 3).transpose(1, 2).flatten(1).sum(1),
    "features first": lambda h: h.t().contiguous().t().sum(1),
    "products with a shared matrix": lambda h: (h @ torch.rand(D, 2)).sum(1),
    "batched products": lambda h: torch.bmm(h.view(B, 2, 3), h.view(B, 3, 2)).sum((1, 2)),
    "cross-entropy": lambda h: F.cross_entropy(h, torch.zeros(B, dtype=torch.long), reduction="none"),
    "concatenated features": lambda h: torch.cat([h, h * 2], 1).sum(1),
    "chunks": lambda h: sum(part.sum(1) for part in h.chunk(2, 1)),
    "layer norm": lambda h: F.layer_norm(h, (D,)).square().sum(1),
    "pooling": lambda h: F.max_pool1d(h.view(B, 2, 3), 3).sum((1, 2)),
}

MET = {
    "mean over the batch": (lambda h: (h - h.mean(0)).square().sum(1), "MeanBackward1"),
    "softmax over the batch": (lambda h: h.softmax(0).sum(1), "SoftmaxBackward0"),
    "flipped rows": (lambda h: h.flip(0).sum(1), "FlipBackward0"),
    "products of rows": (lambda h: (h @ h.t()).square().sum(1), "TBackward0"),
    "batch norm": (lambda h: F.batch_norm(h, None, None, training=True).square().sum(1), "NativeBatchNormBackward0"),
    "cumulative sums over the batch": (lambda h: h.cumsum(0).sum(1), "CumsumBackward0"),
}


@pytest.mark.parametrize("name", APART)
def test_rows_are_proven_apart(name):
    found, inner = walked(APART[name])
    assert inner == D
    assert not found.coupling
    assert not found.dense


@pytest.mark.parametrize("name", MET)
def test_rows_that_meet_are_not_and_the_operation_is_named(name):
    function, where = MET[name]
    found, inner = walked(function)
    assert inner is None
    assert found.coupling == where


def test_losses_that_use_everything_are_told_at_once():
    found = prove((nn.Linear(D, D)(torch.rand(B, D))[None] * torch.rand(3, B, D)).sum((1, 2)).grad_fn, 0, 3)
    assert found.dense


def test_assuming_passes_what_is_not_known_and_nothing_else():
    assert walked(lambda h: h.flip(1).sum(1), assume=True)[1] == D
    assert walked(lambda h: (h - h.mean(0)).square().sum(1), assume=True)[1] is None
    assert walked(MET["batch norm"][0], assume=True)[1] is None


@pytest.mark.parametrize(
    ("shape", "inner", "rows", "found"),
    [
        ((4, 6), 6, 4, (0, 1)),
        ((6, 4), 1, 4, (1, 1)),
        ((2, 4, 3), 3, 4, (1, 1)),
        ((12, 5), 15, 4, (0, 3)),
        ((8, 5), 5, 4, (0, 1)),
        ((4, 1, 6), 6, 4, (0, 1)),
        ((6, 6), 4, 4, None),
        ((), 1, 4, None),
    ],
    ids=str,
)
def test_the_axis_of_rows_is_found_in_row_major_order(shape, inner, rows, found):
    assert locate(shape, inner, rows) == found
    if found is not None:
        assert place(shape, *found) == Layout(inner)


def test_states_that_meet_are_mixed_unless_alike():
    assert merged(Layout(2), Layout(2)) == Layout(2)
    assert isinstance(merged(Layout(2), Layout(3)), Mixed)
    assert merged(Layout(2), Shared("MeanBackward1")) == Mixed("MeanBackward1")
    assert merged(Shared("a"), Shared("b")) == Shared("a")
    assert merged(Mixed("here"), Layout(1)) == Mixed("here")


def test_saved_numbers_are_read_with_their_sign():
    assert [signed(value) for value in (3, 2**64 - 1)] == [3, -1]


def test_equal_slices_in_order_are_recognised():
    whole = torch.rand(6, 3, requires_grad=True) * 2
    node, output, inner = common_slice([whole[2 * k : 2 * k + 2].sum() for k in range(3)])
    assert (node, output, inner) == (whole.grad_fn, 0, 6)
    assert common_slice([whole[k].sum() for k in range(6)])[2] == 3


@pytest.mark.parametrize(
    "slices",
    [
        lambda w: [w[:2].sum(), w[2:5].sum(), w[5:].sum()],
        lambda w: [w[3:].sum(), w[:3].sum()],
        lambda w: [w[:3].sum(), w[3:5].sum()],
        lambda w: [w[:3].sum() + w[:1].sum(), w[3:].sum()],
        lambda w: [w[:, :1].sum(), w[:, 1:].sum()],
        lambda w: [w[::2].sum(), w[1::2].sum()],
        lambda w: [w[:3].sum(), w[3:].sum() + w.sum()],
    ],
    ids=["ragged", "out of order", "not all", "two of one", "of columns", "with steps", "and the whole"],
)
def test_other_slices_are_left_to_a_traversal(slices):
    whole = torch.rand(6, 3, requires_grad=True) * 2
    assert common_slice(slices(whole)) is None


def test_cyclic_owners_gather_every_owners_units():
    owners = Cyclic(3, 2, 12)
    (part,) = owners.parts()
    assert owners.index(torch.device("cpu")).tolist() == [0, 0, 1, 1, 2, 2] * 2
    assert part.gather(torch.arange(12)).tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_named_owners_come_together_by_how_many_units_they_own():
    owners = Named(4, torch.tensor([2, -1, 0, 2, 1, 1]))
    parts = owners.parts()
    found = {int(owner): row.tolist() for part in parts for owner, row in zip(part.owners, part.places, strict=True)}
    assert found == {0: [2], 1: [4, 5], 2: [0, 3]}


def test_a_proven_answer_equals_separate_gradients_where_attention_turns_the_batch():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    losses = model(torch.rand(B, 5, 8)).square().sum((1, 2))
    plan = mb.plan(losses, model, kind="rows")
    assert (plan.method, plan.independence) == ("partition", "proven")
    assert mb.verify(losses, model, kind="rows")
    assert mb.verify(losses, model, kind="rows", independence="assume")
