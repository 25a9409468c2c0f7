"""What a request refuses: argument, rule, what was got, remedy."""

import re

import pytest
import torch
from torch import nn

import multiback as mb
from multiback.independence.operations import HANDLERS

KINDS = {"grad": mb.grad, "jac": mb.jac, "each": mb.each, "rows": mb.rows, "gram": mb.gram, "norms": mb.norms}


def parts():
    torch.manual_seed(0)
    layer, data = nn.Linear(3, 2), torch.rand(4, 3)
    return layer, data, layer(data).square().sum(1)


def refused(function, *arguments, **options):
    with pytest.raises(mb.RequestError) as caught:
        function(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_without_graph_is_named(kind):
    layer, _data, losses = parts()
    message = refused(KINDS[kind], [losses.sum(), torch.tensor(1.0)], layer)
    assert message == (
        "losses[1]: must have a graph; nothing that requires grad leads to it. "
        "Compute it without detach() and outside no_grad()."
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("loss", "rule"),
    [
        (torch.tensor(1), "losses[0]: must be floating; got torch.int64. Give the loss before it was rounded."),
        (
            torch.tensor(1j, requires_grad=True) * 2,
            "losses[0]: must be real; got torch.complex64. Take .real or .abs() of it.",
        ),
        (3.0, "losses[0]: must be a tensor; got float. Give tensors that have a graph."),
    ],
    ids=["integer", "complex", "number"],
)  # fmt: skip
def test_losses_must_be_real_floating_tensors(kind, loss, rule):
    layer, _, _ = parts()
    assert refused(KINDS[kind], [loss], layer) == rule


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_request_is_refused(kind):
    layer, _, losses = parts()
    assert refused(KINDS[kind], [], layer).startswith("losses: must hold at least one loss; got none.")
    assert refused(KINDS[kind], losses[:0], layer).startswith("losses: must hold at least one loss; got none.")
    assert refused(KINDS[kind], losses, []).startswith("wrt: must name at least one tensor; got none.")


@pytest.mark.parametrize("kind", KINDS)
def test_wrt_outside_the_graph_is_refused_but_an_unused_tensor_beside_others_is_zero(kind):
    layer, _, losses = parts()
    other = nn.Parameter(torch.rand(5))
    message = refused(KINDS[kind], losses, other)
    assert message == "wrt: must hold a tensor of the losses' graph; none of it is part of it. Name others."
    found = KINDS[kind](losses, [layer.weight, other])
    found = next(found) if kind == "each" else found
    if isinstance(found, tuple):
        assert bool((found[1] == 0).all())
        assert found[1].shape == {"grad": (5,), "each": (5,)}.get(kind, (4, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tensor_is_refused_where_it_is_named_and_skipped_in_a_module(kind):
    layer, data, _ = parts()
    layer.bias.requires_grad_(False)
    losses = layer(data).sum(1)
    assert refused(KINDS[kind], losses, {"b": layer.bias}).startswith("wrt['b']: must require grad")
    found = KINDS[kind](losses, layer)
    found = next(found) if kind == "each" else found
    assert not isinstance(found, dict) or list(found) == ["weight"]


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "grad"])
def test_an_unknown_method_lists_the_valid_ones(kind):
    layer, _, losses = parts()
    message = refused(KINDS[kind], losses, layer, method="loops")
    assert re.fullmatch(
        r"method: must be one of auto, [a-z, -]*loop[a-z, -]*; got 'loops'. Choose one of these.", message
    )
    assert all(name in message for name in ("partition", "contract", "contract-batched", "batched", "loop"))
    assert refused(KINDS[kind], losses, layer, method=3).startswith("method: must be a name or a Plan; got int.")


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        ([1.0], "weights: must be one number per loss, 4 in all; got 1."),
        ([1.0, float("nan"), 1.0, 1.0], "weights[1]: must be finite; got nan."),
        ([1.0, 1.0, float("inf"), 1.0], "weights[2]: must be finite; got inf."),
    ],
    ids=["too few", "nan", "infinite"],
)
def test_weights_are_one_finite_number_per_loss(weights, rule):
    layer, _, losses = parts()
    assert refused(mb.grad, losses, layer, weights=weights).startswith(rule)


def test_rows_without_a_partition_are_refused_by_number():
    data = torch.rand(4, 3, requires_grad=True)
    mixed = (data - data.mean(0)).tanh()
    losses = [mixed[:2].sum(), mixed.square().sum(), mixed[3].sum()]
    message = refused(mb.rows, losses, data)
    assert message == (
        "wrt: must hold one row per loss, or losses must own separate rows of it; got 3 losses and 4 rows, and no "
        "partition of them was found. Use mb.jac for every loss's whole gradient."
    )


def test_a_row_tensor_with_fewer_rows_than_losses_is_refused_with_the_way_to_share_it():
    _, data, _ = parts()
    scale = torch.rand(3, requires_grad=True)
    losses = (data * scale).sum(1)
    message = refused(mb.rows, losses, {"scale": scale})
    assert message == (
        "wrt['scale']: must hold at least one row per loss, 4, in dimension 0; got shape [3]. "
        "Say dim0={'scale': \"shared\"} if every row uses all of it."
    )
    assert mb.rows(losses, {"scale": scale}, dim0={"scale": "shared"})["scale"].shape == (4, 3)


def test_dim0_names_entries_and_one_of_two_words():
    layer, _, losses = parts()
    assert refused(mb.rows, losses, layer, dim0={"wait": "rows"}).startswith("dim0: must name entries of wrt; got")
    assert refused(mb.rows, losses, layer, dim0={"weight": "row"}) == (
        "dim0['weight']: must be \"rows\" or \"shared\"; got 'row'. Choose one of these."
    )


@pytest.mark.parametrize("kind", ["rows", "gram", "norms"])
def test_independence_is_one_of_three_words(kind):
    layer, _, losses = parts()
    message = refused(KINDS[kind], losses, layer, independence="sure")
    assert message == "independence: must be one of certify, assume, off; got 'sure'. Choose one of these."


def test_assuming_needs_to_know_where_rows_are():
    layer, data, _ = parts()
    losses = [layer(data[:1]).sum(), layer(data[1:]).sum()]
    assert refused(mb.rows, losses, layer, independence="assume").startswith(
        'independence: "assume" must have all losses in one tensor, or as equal slices of one in order; got 2 tensors.'
    )


@pytest.mark.parametrize("budget", [0, -1, "much", "2 apples", 1.5, True])
def test_a_budget_is_a_positive_number_of_bytes_or_says_its_unit(budget):
    layer, _, losses = parts()
    message = refused(mb.jac, losses, layer, budget=budget)
    assert message.startswith('budget: must be a positive number of bytes or a text such as "2GiB"; got ')


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_that_would_do():
    layer, _, losses = parts()
    message = refused(mb.jac, losses, layer, budget=10)
    least = int(re.search(r"got 10 bytes, and (\d+) is the smallest that would do", message)[1])
    assert refused(mb.jac, losses, layer, budget=least - 1).startswith("budget: ")
    assert mb.jac(losses, layer, budget=least)["weight"].shape == (4, 2, 3)


@pytest.mark.parametrize("chunk", [0, -2, 1.5, "all"])
def test_a_chunk_is_a_positive_whole_number(chunk):
    layer, _, losses = parts()
    assert refused(mb.jac, losses, layer, chunk=chunk).startswith("chunk: must be a positive whole number of losses")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_a_freed_graph_is_named_after_every_kind(kind, first):
    layer, _, losses = parts()
    done = KINDS[first](losses, layer)
    list(done) if first == "each" else None
    with pytest.raises(mb.FreedGraphError, match="must have a graph that is still there") as caught:
        list(KINDS[kind](losses, layer))
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_is_kept_where_it_is_asked_for(kind):
    layer, _, losses = parts()
    done = KINDS[kind](losses, layer, retain_graph=True)
    list(done) if kind == "each" else None
    assert mb.grad(losses, layer)["bias"].shape == (2,)


def test_kind_and_rounds_of_decisions_are_checked():
    layer, _, losses = parts()
    assert refused(mb.plan, losses, layer, kind="sum") == (
        "kind: must be one of each, rows, gram, norms; got 'sum'. Choose one of these."
    )
    assert refused(mb.tune, losses, layer, rounds=0).startswith("rounds: must be a positive whole number; got 0.")


def test_handlers_are_named_like_nodes():
    assert all(name.endswith("Backward") for name in HANDLERS)
