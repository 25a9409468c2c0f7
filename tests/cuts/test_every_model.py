"""Every model of the zoo through a cut of the model and its data."""

import pytest
import torch

import multiback as mb
from multiback.nested import map_tensors, tensors_in
from zoo import ZOO, one_thread
from zoo.cases import _random as fixed

NOT_IN_BATCHES = {
    *("several inputs", "ragged sequences", "baddbmm over heads", "bias of the full output shape", "packed lstm"),
    *("attention with padding", "permuted batch", "whisper", "clip"),
}


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


def weighed(output):
    """A fixed random weight for every element that has a graph."""
    parts = [torch.view_as_real(one) if one.is_complex() else one for one in tensors_in(output) if one.requires_grad]
    return sum((fixed(part, 5, place) * part).sum() for place, part in enumerate(parts))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("keep", ["recompute", "graph"])
@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)
def test_every_model_of_the_zoo_is_answered_as_by_a_loop_over_batches_or_refused(entry, size, keep):
    case, again = entry.build(), entry.build()
    torch.manual_seed(0)
    try:
        cut = mb.cut(case.model, case.batch.detach() if case.data is None else case.data, batch_size=size, keep=keep)
    except (mb.InputError, RuntimeError, IndexError, AssertionError):
        # what a model raises for two rows comes through; the whole batch fits every model
        assert entry.name in NOT_IN_BATCHES
        assert size == 2
        return
    asked = {**case.parameters, **({} if case.data is None else {"data": case.data})}
    if entry.name == "reentrant checkpoint":
        with pytest.raises(mb.RequestError, match="use_reentrant=False"):
            cut.grad_of(weighed(cut.value), wrt=asked)
        return
    torch.manual_seed(0)
    data = again.batch.detach().clone()
    data.requires_grad_(case.data is not None)
    outputs = [again.model(part) for part in data.split(size)]
    pieces = [iter(tensors_in(output)) for output in outputs]
    whole = map_tensors(outputs[0], lambda _: torch.cat([next(piece) for piece in pieces]))
    wanted = {**again.parameters, **({} if case.data is None else {"data": data})}
    expected = torch.autograd.grad(weighed(whole), list(wanted.values()), allow_unused=True)
    found = cut.grad_of(weighed(cut.value), wrt=asked)
    largest = max(float(one.to_dense().abs().double().norm()) for one in expected if one is not None)
    for name, other in zip(wanted, expected, strict=True):
        whole_gradient = torch.zeros_like(wanted[name]) if other is None else other.to_dense()
        gap = float((found[name].to_dense() - whole_gradient).abs().double().norm())
        assert gap <= case.tolerance * max(float(whole_gradient.abs().double().norm()), largest / 100), name
