"""The examination tells right gradients from wrong ones and counts bytes the same way twice."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from multiback.benching import examining, questions
from multiback.benching.bound import Bound
from multiback.benching.problems import Problem, build_preset, tutorial_net
from multiback.benching.protocol import Act, Examine, Source
from multiback.measure import memory
from multiback.methods import contract
from multiback.records import ProblemFacts

SOURCE = Source(target="test")
FACTS = ProblemFacts(target="test", shapes={}, dtypes={}, losses="", num_losses=1, num_parameters=1, num_rows=1, seed=0)


def examine(problem, *asked, ways=None, dear_seconds=float("inf")):
    torch.manual_seed(0)
    bound = Bound(problem)
    acts = [act for question in asked for act in questions.acts_of(question, ways, None)]
    job = Examine(source=SOURCE, threads=1, acts=acts, dear_seconds=dear_seconds)
    return examining.Examiner(bound, job).run(FACTS, SOURCE, 0.0, lambda _label: None)


def by_way(examined):
    return {fact.way: fact for fact in examined.ways}


def conv_problem(loss=None, batch=4):
    return Problem(
        tutorial_net(),
        torch.rand(batch, 3, 32, 32).requires_grad_(),
        nn.CrossEntropyLoss(reduction="none") if loss is None else loss,
        targets=torch.randint(10, (batch,)),
    )


def test_the_peak_bytes_of_the_published_net_are_the_reference_figures():
    found = by_way(examine(build_preset("mlp", batch=None, num_losses=None), "combine"))
    expected = {
        "one-forward summed": 100_716_560,
        "one-forward retained": 167_878_668,
        "func1": 167_874_568,
        "func3": 167_899_148,
    }
    for way, peak in expected.items():
        assert found[way].peak_bytes == pytest.approx(peak, rel=0.01), way
    assert all(fact.comparable for fact in found.values())
    assert found["func1"].flops == 2 * (found["one-forward summed"].flops)
    assert "disagree" not in "".join(fact.note for fact in found.values())


def test_two_examinations_count_the_same_bytes():
    first, second = (
        by_way(examine(build_preset("two-layer", batch=8, num_losses=None), "combine", "retain")) for _ in range(2)
    )
    assert {name: fact.peak_bytes for name, fact in first.items()} == {
        name: fact.peak_bytes for name, fact in second.items()
    }


def test_saved_bytes_of_the_two_layer_net_equal_the_hand_count():
    fact = by_way(examine(build_preset("two-layer", batch=3, num_losses=None), "retain"))["retain_graph=False"]
    # per loss: the clamp keeps its input (an input, not counted), the product keeps its factor;
    # both products share the output; the relu's result is shared with the second layer
    row = 3 * 40 * 4
    assert fact.saved_bytes == row * (1 + 2 + 1)


def test_a_kept_graph_is_held_and_a_freed_one_is_not():
    found = by_way(examine(build_preset("slices", batch=4, num_losses=None), "retain"))
    kept, freed = found["retain_graph=True"], found["retain_graph=False"]
    assert kept.held_bytes - freed.held_bytes == pytest.approx(kept.saved_bytes, rel=0.1)


def test_all_slice_ways_agree_but_the_mean_which_is_its_factor_off():
    found = by_way(examine(conv_problem(), "slices"))
    assert "outside" not in found["multiback cut"].note  # whose leaves stand in for outputs
    mean = found.pop("reduction=mean")
    assert not mean.comparable
    assert mean.factor == pytest.approx(1 / 4)
    assert all(fact.comparable for fact in found.values())


def test_train_mode_batch_norm_makes_a_forward_per_slice_something_else():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(10))
    model(torch.rand(2, 3, 8, 8))
    problem = Problem(
        model, torch.rand(4, 3, 8, 8), nn.CrossEntropyLoss(reduction="none"), targets=torch.randint(10, (4,))
    )
    found = by_way(examine(problem, "slices"))
    assert not found["forward per slice"].comparable
    assert found["forward per slice"].difference_from_reference > 1e-3
    assert found["retained loop"].comparable


class Branched(nn.Module):
    """A branch with dropout whose gradient is tiny beside the trunk's."""

    def __init__(self):
        super().__init__()
        self.trunk, self.branch, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout()

    def forward(self, data):
        return self.trunk(data) * 100 + self.dropout(self.branch(data)) * 1e-5


TWO = [lambda o, _: o.sum(), lambda o, _: o.square().mean()]


def test_a_difference_in_a_tensor_that_is_tiny_beside_the_others_is_found():
    found = by_way(examine(Problem(Branched(), torch.rand(16, 8), TWO), "combine"))
    assert not found["one-forward summed"].comparable


def test_a_bias_before_a_normalisation_does_not_make_ways_differ():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    examined = examine(Problem(model, torch.rand(4, 3, 8, 8), TWO), "combine")
    assert all(fact.comparable for fact in examined.ways)


def test_ways_with_one_forward_agree_among_themselves_under_dropout():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    found = by_way(examine(Problem(model, torch.rand(16, 8), TWO), "combine"))
    groups = {way: fact.group for way, fact in found.items()}
    assert {groups[way] for way in ("func1", "func2", "func3", "func4")} == {0}
    assert {groups[way] for way in ("one-forward retained", "one-forward summed", "multiback")} == {1}


def test_a_model_that_carries_its_graph_leaves_the_ways_that_run_and_points_to_growth():
    examined = examine(build_preset("recurrent", batch=2, num_losses=2), "combine")
    found = by_way(examined)
    assert "--question growth shows it" in found["func1"].note
    assert found["one-forward summed"].group == found["multiback"].group
    assert {act.way for act, _ in examined.prices} >= {"one-forward summed", "multiback"}


def test_gradients_that_are_not_finite_are_called_that():
    problem = Problem(nn.Linear(3, 3), torch.rand(4, 3), lambda o, _: (o * float("nan")).sum())
    assert all("not finite" in fact.note for fact in examine(problem, "combine").ways)


def test_sparse_gradients_are_compared_too():
    model = nn.Embedding(9, 4, sparse=True)
    problem = Problem(model, torch.tensor([1, 2, 1]), TWO)
    assert all(fact.comparable for fact in examine(problem, "combine").ways)


def test_parameters_of_loss_modules_are_compared_and_leaves_elsewhere_are_named():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, output, _data):
            return output.sum() * self.scale

    elsewhere = torch.tensor(1.0, requires_grad=True)
    problem = Problem(nn.Linear(3, 3), torch.rand(4, 3), [Scaled(), lambda o, _: (o * elsewhere).sum()])
    bound = Bound(problem)
    assert "scale" in [name for name, _ in bound._named]
    fact = by_way(examine(problem, "combine"))["func1"]
    assert fact.comparable
    assert "leaves outside model, losses and data are not compared (1)" in fact.note


def test_dropout_is_named_as_the_reason_where_forwards_differ():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    problem = Problem(model, torch.rand(16, 8), [lambda o, _: o.sum(), lambda o, _: o.square().sum()])
    found = by_way(examine(problem, "combine"))
    assert not found["one-forward summed"].comparable
    assert "random numbers" in found["one-forward summed"].note
    assert found["func2"].comparable


def test_a_way_that_cannot_run_is_noted_and_neither_priced_nor_fatal():
    labels = torch.randint(3, (4,))
    problem = Problem(
        nn.Linear(3, 3), torch.rand(4, 3), lambda o, _: nn.functional.cross_entropy(o, labels, reduction="none")
    )
    examined = examine(problem, "slices")
    fact = by_way(examined)["forward per slice"]
    assert not fact.comparable
    assert fact.note.startswith("does not run here: ValueError")
    assert "forward per slice" not in {act.way for act, _ in examined.prices}
    assert by_way(examined)["retained loop"].comparable


def test_a_problem_without_a_loss_per_row_says_why_slices_cannot_be_cut():
    problem = Problem(nn.Linear(3, 3), torch.rand(4, 3), [lambda o, _: o.sum(), lambda o, _: o.mean()])
    fact = by_way(examine(problem, "slices"))["forward per slice"]
    assert "one row must give one loss, by one function" in fact.note


def test_gradients_that_are_not_finite_are_never_ranked():
    problem = Problem(nn.Linear(3, 3), torch.rand(4, 3), lambda o, _: (o * float("nan")).sum())
    assert not any(fact.comparable for fact in examine(problem, "combine").ways)


def test_a_way_that_is_too_dear_keeps_its_gradients_checked_and_leaves_bytes_out():
    found = by_way(examine(conv_problem(), "slices", dear_seconds=0.0))
    assert found["retained loop"].comparable
    assert found["retained loop"].peak_bytes is None
    assert "bytes and FLOPs left out" in found["retained loop"].note


def test_memory_passes_that_disagree_are_reported(monkeypatch):
    passes = iter(range(1, 100))
    monkeypatch.setattr(memory, "self_test", lambda: "")
    monkeypatch.setattr(memory, "live_bytes", lambda call, _device: (call(), memory.Bytes(next(passes), 0))[1])
    found = by_way(examine(build_preset("two-layer", batch=1, num_losses=None), "retain"))
    assert found["retain_graph=False"].note == "two memory passes disagree: peak 1 and 2, held 0 and 0 bytes"


def test_flops_are_left_out_where_torch_cannot_count_them(monkeypatch):
    class Failing(examining.FlopCounterMode):
        def get_total_flops(self):
            raise RuntimeError

    monkeypatch.setattr(examining, "FlopCounterMode", Failing)
    found = by_way(examine(build_preset("two-layer", batch=1, num_losses=None), "retain"))
    assert found["retain_graph=False"].flops is None


def test_a_cycle_that_only_the_collector_frees_is_counted():
    class Cyclic(nn.Linear):
        def forward(self, data):
            keep = [data]
            keep.append(keep)
            return super().forward(data)

    found = by_way(examine(Problem(Cyclic(3, 3), torch.rand(2, 3), lambda o, _: o.sum()), "retain"))
    assert found["retain_graph=False"].collected > 0


def test_a_carried_hidden_state_grows_and_is_named_because_the_graph_reaches_it():
    growth = examine(build_preset("recurrent", batch=2, num_losses=None), "growth").growth
    nodes = {way: [step.nodes for step in growth.steps if step.way == way] for way in {s.way for s in growth.steps}}
    assert len(set(nodes["one graph, retained"])) == 1
    assert len(set(nodes["carried tensors detached"])) == 1
    rising = nodes["a forward per step"]
    assert all(after > before for before, after in itertools.pairwise(rising))
    assert growth.carried == ["hidden"]


def test_a_model_that_carries_nothing_neither_grows_nor_names_anything():
    growth = examine(build_preset("two-layer", batch=2, num_losses=None), "growth").growth
    assert len({step.nodes for step in growth.steps if step.way == "a forward per step"}) == 1
    assert growth.carried == []


def test_a_tensor_that_is_kept_but_not_reached_is_not_named():
    class Logging(nn.Linear):
        def forward(self, data):
            self.last = super().forward(data)
            return self.last

    growth = examine(Problem(Logging(3, 3), torch.rand(2, 3), lambda o, _: o.sum()), "growth").growth
    assert growth.carried == []


def test_growth_through_something_outside_the_model_is_seen_and_not_named():
    state = [torch.zeros(2, 3)]

    class Outside(nn.Linear):
        def forward(self, data):
            state[0] = super().forward(data + state[0])
            return state[0]

    growth = examine(Problem(Outside(3, 3), torch.rand(2, 3), lambda o, _: o.sum()), "growth").growth
    rising = [step.nodes for step in growth.steps if step.way == "a forward per step"]
    assert rising[-1] > rising[0]
    assert growth.carried == []


def test_a_step_that_fails_is_noted_with_its_number():
    class Breaking(nn.Linear):
        def forward(self, data):
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 3:
                raise RuntimeError("out of steps")
            return super().forward(data)

    examined = examine(Problem(Breaking(3, 3), torch.rand(2, 3), lambda o, _: o.sum()), "growth")
    assert by_way(examined)["a forward per step"].note == "stopped at step 3: out of steps"
    assert Act("growth", "a forward per step", "none") not in dict(examined.prices)


@pytest.mark.parametrize("grads", ["none", "accumulate"])
def test_the_traversals_that_multiback_makes_for_itself_are_not_taken_for_the_problems(grads):
    contract.agrees_with_autograd.cache_clear()
    torch.manual_seed(0)
    bound = Bound(build_preset("mlp", batch=None, num_losses=None))
    acts = questions.acts_of("combine", ["multiback"], grads)
    job = Examine(source=SOURCE, threads=1, acts=acts, dear_seconds=float("inf"))
    (fact,) = examining.Examiner(bound, job).run(FACTS, SOURCE, 0.0, lambda _label: None).ways
    assert fact.comparable
    assert fact.note == ""


def test_the_engine_is_left_as_it_was():
    before = torch.autograd._engine_run_backward
    examine(build_preset("two-layer", batch=1, num_losses=None), "combine")
    assert torch.autograd._engine_run_backward is before
    assert dataclasses.is_dataclass(Act)
