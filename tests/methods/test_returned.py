"""Every method gives what K separate calls to autograd.grad give, over the whole zoo, or refuses by name."""

import json
import os
import warnings

import pytest
import torch

import multiback as mb
from methods.reference import ENTRIES, PINNED, case_of, losses_of, pinned, reference
from multiback.methods import METHODS, failures
from multiback.planner import KINDS
from zoo import one_thread

ANSWERABLE = [name for name, entry in ENTRIES.items() if "backward only" not in entry.traits]


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


def answered(name, function, which, method, **options):
    """The answer by one method, None where it refuses; `auto` may not."""
    wanted = reference(name, which)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mb.CoupledRowsWarning)
        try:
            return function(losses_of(case_of(name), which), wanted.targets, method=method, **options)
        except mb.RequestError as error:
            refusal = str(error)
    assert method != "auto", refusal
    assert "must be exact" in refusal
    return None


def own_rows(name, jacobian):
    """Row n of loss n, or of the loss that alone reaches it."""
    if ENTRIES[name].independent:
        return jacobian.sum(0)
    return torch.stack([jacobian[row][row] for row in range(len(jacobian))])


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("which", ["rows", "dense"])
@pytest.mark.parametrize("name", ANSWERABLE)
def test_every_kind_equals_separate_gradients_or_is_refused(name, which, method):
    wanted = reference(name, which)
    jac = answered(name, mb.jac, which, method)
    if jac is None:
        assert answered(name, mb.jac, which, "auto") is not None
        return
    assert list(jac) == list(wanted.targets)
    for key, expected in wanted.jacobians.items():
        assert wanted.agrees(jac[key], expected), key
    each = list(answered(name, mb.each, which, method))
    reused = [
        {key: one.clone() for key, one in answer.items()}
        for answer in answered(name, mb.each, which, method, reuse=True)
    ]
    for key, expected in wanted.jacobians.items():
        assert wanted.agrees(torch.stack([answer[key] for answer in each]), expected), key
        assert wanted.agrees(torch.stack([answer[key] for answer in reused]), expected), key
    gram = answered(name, mb.gram, which, method).double()
    assert float((gram - wanted.gram).norm()) <= 4 * wanted.tolerance * float(wanted.gram.norm())
    norms = answered(name, mb.norms, which, method).double()
    exact = wanted.matrix.norm(dim=1)
    assert float((norms - exact).norm()) <= 4 * wanted.tolerance * float(exact.norm())


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("name", ANSWERABLE)
def test_rows_give_each_row_its_own_loss_or_are_refused(name, method):
    wanted = reference(name, "rows")
    found = answered(name, mb.rows, "rows", method)
    if found is None:
        return
    for key, expected in wanted.jacobians.items():
        if key == "the data":
            assert wanted.agrees(found[key], own_rows(name, expected))
        else:
            assert wanted.agrees(found[key], expected), key


def plans_of(name):
    """What answers each kind for the row losses, and for the mixed ones `dense`, and what is `able` to."""
    if name not in ANSWERABLE:
        return dict.fromkeys((*KINDS, "dense", "able"), "refused")
    failures.forget()  # a plan names batched traversals that have failed before, here in other tests
    case, targets = case_of(name), reference(name, "rows").targets
    found = {kind: mb.plan(case.rows(), targets, kind=kind).method for kind in KINDS}
    dense = mb.plan(case.dense(), targets)
    return found | {"dense": dense.method, "able": " ".join(sorted(METHODS.keys() - dense.refused.keys()))}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_answered_by_the_pinned_method(name):
    if os.environ.get("MULTIBACK_PIN"):
        return
    assert plans_of(name) == pinned()[name]


def test_the_pinned_matrix_holds_the_whole_zoo():
    if os.environ.get("MULTIBACK_PIN"):  # MULTIBACK_PIN=1 writes the matrix anew, to be read before it is kept
        PINNED.write_text(json.dumps({name: plans_of(name) for name in ENTRIES}, indent=1) + "\n")
    assert pinned().keys() == ENTRIES.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_most_of_the_zoo_is_answered_by_better_than_a_loop(kind):
    better = [name for name, methods in pinned().items() if methods[kind] not in ("loop", "refused")]
    assert len(better) >= 0.7 * len(ENTRIES)


@pytest.mark.parametrize("method", ["contract", "contract-batched", "batched"])
def test_most_of_the_zoo_could_be_answered_by_each_method_for_mixed_losses(method):
    able = [name for name, methods in pinned().items() if method in methods["able"].split()]
    assert len(able) >= 0.7 * len(ENTRIES)


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.independent and name in ANSWERABLE])
def test_independent_rows_are_never_called_coupled(name):
    case, targets = case_of(name), reference(name, "rows").targets
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mb.rows(case.rows(), targets)


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if not entry.independent])
def test_coupled_rows_are_never_certified(name):
    case, targets = case_of(name), reference(name, "rows").targets
    with pytest.warns(mb.CoupledRowsWarning):
        mb.rows(case.rows(), targets)


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in ANSWERABLE])
@pytest.mark.parametrize("function", [mb.jac, mb.each, mb.rows, mb.gram, mb.norms, mb.grad])
def test_reentrant_checkpoints_are_refused_by_name(name, function):
    case = case_of(name)
    with pytest.raises(mb.RequestError, match="reentrantly checkpointed segment, which only backward"):
        function(case.rows(), case.parameters)
