"""`mb.backward` leaves in `.grad` what K separate calls to autograd.grad add up to, by every method."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import multiback as mb
from multiback import graph
from multiback.measure.agreement import difference_between, gap_between, tolerance_of
from multiback.methods import SUM_METHODS, contract
from multiback.rules import linear


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(self.inner(x).relu())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)

    def forward(self, x):
        return F.linear(self.embedding(x.long().sum(1).clamp(0, 8)), self.embedding.weight)


class Products(nn.Module):
    """Every way to write a linear layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.rand(6, 6)) for _ in range(4))
        self.bias, self.wide = nn.Parameter(torch.rand(1, 6)), nn.Parameter(torch.rand(4, 6))

    def forward(self, x):
        x = torch.addmm(self.bias, x, self.a)
        x = torch.addmm(self.wide, x, self.b.t())
        return (x @ self.c).mm(self.d.t()) + torch.addmm(self.wide, x, self.a, alpha=0.5, beta=2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(1).repeat(1, 3, 1)
        return self.attention(x, x, x, need_weights=False)[0]


def halves(x):
    first, second = x.chunk(2, dim=1)
    return torch.cat([second, first.expand_as(first)], dim=1)


def lambda_module(function):
    class Wrapped(nn.Module):
        def forward(self, x):
            return function(x)

    return Wrapped()


def folded():
    return lambda_module(lambda x: x.view(2, 2, 6))


ZOO = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)),
    "in-place relu": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)),
    "no bias": lambda: nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)),
    "used twice": Twice,
    "tied to an embedding": Tied,
    "all products": Products,
    "views": lambda: nn.Sequential(nn.Linear(6, 6), lambda_module(halves), nn.Linear(6, 6)),
    "three dimensions": lambda: nn.Sequential(folded(), nn.Linear(6, 6), nn.Linear(6, 3)),
    "three dimensions, no bias": lambda: nn.Sequential(folded(), nn.Linear(6, 6, bias=False), nn.LayerNorm(6)),
    "transposed three dimensions": lambda: nn.Sequential(
        lambda_module(lambda x: x.view(2, 2, 6).transpose(0, 1)), nn.Linear(6, 6), nn.GELU()
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).double(),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(4, 3)),
    "frozen first": lambda: nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.ReLU(), nn.Linear(6, 6)),
    "attention": Attention,
    "lstm": lambda: nn.Sequential(nn.LSTM(6, 5), lambda_module(lambda pair: pair[0]), nn.Linear(5, 2)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 2)),
    "float64": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).double(),
    "bfloat16": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).bfloat16(),
    "column-major weight": lambda: column_major(nn.Linear(6, 6)),
    "scalar parameter": lambda: nn.Sequential(nn.Linear(6, 6), Scale()),
}  # fmt: skip


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * x


def column_major(layer):
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


LOSSES = {
    "one": lambda y: y.square().mean(),
    "two": lambda y: [y.square().sum(), y.abs().mean()],
    "a vector": lambda y: y.flatten(1).square().sum(1),
    "repeated": lambda y: [loss := y.exp().mean(), loss],
}


def setting(name, dtype=None):
    torch.manual_seed(0)
    model = ZOO[name]()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.rand(4, 6, dtype=parameters[0].dtype), parameters


def reference(losses, parameters, weights=None):
    """The weighted sum of K separate gradients; None where none of them reaches."""
    tensors = [losses] if isinstance(losses, torch.Tensor) else losses
    scalars = [scalar for tensor in tensors for scalar in tensor.reshape(-1)]
    found = [None] * len(parameters)
    for index, scalar in enumerate(scalars):
        parts = torch.autograd.grad(scalar, parameters, retain_graph=True, allow_unused=True)
        weight = 1.0 if weights is None else weights[index]
        for position, part in enumerate(parts):
            if part is not None:
                term = part.double() * weight
                found[position] = term if found[position] is None else found[position] + term
    return found


def fill(parameters, value):
    for parameter in parameters:
        parameter.grad = None if value is None else torch.full_like(parameter, value)


def assert_grads(parameters, expected, start):
    pairs = [(p.grad, e) for p, e in zip(parameters, expected, strict=True)]
    for grad, gradient in pairs:
        if gradient is None:
            assert grad is None if start is None else bool((grad == start).all())
    known = [(g.double(), e + (start or 0.0)) for g, e in pairs if e is not None]
    tolerance = max(map(tolerance_of, parameters))
    floor = 64 * max(torch.finfo(parameter.dtype).eps for parameter in parameters)
    assert gap_between([g for g, _ in known], [e for _, e in known], floor=floor).difference <= tolerance


def attempt(method, *arguments, **options):
    """Whether the method answered; only contraction may refuse, and then by name."""
    if method != "contract":
        mb.backward(*arguments, method=method, **options)
        return True
    try:
        mb.backward(*arguments, method=method, **options)
    except mb.RequestError as error:
        refusal = str(error)
    else:
        return True
    assert "must be exact" in refusal
    return False


@pytest.mark.parametrize("start", [None, 0.0, 1.5])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("method", ["auto", *SUM_METHODS])
def test_every_method_adds_the_sum_of_the_separate_gradients_or_refuses(method, name, loss, start):
    model, data, parameters = setting(name)
    model.eval() if name == "spectral norm" else None
    losses = LOSSES[loss](model(data))
    expected = reference(losses, parameters)
    fill(parameters, start)
    if attempt(method, losses):
        assert_grads(parameters, expected, start)
    else:
        fill(parameters, start)
        mb.backward(losses)  # the graph is still whole
        assert_grads(parameters, expected, start)


NEVER_CONTRACTED = ("tied to an embedding", "spectral norm")


@pytest.mark.parametrize("name", sorted(ZOO.keys() - set(NEVER_CONTRACTED)))
def test_contraction_answers_where_it_should_so_refusing_cannot_pass(name):
    model, data, parameters = setting(name)
    losses = LOSSES["two"](model(data))
    fill(parameters, 0.0)
    assert attempt("contract", losses)


@pytest.mark.parametrize("method", ["auto", *SUM_METHODS])
@pytest.mark.parametrize("name", ["mlp", "used twice", "conv", "no bias", "tied to an embedding"])
def test_overwriting_is_a_reset_to_none_into_the_kept_buffers(method, name):
    model, data, parameters = setting(name)
    losses = LOSSES["two"](model(data))
    expected = reference(losses, parameters)
    fill(parameters, 7.0)
    kept = [parameter.grad for parameter in parameters]
    if attempt(method, losses, overwrite=True):
        assert_grads(parameters, expected, None)
        assert all(parameter.grad is grad for parameter, grad in zip(parameters, kept, strict=True))


@pytest.mark.parametrize("method", ["summed", "contract"])
def test_overwriting_leaves_none_where_no_gradient_arrives(method):
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    parameters = [p for layer in layers for p in layer.parameters()]
    fill(parameters, 7.0)
    mb.backward(layers[0](torch.rand(4, 6)).sum(), wrt=parameters, overwrite=True, method=method)
    assert layers[0].weight.grad is not None
    assert layers[1].weight.grad is None
    assert layers[1].bias.grad is None


@pytest.mark.parametrize("method", SUM_METHODS)
def test_a_function_that_gives_no_gradient_leaves_none_after_overwriting(method):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    live, dead = nn.Linear(6, 6), nn.Linear(6, 6)
    parameters = [*live.parameters(), *dead.parameters()]
    fill(parameters, 7.0)
    data = torch.rand(4, 6)
    mb.backward([live(data).sum(), Stop.apply(dead(data)).sum()], overwrite=True, method=method)
    assert live.weight.grad is not None
    assert dead.weight.grad is None
    assert dead.bias.grad is None


@pytest.mark.parametrize("method", SUM_METHODS)
@pytest.mark.parametrize("weights", [[2.0, -0.5], torch.tensor([2.0, -0.5])])
def test_weights_multiply_each_loss(method, weights):
    model, data, parameters = setting("mlp")
    losses = LOSSES["two"](model(data))
    expected = reference(losses, parameters, [2.0, -0.5])
    fill(parameters, 0.0)
    mb.backward(losses, weights=weights, method=method)
    assert_grads(parameters, expected, 0.0)


def test_weights_are_cut_across_loss_tensors_in_order():
    model, data, parameters = setting("mlp")
    output = model(data)
    losses, weights = [output.sum(1), output.mean(), output[:2, :2]], torch.arange(1.0, 10.0).tolist()
    expected = reference(losses, parameters, weights)
    fill(parameters, 0.0)
    mb.backward(losses, weights=weights)
    assert_grads(parameters, expected, 0.0)


@pytest.mark.parametrize("method", SUM_METHODS)
def test_only_what_wrt_names_receives_a_gradient(method):
    model, data, parameters = setting("mlp")
    losses = LOSSES["two"](model(data))
    expected = reference(losses, parameters)
    fill(parameters, 0.0)
    mb.backward(losses, wrt=[parameters[0], parameters[3]], method=method)
    assert_grads([parameters[0], parameters[3]], [expected[0], expected[3]], 0.0)
    assert all((parameters[index].grad == 0).all() for index in (1, 2))


@pytest.mark.parametrize("wrt", ["module", "mapping", "tensor", "generator"])
def test_wrt_takes_modules_mappings_tensors_and_iterables(wrt):
    model, data, parameters = setting("mlp")
    given = {
        "module": model,
        "mapping": dict(model.named_parameters()),
        "tensor": parameters[0],
        "generator": model.parameters(),
    }[wrt]
    mb.backward(model(data).sum(), wrt=given)
    assert parameters[0].grad is not None
    assert (parameters[1].grad is None) == (wrt == "tensor")


# ---- what may notice -------------------------------------------------------------------------------


def large(rows=4, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, **options), nn.ReLU(), nn.Linear(512, 512, **options))
    data = torch.rand(rows, 512)
    fill(model.parameters(), 0.0)
    return model, data


def contracted(model, losses):
    """How many sites `auto` would contract now."""
    request = contract.SumRequest((losses,), None, None, overwrite=False, retain_graph=False)
    if not contract.worthwhile(request):
        return 0
    prepared = contract.prepare(request)
    return 0 if isinstance(prepared, str) else len(prepared.sites)


def test_auto_contracts_large_weights_with_few_rows():
    model, data = large()
    assert contracted(model, model(data).sum()) == 2


LEFT = {
    "many rows": 0,
    "no grad": 0,
    "another dtype": 0,
    "a sparse grad": 1,
    "a shared buffer": 0,
    "a parameter hook": 1,
    "a post-accumulate hook": 1,
    "an expanded grad": 1,
}


@pytest.mark.parametrize("reason", LEFT)
def test_auto_goes_the_plain_way_where_contraction_would_not_pay_or_could_be_noticed(reason):
    model, data = large(rows=300 if reason == "many rows" else 4)
    weight = model[0].weight
    if reason == "no grad":
        fill(model.parameters(), None)
    elif reason == "another dtype":
        fill(model.parameters(), None)
        model.double()
        weight = model[0].weight
        fill([model[2].weight], None)
        data = data.double()
    elif reason == "a sparse grad":
        weight.grad = torch.zeros(512, 512).to_sparse()
    elif reason == "a shared buffer":
        buffer = torch.zeros(2, 512, 512)
        weight.grad, model[2].weight.grad = buffer[0], buffer[1]
    elif reason == "a parameter hook":
        weight.register_hook(lambda grad: grad)
    elif reason == "a post-accumulate hook":
        weight.register_post_accumulate_grad_hook(lambda _parameter: None)
    elif reason == "an expanded grad":
        weight.grad = torch.zeros(512, 1).expand(512, 512)
    assert contracted(model, model(data).sum()) == LEFT[reason]


@pytest.mark.parametrize("kind", ["hook", "post"])
def test_parameter_hooks_fire_once(kind):
    model, data = large()
    calls = []
    if kind == "hook":
        model[0].weight.register_hook(lambda grad: calls.append(1) or grad * 2)
    else:
        model[0].weight.register_post_accumulate_grad_hook(lambda _parameter: calls.append(1))
    losses = model(data).square().sum()
    expected = reference(losses, [model[0].weight])  # autograd.grad applies a hook on a parameter as well
    calls.clear()
    mb.backward(losses)
    assert len(calls) == 1
    assert_grads([model[0].weight], expected, 0.0)


def test_tensor_hooks_on_a_layers_output_change_what_is_contracted():
    model, data = large()
    hidden = model[0](data)
    hidden.register_hook(lambda grad: grad * 3)
    hidden.retain_grad()
    losses = model[2](hidden.relu()).sum()
    expected = reference(losses, list(model.parameters()))
    assert contracted(model, losses) == 2
    mb.backward(losses)
    assert_grads(list(model.parameters()), expected, 0.0)
    assert hidden.grad is not None


def test_a_regulariser_on_the_weight_makes_it_an_ordinary_leaf():
    model, data = large()
    losses = model(data).sum() + model[0].weight.square().sum()
    expected = reference(losses, list(model.parameters()))
    assert contracted(model, losses) == 1
    mb.backward(losses)
    assert_grads(list(model.parameters()), expected, 0.0)


def test_a_transpose_that_is_used_elsewhere_too_makes_it_an_ordinary_leaf():
    weight = nn.Parameter(torch.rand(512, 512))
    weight.grad = torch.zeros_like(weight)
    transposed = weight.t()
    losses = (torch.rand(4, 512) @ transposed).sum() + transposed.exp().mean()
    expected = reference(losses, [weight])
    assert contracted(None, losses) == 0
    mb.backward(losses)
    assert_grads([weight], expected, 0.0)


def test_a_weight_that_is_itself_a_loss_stays_an_ordinary_leaf():
    weight = nn.Parameter(torch.rand(512, 512))
    weight.grad = torch.zeros_like(weight)
    losses = [(torch.rand(4, 512) @ weight.t()).sum(), weight]
    expected = reference([losses[0]], [weight])[0] + 1
    mb.backward(losses)
    assert_grads([weight], [expected], 0.0)


def test_strides_of_column_major_gradients_are_kept():
    model, data = large()
    column_major(model[0])
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    strides = model[0].weight.grad.stride()
    losses = model(data).square().sum()
    expected = reference(losses, list(model.parameters()))
    mb.backward(losses)
    assert model[0].weight.grad.stride() == strides == (1, 512)
    assert_grads(list(model.parameters()), expected, 0.0)


def test_zero_rows_give_zero_gradients():
    model, data = large(rows=0)
    mb.backward(model(data).sum())
    assert all((parameter.grad == 0).all() for parameter in model.parameters())
    fill(model.parameters(), 5.0)
    mb.backward(model(data).sum(), overwrite=True)
    assert (model[0].weight.grad == 0).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_segments_are_left_to_the_engine(reentrant):
    model, data = large()
    data.requires_grad_()
    losses = checkpoint(model, data, use_reentrant=reentrant).square().sum()
    mb.backward(losses)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    fill(model.parameters(), 0.0)
    model(data).square().sum().backward()
    assert difference_between(found, [parameter.grad for parameter in model.parameters()]) < 1e-5


def test_values_saved_on_the_host_are_left_to_the_engine():
    model, data = large()
    with torch.autograd.graph.save_on_cpu():
        losses = model(data).square().sum()
    assert contracted(model, losses) == 0
    mb.backward(losses)
    assert (model[0].weight.grad != 0).any()


def test_autocast_is_left_to_the_engine():
    model, data = large()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(data).float().square().sum()
    assert contracted(model, losses) == 0
    mb.backward(losses)
    assert model[0].weight.grad.dtype == torch.float32


def test_complex_weights_are_left_to_the_engine():
    weight = nn.Parameter(torch.rand(512, 512, dtype=torch.complex64))
    weight.grad = torch.zeros_like(weight)
    losses = (torch.rand(4, 512, dtype=torch.complex64) @ weight.t()).abs().sum()
    expected = torch.autograd.grad(losses, weight, retain_graph=True)[0]
    assert contracted(None, losses) == 0
    mb.backward(losses)
    assert torch.allclose(weight.grad, expected)


def test_a_graph_that_is_kept_is_traversed_plainly_and_stays():
    model, data = large()
    losses = model(data).square().sum()
    mb.backward(losses, retain_graph=True)
    first = model[0].weight.grad.clone()
    mb.backward(losses)
    assert torch.allclose(model[0].weight.grad, 2 * first, rtol=1e-5)


def test_a_second_backward_on_a_freed_graph_raises_and_doubles_nothing():
    model, data = large()
    losses = model(data).square().sum()
    mb.backward(losses)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="second time"):
        mb.backward(losses)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    assert graph.read([losses]).freed


def test_an_input_changed_in_place_raises_as_plain_backward_does():
    model, _ = large()
    hidden = torch.rand(4, 512)
    losses = model[0](hidden).square().sum()
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mb.backward(losses)


def test_hooks_are_removed_after_an_exception_and_after_success():
    model, data = large()
    hidden = model[0](data)
    handle = hidden.register_hook(lambda _grad: (_ for _ in ()).throw(ValueError("mine")))
    losses = model[2](hidden).sum()
    with pytest.raises(ValueError, match="mine"):
        mb.backward(losses)
    handle.remove()
    fill(model.parameters(), 0.0)
    losses = model(data).sum()
    sites = linear.weight_sites(graph.walk(graph.roots_of([losses])))
    expected = reference(losses, list(model.parameters()))
    losses.backward(retain_graph=True)  # plain: hooks left behind would add a second time
    assert len(sites) == 2
    assert_grads(list(model.parameters()), expected, 0.0)


def test_a_traversal_of_the_same_graph_in_another_thread_is_not_taken_for_ours():
    model, data = large()
    hidden = model[0](data)
    losses = model[2](hidden.relu()).sum()
    other = model[2](hidden.relu()).square().sum()
    expected = reference([losses, other], list(model.parameters()))

    def interfere(grad):
        thread = threading.Thread(target=lambda: other.backward(retain_graph=True))
        if not done:
            done.append(1)
            thread.start()
            thread.join()
        return grad

    done = []
    hidden.register_hook(interfere)
    mb.backward(losses)
    assert_grads(list(model.parameters()), expected, 0.0)


def test_contraction_is_switched_off_with_one_warning_where_it_disagrees(monkeypatch):
    monkeypatch.setattr(linear.LinearSite, "add_to", lambda self, grad, _cotangent, *, beta: grad.mul_(beta))
    contract.agrees_with_autograd.cache_clear()
    model, data = large()
    losses = model(data).square().sum()
    expected = reference(losses, list(model.parameters()))
    with pytest.warns(RuntimeWarning, match="contraction disagrees with autograd"):
        mb.backward(losses)
    assert_grads(list(model.parameters()), expected, 0.0)
    contract.agrees_with_autograd.cache_clear()


# ---- refusals --------------------------------------------------------------------------------------

LINEAR = nn.Linear(3, 2)
OUTPUT = LINEAR(torch.rand(4, 3))
ROWS = OUTPUT.sum(1)
FROZEN = torch.rand(3)
REFUSED = {
    "a loss that is no tensor": (([ROWS, 3.0], {}), "losses[1]: must be a tensor; got float"),
    "a complex loss": ((ROWS * 1j, {}), "losses: must be real; got torch.complex64"),
    "an integer loss": (([OUTPUT.argmax()], {}), "losses[0]: must be floating; got torch.int64"),
    "a loss without graph": (([ROWS, ROWS.detach()], {}), "losses[1]: must have a graph"),
    "no losses": (([], {}), "losses: must hold at least one loss; got none"),
    "empty losses": ((OUTPUT[:0], {}), "losses: must hold at least one loss; got none"),
    "too few weights": ((ROWS, {"weights": [1.0]}), "weights: must be one number per loss, 4 in all; got 1"),
    "a weight that is no number": ((ROWS, {"weights": [1, 2, float("nan"), 3]}), "weights[2]: must be finite; got nan"),
    "an infinite weight": ((ROWS.sum(), {"weights": [float("inf")]}), "weights[0]: must be finite"),
    "complex weights": ((ROWS.sum(), {"weights": torch.tensor([1j])}), "weights: must be real"),
    "a frozen wrt": ((ROWS, {"wrt": [FROZEN]}), "wrt[0]: must require grad"),
    "a wrt that is no tensor": ((ROWS, {"wrt": ["w"]}), "wrt[0]: must be a tensor; got str"),
    "an empty wrt": ((ROWS, {"wrt": []}), "wrt: must name at least one tensor; got none"),
    "a frozen module": ((ROWS, {"wrt": nn.ReLU()}), "wrt: the module must have a trainable parameter"),
    "a frozen entry of a mapping": ((ROWS, {"wrt": {"w": FROZEN}}), "wrt['w']: must require grad"),
    "an unknown method": ((ROWS, {"method": "magic"}), "must be one of auto, summed, contract; got 'magic'"),
    "a kept graph": ((ROWS, {"method": "contract", "retain_graph": True}), "the graph is to be kept"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_refused_by_name_and_change_nothing(case):
    (losses, options), message = REFUSED[case]
    LINEAR.zero_grad()
    with pytest.raises(mb.RequestError) as caught:
        mb.backward(losses, **options)
    assert message in str(caught.value)
    assert LINEAR.weight.grad is None
