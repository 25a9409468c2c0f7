"""On random graphs every method gives what separate calls give, or refuses; coupled rows are never called apart."""

import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import multiback as mb
from methods.recipes import Graph, graphs
from methods.reference import separate
from multiback import graph
from multiback.methods import METHODS
from zoo import one_thread

TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9}
PROVEN = ("proven", "certified")


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


def flat(gradients: Tensor) -> Tensor:
    """[K, elements], in float64."""
    return gradients.reshape(len(gradients), -1).double()


@dataclass(frozen=True)
class Asked:
    """A graph, what it is differentiated by, and the slow reference."""

    graph: Graph
    names: list[str]
    jacobians: dict[str, Tensor]

    @property
    def targets(self) -> list[Tensor]:
        return [self.graph.candidates[name] for name in self.names]

    @property
    def matrix(self) -> Tensor:
        """[K, elements of all that is asked for], in float64."""
        return torch.cat([flat(self.jacobians[name]) for name in self.names], 1)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.graph.scalars[0].dtype]

    def largest(self) -> Tensor:
        """[K], the norm of the largest gradient of each loss by anything: what rounding is held against."""
        return torch.stack([flat(one).norm(dim=1) for one in self.jacobians.values()]).amax(0)

    def check(self, name: str, found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape, name
        assert found.dtype == expected.dtype, name
        gap, norm = (flat(one).norm(dim=1) for one in (found - expected, expected))
        assert bool((gap <= self.tolerance * torch.maximum(norm, self.largest() / 100)).all()), name

    def disjoint(self, name: str) -> bool:
        """Whether every row of a tensor is touched by one loss at most, repetitions left out."""
        touched = self.jacobians[name][self.graph.distinct].flatten(2).ne(0).any(2)
        return bool((touched.sum(0) <= 1).all())


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    built = draw(graphs())
    reached = [
        name
        for name, one in zip(
            built.candidates,
            torch.autograd.grad(
                sum(loss.sum() for loss in built.scalars),
                list(built.candidates.values()),
                retain_graph=True,
                allow_unused=True,
            ),
            strict=True,
        )
        if one is not None
    ]
    names = draw(st.lists(st.sampled_from(list(built.candidates)), max_size=5))
    names.insert(draw(st.integers(0, len(names))), draw(st.sampled_from(reached)))
    found = separate(built.scalars, list(built.candidates.values()))
    return Asked(built, names, dict(zip(built.candidates, found, strict=True)))


def answered(function, asked, method, **options):
    """The answer by one method, None where it refuses; `auto` may not."""
    try:
        return function(asked.graph.losses, asked.targets, method=method, retain_graph=True, **options)
    except mb.RequestError as error:
        refusal = str(error)
    assert method != "auto", refusal
    assert "must be exact" in refusal
    return None


def check_products(asked, method):
    scale = float(asked.largest().square().sum())
    exact = asked.matrix @ asked.matrix.t()
    gram = answered(mb.gram, asked, method).double()
    allowed = 4 * asked.tolerance
    assert float((gram - exact).norm()) <= allowed * max(float(exact.norm()), scale / 1e4)
    norms = answered(mb.norms, asked, method).double()
    gap = (norms - asked.matrix.norm(dim=1)).abs()
    assert bool((gap <= allowed * torch.maximum(asked.matrix.norm(dim=1), asked.largest() / 100)).all())


EXAMPLES = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@EXAMPLES
@given(requests(), st.sampled_from([None, 1, 2, 3]))
def test_every_method_gives_what_separate_calls_give_or_refuses(asked, chunk):
    for method in ("auto", *METHODS):
        jac = answered(mb.jac, asked, method, chunk=chunk)
        if jac is None:
            assert answered(mb.norms, asked, method) is None
            continue
        each = list(answered(mb.each, asked, method, chunk=chunk))
        reused = [
            [one.clone() for one in answer] for answer in answered(mb.each, asked, method, chunk=chunk, reuse=True)
        ]
        for place, name in enumerate(asked.names):
            for found in (jac[place], *(torch.stack([answer[place] for answer in one]) for one in (each, reused))):
                asked.check(f"{method}: {name}", found, asked.jacobians[name])
        check_products(asked, method)


def rows_by(asked, method):
    """The answer of `rows` and whether it warned; None where it refuses, `auto` only for want of an owner."""
    shared = dict.fromkeys((n for n, name in enumerate(asked.names) if name in asked.graph.parameters), "shared")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = mb.rows(asked.graph.losses, asked.targets, dim0=shared, method=method, retain_graph=True)
        except mb.RequestError as error:
            refusal = str(error)
            found = None
    assert all(issubclass(one.category, mb.CoupledRowsWarning) for one in caught)
    if found is None:
        assert "no partition of them was found" in refusal or (method != "auto" and "must be exact" in refusal)
        assert "must be exact" in refusal or any(name not in asked.graph.parameters for name in asked.names)
    return found, bool(caught)


@EXAMPLES
@given(requests())
def test_rows_are_each_their_own_loss_s_or_are_warned_of(asked):
    count, apart = len(asked.graph.scalars), [name for name in asked.names if name not in asked.graph.parameters]
    if any(len(asked.graph.candidates[name]) < count for name in apart):
        return
    for method in ("auto", *METHODS):
        found, warned = rows_by(asked, method)
        for name, one in zip(asked.names, found or (), strict=False):
            expected = asked.jacobians[name]
            if name in asked.graph.parameters:
                asked.check(f"{method}: {name}", one, expected)
            elif asked.disjoint(name) and not warned:
                asked.check(f"{method}: {name}", one[None], expected[asked.graph.distinct].sum(0)[None])
            elif name != "unused":
                assert warned, name
                own = torch.stack([expected[place][place] for place in range(count)])
                alternative = expected[asked.graph.distinct].sum(0)
                if asked.disjoint(name) and torch.allclose(one, alternative, rtol=asked.tolerance):
                    continue
                asked.check(f"{method}: {name}", one[None], own[None])


@EXAMPLES
@given(requests())
def test_rows_that_two_losses_touch_are_never_called_independent(asked):
    values = {name: one for name, one in asked.graph.candidates.items() if name.startswith("value")}
    count = len(asked.graph.scalars)
    parameters = {name: asked.graph.candidates[name] for name in asked.names if name in asked.graph.parameters}
    parameters = {name: one for name, one in parameters.items() if isinstance(one, nn.Parameter)}
    for name, value in values.items():
        if len(value) < count or not bool(asked.jacobians[name].any()):
            continue
        found = mb.plan(asked.graph.losses, {name: value, **parameters}, kind="rows")
        assert asked.disjoint(name) or found.independence not in PROVEN, name


@EXAMPLES
@given(requests(), st.sampled_from(["jac", "each", "rows", "gram", "norms", "grad"]))
def test_a_request_frees_all_of_the_graph(asked, kind):
    names = [name for name in asked.names if name in asked.graph.parameters]
    reached = [name for name in names if bool(asked.jacobians[name].any())]
    if not reached:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mb.CoupledRowsWarning)
        options = {"dim0": dict.fromkeys(names, "shared")} if kind == "rows" else {}
        found = getattr(mb, kind)(asked.graph.losses, {n: asked.graph.candidates[n] for n in names}, **options)
        list(found)
    facts = graph.read(asked.graph.scalars)
    assert facts.saved_bytes == facts.parameter_bytes == facts.input_bytes == 0
