"""Every way to a kind of answer gives the loop's, or is named with its reason and not ranked."""

import contextlib
import importlib
import itertools
import types

import pytest
import torch
from torch import nn

from multiback import records
from multiback.benching import examining, kinds, peers, questions
from multiback.benching.bound import Bound
from multiback.benching.names import KINDS, WAYS
from multiback.benching.problems import Problem
from multiback.benching.protocol import Act, Examine, Source
from multiback.benching.ways import way_of
from multiback.errors import ProblemError
from multiback.measure.agreement import gap_between
from multiback.records import ProblemFacts

SOURCE = Source(target="test")
FACTS = ProblemFacts(target="test", shapes={}, dtypes={}, losses="", num_losses=1, num_parameters=1, num_rows=1, seed=0)
PACKAGES = {"TorchJD": "torchjd", "Opacus": "opacus", "BackPACK": "backpack"}
TWO = [lambda o, d: (o * d).sum(), lambda o, _: o.square().mean()]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output, _data):
        return output.sum() * self.scale


class PartlyUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, 5), nn.Linear(2, 2)

    def forward(self, data):
        return self.used(data)


def small(*, last=5):
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, last))


def convolutional():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def rows_of(model, data):
    return Problem(model, data, nn.CrossEntropyLoss(reduction="none"), targets=torch.randint(3, (len(data),)))


def partly_frozen():
    model = small()
    model[0].weight.requires_grad_(False)
    return Problem(model, torch.rand(3, 5), TWO)


def tied():
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    return Problem(model, torch.rand(3, 5), TWO)


PROBLEMS = {
    "two losses and data that require grad": lambda: Problem(small(), torch.rand(3, 5).requires_grad_(), TWO),
    "one loss per image": lambda: rows_of(convolutional(), torch.rand(4, 3, 6, 6).requires_grad_()),
    "one loss per row, of the data": lambda: Problem(small(), torch.rand(4, 5), lambda o, d: (o * d).sum(1)),
    "one function, several losses": lambda: Problem(small(), torch.rand(3, 5), lambda o, d: (o.sum(), (o * d).sum())),
    "a loss with a parameter": lambda: Problem(small(), torch.rand(3, 5), [Scaled(), TWO[1]]),
    "a frozen weight": partly_frozen,
    "a tied weight": tied,
    "a parameter that no loss reaches": lambda: Problem(PartlyUnused(), torch.rand(3, 5), TWO),
    "a batch of one": lambda: rows_of(small(last=3), torch.rand(1, 5)),
}  # fmt: skip
CASES = [
    (kind, way, problem)
    for kind in KINDS
    for way in WAYS[kind]
    for problem in PROBLEMS
    if kind != "rows" or "per" in problem or "one loss" in problem
]
# what TorchJD's engine does not take, in its own words or in ours
LEFT_OUT = {
    "a loss with a parameter": "a loss function has parameters of its own",
    "a tied weight": "Some modules had a forward pass without an associated backward pass",
}


def answer(bound, kind, way):
    """The answer of one run in its common form."""
    bound.begin("none")
    calls = way_of(kind, way).calls(bound, "none")
    next(calls)()
    found = [tensor.clone() for tensor in bound.gradients()]
    calls.close()
    bound.end()
    return found


def separate(bound):
    """K separate calls of autograd.grad, each on a forward of its own."""
    gradients = []
    for index in range(bound.num_losses):
        bound.begin("none")
        loss = bound.losses(bound.forward())[index]
        gradients.append(torch.autograd.grad(loss, bound.parameters, allow_unused=True, materialize_grads=True))
        bound.end()
    return gradients


def expected_of(bound, kind):
    gradients = separate(bound)
    if kind in ("each", "rows"):
        return [tensor for row in gradients for tensor in row]
    flat = torch.stack([torch.cat([tensor.flatten() for tensor in row]) for row in gradients])
    return list(flat @ flat.T if kind == "gram" else flat.norm(dim=1))


def examine(problem, kind, ways=None):
    torch.manual_seed(0)
    acts = questions.acts_of(kind, ways, None)
    job = Examine(source=SOURCE, threads=1, acts=acts, dear_seconds=float("inf"))
    return examining.Examiner(Bound(problem), job).run(FACTS, SOURCE, 0.0, lambda _label: None)


def by_way(examined):
    return {fact.way: fact for fact in examined.ways}


@pytest.mark.parametrize(("kind", "way", "problem"), CASES)
def test_every_way_gives_the_answer_of_separate_calls(kind, way, problem):
    if way in PACKAGES:
        pytest.importorskip(PACKAGES[way])
    torch.manual_seed(0)
    bound = Bound(PROBLEMS[problem]())
    if way == "TorchJD" and kind in ("gram", "norms") and problem in LEFT_OUT:
        with pytest.raises(ProblemError, match=LEFT_OUT[problem]):
            answer(bound, kind, way)
        return
    gap = gap_between(answer(bound, kind, way), expected_of(bound, kind))
    assert gap.agrees, (gap.difference, kinds.name_of_part(kind, bound, gap.worst))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_no_gradient_and_no_change_behind(kind):
    torch.manual_seed(0)
    bound = Bound(rows_of(nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.0)), torch.rand(4, 5)))
    before = [parameter.clone() for parameter in bound.parameters]
    for way in ("loop", "batched", "torch.func", "multiback"):
        answer(bound, kind, way)
    assert all(parameter.grad is None for parameter in bound.parameters)
    assert all(torch.equal(*pair) for pair in itertools.zip_longest(before, bound.parameters))
    assert not any(module._forward_hooks or module._backward_hooks for module in bound.model.modules())


def test_rows_are_refused_where_the_losses_are_not_one_per_row():
    with pytest.raises(ProblemError) as caught:
        examine(Problem(small(), torch.rand(3, 5), TWO), "rows")
    assert str(caught.value) == (
        "--kind rows: the target must have one loss per row, by one function; test has K = 2 losses and B = 3 rows. "
        'Give a loss with reduction="none", or use --kind each.'
    )


def test_as_many_losses_as_rows_do_not_make_row_losses_where_they_are_several_functions():
    with pytest.raises(ProblemError, match="one loss per row, by one function"):
        examine(Problem(small(), torch.rand(2, 5), TWO), "rows")


def test_a_problem_without_parameters_has_nothing_to_ask():
    with pytest.raises(ProblemError, match="--kind each: the target must have trainable parameters"):
        examine(Problem(torch.sin, torch.rand(3, 5).requires_grad_(), TWO), "each")


def test_gradients_come_before_times_and_bytes_are_exact():
    found = by_way(examine(PROBLEMS["one loss per image"](), "rows", ["loop", "batched", "torch.func", "multiback"]))
    assert all(fact.comparable for fact in found.values())
    answer_bytes = 4 * 4 * sum(parameter.numel() for parameter in convolutional().parameters())
    assert {fact.held_bytes for fact in found.values()} == {answer_bytes}
    assert all(fact.peak_bytes > answer_bytes for fact in found.values())
    assert "disagree" not in "".join(fact.note for fact in found.values())


def test_train_mode_batch_norm_leaves_torch_func_out_with_its_reason_and_the_engine_in():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    examined = examine(rows_of(model, torch.rand(4, 5)), "rows", ["loop", "torch.func", "multiback"])
    found = by_way(examined)
    assert found["multiback"].comparable
    assert not found["torch.func"].comparable
    assert found["torch.func"].note.startswith("does not run here: ")
    assert "torch.func" not in {act.way for act, _ in examined.prices}


def test_a_model_that_is_no_module_is_named_as_the_reason():
    module = small()

    class Losses(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, output, _data):
            return self.inner(output).sum(), output.sum() * module[0].bias[0]

    found = by_way(examine(Problem(torch.sin, torch.rand(3, 5), Losses()), "each"))
    assert found["torch.func"].note == (
        "does not run here: the model must be an nn.Module, whose parameters can be replaced; "
        "got builtin_function_or_method"
    )
    assert found["multiback"].comparable


def test_a_way_with_another_answer_is_not_comparable_and_says_where(monkeypatch):
    wrong = kinds._way(
        lambda bound: lambda: [torch.ones(bound.num_losses, *p.shape) for p in bound.parameters],
        kinds._parts_of_stacked,
    )
    monkeypatch.setattr(examining, "way_of", _replacing("batched", wrong))
    fact = by_way(examine(PROBLEMS["two losses and data that require grad"](), "each", ["loop", "batched"]))["batched"]
    assert not fact.comparable
    assert fact.note.startswith("most in loss ")


def test_an_answer_of_another_shape_is_refused(monkeypatch):
    wrong = kinds._way(lambda bound: lambda: list(bound.parameters), kinds._parts_of_stacked)
    monkeypatch.setattr(examining, "way_of", _replacing("batched", wrong))
    fact = by_way(examine(PROBLEMS["two losses and data that require grad"](), "each", ["loop", "batched"]))["batched"]
    assert fact.note == "does not run here: its answer has shape (7, 5) where (2, 7, 5) was expected"


def _replacing(name, run):
    def way_named(question, way):
        found = way_of(question, way)
        return type(found)(name, run) if way == name else found

    return way_named


def test_an_error_of_any_class_becomes_the_reason():
    class Strange(Exception):
        pass

    def prepare(_bound):
        raise Strange("not on\na Tuesday.")

    with pytest.raises(ProblemError, match=r"^Strange: not on$"):
        next(kinds._way(prepare, kinds._parts_of_tensor)(None, "none"))


def test_parts_are_named_by_loss_and_parameter():
    bound = Bound(Problem(small(), torch.rand(3, 5), TWO))
    assert kinds.name_of_part("each", bound, 5) == "loss 2, 0.bias"
    assert kinds.name_of_part("gram", bound, 1) == "loss 2"


@pytest.mark.parametrize("way", PACKAGES)
def test_a_library_that_is_not_installed_is_named(monkeypatch, way):
    def refuse(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])

    monkeypatch.setattr(importlib, "import_module", refuse)
    peers.preload([way])
    fact = by_way(examine(PROBLEMS["one loss per row, of the data"](), "rows", ["loop", way]))[way]
    assert fact.note == f"does not run here: {PACKAGES[way]} is not installed"


def test_a_library_that_fails_to_import_says_how(monkeypatch):
    def fail(_name):
        raise OSError("no such library")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ProblemError, match=r"importing torchjd.autojac raised OSError: no such library"):
        peers.torchjd_jacobian(None)


class PerSample(nn.Module):
    """Leaves per-sample gradients of a linear layer on its parameters, as libraries with hooks do."""

    def __init__(self, model, attribute, **_options):
        super().__init__()
        self.model, self.attribute = model, attribute

    def forward(self, data):
        output = self.model(data)
        output.register_hook(lambda gradient: self._leave(gradient, data))
        return output

    def _leave(self, gradient, data):
        setattr(self.model.weight, self.attribute, gradient[:, :, None] * data[:, None, :])
        if self.model.bias is not None:
            setattr(self.model.bias, self.attribute, gradient)


@pytest.fixture
def hooked(monkeypatch):
    """Stand-ins for the two libraries, since what is under test is how they are used."""
    opacus = types.SimpleNamespace(GradSampleModule=lambda model, **o: PerSample(model, "grad_sample", **o))
    extensions = types.SimpleNamespace(BatchGrad=object)
    backpack = types.SimpleNamespace(
        extend=lambda model: PerSample(model, "grad_batch"), backpack=lambda _extension: contextlib.nullcontext()
    )
    found = {"opacus": opacus, "backpack": backpack, "backpack.extensions": extensions}
    monkeypatch.setattr(importlib, "import_module", found.__getitem__)


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("way", ["Opacus", "BackPACK"])
def test_a_library_with_hooks_works_on_a_copy_that_every_run_starts_without_gradients(way):
    torch.manual_seed(0)
    bound = Bound(rows_of(nn.Linear(5, 3), torch.rand(4, 5).requires_grad_()))
    expected = expected_of(bound, "rows")
    for _ in range(2):
        assert gap_between(answer(bound, "rows", way), expected).agrees
        (kept,) = bound.kept.values()
        left = [getattr(p, name, None) for p in kept.prepared().parameters() for name in ("grad", *peers._LEFT)]
        assert left == [None] * len(left)
    assert not any(hasattr(parameter, name) for parameter in bound.parameters for name in peers._LEFT)


@pytest.mark.usefixtures("hooked")
def test_parameters_that_a_library_leaves_out_are_named():
    bound = Bound(rows_of(nn.Linear(5, 3), torch.rand(4, 5)))
    bound.begin("none")
    step = peers.backpack_rows(bound)
    bound.kept["BackPACK"].made.attribute = "elsewhere"
    with pytest.raises(ProblemError, match="it gives no per-sample gradients of weight, bias"):
        step()


@pytest.mark.usefixtures("hooked")
def test_a_library_that_wraps_modules_takes_nothing_else():
    with pytest.raises(ProblemError, match=r"it takes an nn.Module; the model is builtin_function_or_method"):
        peers.opacus_rows(Bound(Problem(torch.sin, torch.rand(2, 5).requires_grad_(), TWO)))


def test_buffers_of_a_copy_are_put_back_before_every_run():
    model = nn.BatchNorm1d(3)
    kept = peers._Kept(model, lambda copied: copied)
    kept.made(torch.rand(4, 3))
    assert kept.made.num_batches_tracked == 1
    assert kept.prepared().num_batches_tracked == 0
    assert model.num_batches_tracked == 0


TARGETS = """
import multiback as mb
import torch
from torch import nn

def two():
    return mb.Problem(nn.Linear(3, 3), torch.rand(4, 3), [lambda o, d: o.sum(), lambda o, d: o.square().sum()])

def images():
    return mb.Problem(
        nn.Linear(3, 3), torch.rand(4, 3), nn.CrossEntropyLoss(reduction="none"), targets=torch.randint(3, (4,))
    )
"""
SMALL = ("--quick", "--processes", "2", "--rounds", "1", "--way", "loop", "--way", "torch.func", "--way", "multiback")


def test_a_kind_is_the_only_question_and_its_record_shows_the_same_report(tmp_path, multiback):
    (tmp_path / "train.py").write_text(TARGETS)
    done = multiback("bench", "train.py:images", "--kind", "rows", *SMALL, "--way", "BackPACK", "--json", "run.json")
    assert done.code == 0, done.err
    record = records.load(tmp_path / "run.json")
    assert record.run.settings.questions == ["rows"]
    assert {verdict.question for verdict in record.verdicts} == {"rows"}
    assert {"loop", "multiback (again)"} <= set(record.samples.way)
    assert {fact.grads for fact in record.ways} == {"none"}
    assert "loop / way" in done.out
    assert multiback("show", "run.json").out == done.out


def test_a_kind_goes_beside_questions_that_are_named_and_takes_rules(tmp_path, multiback):
    (tmp_path / "train.py").write_text(TARGETS)
    done = multiback(
        "bench", "train.py:two", "--kind", "gram", "--question", "retain", *SMALL, "--way", "retain_graph=False",
        "--fail-if", "gram:loop/multiback<1e9",
    )  # fmt: skip
    assert done.code in (1, 3), done.err
    assert "gram: the inner products of K losses' gradients" in done.out
    assert "retain: what does retain_graph=True cost?" in done.out


def test_row_answers_of_a_target_without_row_losses_end_with_one_sentence_and_code_2(tmp_path, multiback):
    (tmp_path / "train.py").write_text(TARGETS)
    done = multiback("bench", "train.py:two", "--kind", "rows", "--quick", "--json", "run.json")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith("multiback: --kind rows: the target must have one loss per row")
    assert not (tmp_path / "run.json").exists()


def test_acts_of_a_kind_know_no_policy_of_grad():
    assert {act.grads for act in questions.acts_of("each", None, "accumulate")} == {"none"}
    assert questions.control_of(questions.acts_of("each", None, None)) == Act("each", "multiback", "none")
