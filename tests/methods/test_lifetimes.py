"""What a request leaves behind: a freed graph and nothing else, or, where it is asked to be kept, all as before."""

import gc
import weakref

import pytest
import torch
from torch import nn

import multiback as mb
from multiback import graph
from multiback.methods import METHODS
from zoo import one_thread

KINDS = {
    "grad": mb.grad,
    "jac": mb.jac,
    "each": lambda *args, **options: list(mb.each(*args, **options)),
    "rows": mb.rows,
    "gram": mb.gram,
    "norms": mb.norms,
}
LOSSES = {
    "per row": lambda y: y.square().sum(1),
    "mixtures": lambda y: [y.square().sum(), y.sin().mean(), y.exp().mean()],
    "slices": lambda y: [y[2:].square().sum(), y[:2].sin().sum()],
    "repeated": lambda y: [loss := y.square().sum(), y.exp().sum(), loss],
}


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def net(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Sigmoid(), nn.Linear(width, 2))


def built(which="per row"):
    model = net()
    return model, LOSSES[which](model(torch.randn(5, 4)))


def tensors(losses):
    return [losses] if isinstance(losses, torch.Tensor) else losses


def saved(losses):
    facts = graph.read(tensors(losses))
    return facts.saved_bytes + facts.parameter_bytes + facts.input_bytes


def flat(answer):
    return [answer] if isinstance(answer, torch.Tensor) else [tensor for one in answer for tensor in flat(one)]


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.filterwarnings("ignore::multiback.CoupledRowsWarning")
def test_a_second_request_on_a_freed_graph_is_refused_by_name(first, second):
    for which in LOSSES:
        for part in (slice(None), slice(4, None), slice(0, 1)):
            model, losses = built(which)
            KINDS[first](losses, model[part])
            assert saved(losses) == 0
            with pytest.raises(mb.FreedGraphError, match="losses: must have a graph that is still there") as caught:
                KINDS[second](losses, model)
            assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::multiback.CoupledRowsWarning")
def test_a_graph_that_is_kept_answers_again(kind, which):
    model, losses = built(which)
    before = saved(losses)
    first, second = (KINDS[kind](losses, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert saved(losses) == before
    for one, other in zip(flat(first), flat(second), strict=True):
        assert torch.equal(one, other)
    torch.autograd.backward([loss.sum() for loss in tensors(losses)])


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
@pytest.mark.parametrize("which", LOSSES)
def test_a_generator_frees_the_graph_however_far_it_was_read(which, turns, method):
    model, losses = built(which)
    if method == "partition" and which in ("mixtures", "repeated"):
        return
    generator = mb.each(losses, model[4:], method=method, chunk=1)
    for _ in zip(range(turns), generator, strict=False):
        pass
    generator.close()
    assert saved(losses) == 0


@pytest.mark.parametrize("read", [0, 1, 9])
def test_a_generator_that_is_dropped_lets_saved_tensors_go(read):
    model = net()
    hidden = model[:2](torch.randn(5, 4))
    losses, kept = LOSSES["mixtures"](model[2:](hidden)), weakref.ref(hidden)
    del hidden
    assert kept() is not None
    generator = mb.each(losses, model)
    for _ in zip(range(read), generator, strict=False):
        pass
    del generator
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::multiback.CoupledRowsWarning")
def test_what_the_graph_saved_goes_although_the_losses_stay(kind, which):
    model = net()
    hidden = model[:2](torch.randn(5, 4))
    losses, kept = LOSSES[which](model[2:](hidden)), weakref.ref(hidden)
    del hidden
    KINDS[kind](losses, model[4].bias)
    assert kept() is None
    del losses


def test_gradients_of_each_are_fresh_tensors():
    for method in ("auto", *METHODS):
        model, losses = built()
        answers = list(mb.each(losses, list(model.parameters()), method=method))
        pointers = {one.untyped_storage().data_ptr() for answer in answers for one in answer}
        assert len(pointers) == sum(map(len, answers))
        kept = [one.clone() for one in answers[1]]
        for one in answers[0]:
            one.zero_()
        assert all(torch.equal(one, other) for one, other in zip(kept, answers[1], strict=True))


@pytest.mark.parametrize("which", LOSSES)
def test_gradients_that_are_reused_stay_in_their_tensors(which):
    for method in ("auto", "contract", "contract-batched", "batched", "loop"):
        model, losses = built(which)
        wanted = list(model.parameters())
        pointers = {
            tuple(one.data_ptr() for one in found) for found in mb.each(losses, wanted, method=method, reuse=True)
        }
        assert len(pointers) == 1


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::multiback.CoupledRowsWarning")
def test_grads_buffers_hooks_and_the_random_state_are_left_alone(kind, method):
    if kind == "grad" and method != "auto":
        return
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    fired = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(fired.append)
    losses = LOSSES["mixtures" if method != "partition" else "per row"](model(torch.randn(5, 4)))
    state, random = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    try:
        KINDS[kind](losses, model, method=method)
    except mb.RequestError as error:
        refusal = str(error)
        assert "must be exact" in refusal
    assert not fired
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_retained_gradient_is_left_as_separate_calls_leave_it(kind):
    model = net()
    hidden = model[:2](torch.randn(5, 4))
    hidden.retain_grad()
    losses = model[2:](hidden).square().sum(1)
    KINDS[kind](losses, model[2:], retain_graph=True)
    assert hidden.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_takes_no_none_leaves_memory_to_the_losses_but_no_second_request(kind):
    model = net()
    hidden = model[:2](torch.randn(5, 4))
    hidden.register_hook(lambda gradient: gradient * 2)
    losses = model[2:](hidden).sum(1)
    list(KINDS[kind](losses, model))
    with pytest.raises(mb.FreedGraphError):
        mb.jac(losses, model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_may_see_one_none_when_the_graph_is_released_and_none_when_it_is_kept(kind):
    model, seen = net(), []
    hidden = model[:2](torch.randn(5, 4))
    hidden.register_hook(seen.append)
    losses = model[2:](hidden).sum(1)
    list(KINDS[kind](losses, model, retain_graph=True))
    assert seen
    assert all(gradient is not None for gradient in seen)
    seen.clear()
    list(KINDS[kind](losses, model))
    assert sum(gradient is None for gradient in seen) <= 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        ctx.save_for_backward(given)
        return 2 * given

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors  # noqa: B018 - raises once freed
        return 2 * gradient


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::multiback.CoupledRowsWarning")
def test_a_graph_with_a_custom_function_is_freed_too(kind, which):
    model = net()
    losses = LOSSES[which](Doubled.apply(model(torch.randn(5, 4))))
    KINDS[kind](losses, model)
    with pytest.raises(mb.FreedGraphError):
        KINDS[kind](losses, model)
