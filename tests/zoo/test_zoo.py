"""Every model of the zoo is what its entry says."""

import pytest
import torch

from zoo import ZOO, one_thread, select
from zoo.cases import LOSSES

names = pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


def gradients(loss, inputs, *, backward_only, retain=False):
    """Gradients of one loss by the given inputs, dense, with zeros for those it does not reach."""
    if backward_only:
        for tensor in inputs:
            tensor.grad = None
        loss.backward(retain_graph=retain)
        found = [tensor.grad for tensor in inputs]
    else:
        found = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=retain)
    return [torch.zeros_like(x) if g is None else g.to_dense() for g, x in zip(found, inputs, strict=True)]


def test_there_are_enough_models_and_their_names_are_unique():
    assert len(ZOO) >= 60
    assert len({entry.name for entry in ZOO}) == len(ZOO)


def test_selection_is_by_traits():
    assert {entry.name for entry in select("tied", without={"recurrent"})} >= {"tied weights"}
    assert not select("conv", without={"conv"})


@names
def test_losses_are_finite_and_the_same_at_every_call(entry):
    case = entry.build()
    rows, again, built_again = case.rows(), case.rows(), entry.build().rows()
    assert rows.ndim == 1
    assert 3 <= len(rows) <= 6
    assert rows.isfinite().all()
    assert torch.equal(rows, again)
    assert torch.equal(rows, built_again)
    dense = case.dense()
    assert len(dense) == LOSSES
    assert all(loss.shape == () and loss.isfinite() for loss in dense)
    assert all(torch.equal(a, b) for a, b in zip(dense, case.dense(), strict=True))


@names
def test_every_loss_has_a_gradient(entry):
    case = entry.build()
    inputs = [*case.parameters.values(), *([] if case.data is None else [case.data])]
    for losses in (case.rows().unbind(), case.dense()):
        for loss in losses:
            found = gradients(loss, inputs, backward_only="backward only" in entry.traits, retain=True)
            assert all(g.isfinite().all() for g in found)
            assert any(g.any() for g in found)


@names
def test_gradients_are_missing_or_vanish_only_where_the_entry_says_so(entry):
    case = entry.build()
    if not case.parameters or "backward only" in entry.traits:
        return
    parameters = list(case.parameters.values())
    found = [torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True) for loss in case.dense()]
    sizes = [[0 if g is None else g.to_dense().norm() for g in gradient] for gradient in found]
    smallest = min(size / max(some) for some in sizes for size in some if size > 0)
    assert ("unused" in entry.traits) == any(g is None for gradient in found for g in gradient)
    assert smallest < 1e-4 if "vanishing" in entry.traits else smallest > 1e-6


@names
def test_rows_are_independent_where_the_entry_says_so(entry):
    case = entry.build()
    if case.data is None or "permuted" in entry.traits:
        return
    rows = case.rows()
    assert len(rows) == len(case.data)
    reached = torch.stack(
        [
            gradients(row, [case.data], backward_only="backward only" in entry.traits, retain=True)[0].flatten(1).any(1)
            for row in rows.unbind()
        ]
    )
    assert reached.diagonal().all()
    assert entry.independent == (not (reached & ~torch.eye(len(rows), dtype=torch.bool)).any())
