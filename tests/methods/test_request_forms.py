"""What may be named in `wrt`, the structure of answers, budgets, plans that are kept, and checks of methods."""

import re

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

import multiback as mb
from methods.reference import separate
from multiback.measure.memory import live_bytes
from multiback.methods import METHODS
from multiback.rules.linear import LinearSite
from zoo import one_thread

KINDS = ("each", "rows", "gram", "norms")


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def built(rows=5, width=4):
    """A net, its data, what its first layer gives, and a loss per row."""
    model, x = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2)), torch.randn(rows, width, requires_grad=True)
    hidden = model[0](x)
    return model, x, hidden, model[1](hidden.tanh()).square().sum(1)


def mixtures(model, x, count=6):
    outputs = model(x)
    return [(outputs * torch.randn_like(outputs)).square().sum() for _ in range(count)]


FORMS = {
    "module": lambda model, x, hidden: model,
    "mapping": lambda model, x, hidden: {"one": model[0].weight, "other": x},
    "generator": lambda model, x, hidden: model.parameters(),
    "list": lambda model, x, hidden: [x, model[1].bias, x],
    "parameter": lambda model, x, hidden: model[0].weight,
    "data": lambda model, x, hidden: x,
    "inner tensor": lambda model, x, hidden: hidden,
    "edge": lambda model, x, hidden: get_gradient_edge(hidden),
    "edges": lambda model, x, hidden: (get_gradient_edge(hidden), get_gradient_edge(model[0].weight)),
}


def parts(answer):
    if isinstance(answer, dict):
        return list(answer.values())
    return [answer] if isinstance(answer, (torch.Tensor, GradientEdge)) else list(answer)


@pytest.mark.parametrize("function", [mb.grad, mb.jac, mb.each, mb.rows])
@pytest.mark.parametrize("name", FORMS)
def test_answers_have_the_structure_of_what_is_asked_for(name, function):
    model, x, hidden, losses = built()
    wrt = FORMS[name](model, x, hidden)
    if function is mb.rows and name == "edges":
        pytest.skip("an edge to a parameter cannot be told from one to rows")
    named = list(model.parameters()) if name in ("module", "generator") else parts(wrt)
    expected = separate(list(losses.unbind()), [hidden if not isinstance(one, torch.Tensor) else one for one in named])
    if name == "edges":
        expected[1] = separate(list(losses.unbind()), [model[0].weight])[0]
    kind = dict if name in ("module", "mapping") else tuple if name in ("generator", "list", "edges") else torch.Tensor
    answers = list(function(losses, wrt)) if function is mb.each else [function(losses, wrt)]
    for number, answer in enumerate(answers):
        assert isinstance(answer, kind)
        for one, column, given in zip(parts(answer), expected, named, strict=True):
            own = {mb.grad: column.sum(0), mb.jac: column, mb.each: column[number], mb.rows: column}[function]
            if function is mb.rows and not isinstance(given, nn.Parameter):
                own = column.sum(0)
            assert torch.allclose(one, own, atol=1e-6)
    if name == "module":
        assert list(answers[0]) == [key for key, _ in model.named_parameters()]


@pytest.mark.parametrize("said", ["rows", "shared"])
def test_a_tensor_that_could_be_either_can_be_named(said):
    x = torch.randn(4, 4, requires_grad=True)
    losses = (torch.randn(4, 4) @ x if said == "shared" else x @ torch.randn(4, 4)).square().sum(1)
    (expected,) = separate(list(losses.unbind()), [x])
    found = mb.rows(losses, {"x": x}, dim0={"x": said})["x"]
    assert torch.allclose(found, expected if said == "shared" else expected.sum(0), atol=1e-6)
    with pytest.raises(mb.RequestError, match="dim0"):
        mb.rows(losses, {"x": x}, dim0={"y": said})
    with pytest.raises(mb.RequestError, match="dim0"):
        mb.rows(losses, {"x": x}, dim0={"x": "batch"})


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("budget", [300_000, 500_000, "2MiB", "1 GiB"])
def test_jac_stays_within_its_budget(budget, method):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(20, 64)
    losses = model(x).square().sum(1) if method == "partition" else mixtures(model, x, 8)
    size = budget if isinstance(budget, int) else {"2MiB": 2 << 20, "1 GiB": 1 << 30}[budget]
    try:
        mb.plan(losses, model, method=method, budget=budget)
    except mb.RequestError as error:
        refusal = str(error)
    else:
        found = live_bytes(lambda: mb.jac(losses, model, method=method, budget=budget, retain_graph=True))
        assert found.peak <= size
        return
    least = int(re.search(r"(\d+) is the smallest that would do", refusal)[1])
    assert least > size
    found = live_bytes(lambda: mb.jac(losses, model, method=method, budget=least, retain_graph=True))
    assert found.peak <= least


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["per row", "mixtures"])
def test_every_kind_stays_within_the_smallest_budget_that_would_do(kind, which):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(20, 64)
    losses = model(x).square().sum(1) if which == "per row" else mixtures(model, x, 8)
    function = {"each": lambda *a, **o: sum(1 for _ in mb.each(*a, **o))}.get(kind, getattr(mb, kind))
    if kind == "rows" and which == "mixtures":
        return
    with pytest.raises(mb.RequestError, match="is the smallest that would do") as caught:
        function(losses, model, budget=1)
    least = int(re.search(r"(\d+) is the smallest", str(caught.value))[1])
    assert live_bytes(lambda: function(losses, model, budget=least, retain_graph=True)).peak <= least


@pytest.mark.parametrize("budget", [0, -1, "2 PiB", "much", 1.5, True, "0B"])
def test_a_budget_that_is_none_is_refused(budget):
    model, _, _, losses = built()
    with pytest.raises(mb.RequestError, match="budget: must be a positive number of bytes"):
        mb.jac(losses, model, budget=budget)
    mb.jac(losses, model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_was_saved_answers_when_loaded(kind, tmp_path):
    model, _, _, losses = built()
    plan = mb.tune(losses, model, kind=kind, rounds=1)
    plan.save(tmp_path / "plan.json")
    loaded = mb.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    function = {"each": mb.jac, "rows": mb.rows, "gram": mb.gram, "norms": mb.norms}[kind]
    found, expected = (function(losses, model, method=chosen, retain_graph=True) for chosen in (loaded, "loop"))
    for one, other in zip(parts(found), parts(expected), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"schema": 99}', b"\xff"])
def test_a_plan_that_cannot_be_read_is_refused(content, tmp_path):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(mb.InputError, match=r"plan\.json"):
        mb.Plan.load(tmp_path / "plan.json")
    with pytest.raises(mb.InputError, match=r"none\.json"):
        mb.Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["contract", "partition"])
def test_verify_tells_a_wrong_rule(kind, method, monkeypatch):
    model, _, _, losses = built()
    assert mb.verify(losses, model, kind=kind, method=method)

    def doubled(rule):
        return lambda self, *args: rule(self, *args) * 2

    for name in ("contract", "gram", "squares"):
        monkeypatch.setattr(LinearSite, name, doubled(getattr(LinearSite, name)))
    check = mb.verify(losses, model, kind=kind, method=method)
    assert not check
    assert "DIFFERS" in str(check)
    assert max(check.differences.values()) > 0.1
    assert mb.verify(losses, model, kind=kind, method="loop")


@pytest.mark.parametrize("kind", KINDS)
def test_deciding_and_checking_keep_the_graph(kind):
    model, _, _, losses = built()
    for _ in range(2):
        mb.plan(losses, model, kind=kind)
        mb.tune(losses, model, kind=kind, rounds=1)
        assert mb.verify(losses, model, kind=kind)
    losses.sum().backward()
