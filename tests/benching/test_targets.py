"""Targets of every form become problems, and what is wrong with them is said in one sentence."""

import pickle
import sys

import cloudpickle
import pytest
import torch
from torch import nn

from multiback.benching import targets
from multiback.benching.names import PRESETS
from multiback.benching.problems import ClampLoss, Problem, WeightedSum
from multiback.benching.protocol import Source
from multiback.errors import MultibackError, OptionError, ProblemError, TargetError

MODULE = """
import multiback as mb
import torch
from torch import nn

def problem(batch=4):
    return mb.Problem(nn.Linear(3, 3), torch.rand(batch, 3), lambda output, data: output.sum())

def other(output, data):
    return output.square().sum()

def wrong():
    return nn.Linear(3, 3)

def keywords(**options):
    return mb.Problem(nn.Linear(3, 3), torch.rand(options["batch"], 3), other)

VALUE = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import no_such_package_anywhere")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("_multiback_target_") or name == "train"]:
        del sys.modules[name]
    yield tmp_path
    sys.modules.pop("train", None)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_built_and_takes_a_batch(name):
    batch = 3
    problem = targets.build(Source(target=name, batch=batch)).problem
    data = problem.data
    assert data.shape[0] == batch


def test_a_function_in_a_file_is_called_with_the_options_that_it_takes():
    assert targets.build(Source(target="train.py:problem", batch=7)).problem.data.shape == (7, 3)
    assert targets.build(Source(target="train.py:keywords", batch=2)).problem.data.shape == (2, 3)


def test_a_function_in_a_module_of_the_working_folder_is_found():
    assert targets.build(Source(target="train:problem")).problem.data.shape == (4, 3)


def test_the_same_seed_builds_the_same_problem():
    first, second = (targets.build(Source(target="two-layer", seed=5)).problem for _ in range(2))
    assert torch.equal(first.data, second.data)
    assert torch.equal(first.model[0].weight, second.model[0].weight)


def test_loss_options_replace_the_losses_of_the_target():
    built = targets.build(Source(target="train.py:problem", losses=["train.py:other", "train.py:other"]))
    assert [loss.__name__ for loss in built.problem.losses] == ["other", "other"]
    assert built.losses == "train.py:other, train.py:other"


REFUSED = {
    "nonsense": (TargetError, "the target must be a preset (mlp,"),
    "train.py": (TargetError, "a file target must name its function; write train.py:function"),
    "none.py:problem": (TargetError, "the target's file must exist"),
    "train.py:nothing": (TargetError, "train.py has no 'nothing'"),
    "train.py:VALUE": (TargetError, "something not callable under 'VALUE'"),
    "broken.py:problem": (TargetError, "importing it raised ModuleNotFoundError: No module named"),
    "leaving.py:problem": (TargetError, "importing it raised SystemExit: 3"),
    "no.such:problem": (TargetError, "importing it raised ModuleNotFoundError"),
    "train.py:wrong": (ProblemError, "must return multiback.Problem(model, data, losses); got Linear"),
}


@pytest.mark.parametrize("target", REFUSED)
def test_a_target_that_cannot_be_is_refused_in_one_sentence(target):
    kind, message = REFUSED[target]
    with pytest.raises(kind) as caught:
        targets.build(Source(target=target))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_option_that_the_target_does_not_take_is_refused():
    with pytest.raises(OptionError, match="--num-losses: the target must take an argument named num_losses"):
        targets.build(Source(target="train.py:problem", num_losses=3))


def test_an_input_shape_goes_with_saved_models_only():
    for target in ("mlp", "train.py:problem"):
        with pytest.raises(OptionError, match="--input: goes with a saved model's file"):
            targets.build(Source(target=target, input_shape=[1, 3]))


def test_slices_have_as_many_losses_as_rows():
    with pytest.raises(OptionError, match=r"must equal the batch of 128; got 3\. Use --batch 3"):
        targets.build(Source(target="slices", num_losses=3))


# ---- saved models --------------------------------------------------------------------------------


def save(model, name="model.pytorch"):
    torch.save(model, name)
    return name


def saved_source(name, shape=(1, 4), **options):
    return Source(target=name, input_shape=list(shape), **{"trust_pickle": True, **options})


def test_a_pickled_model_is_refused_without_trust_and_no_code_runs():
    class Trap:
        def __reduce__(self):
            return (open, ("trapped", "w"))

    with open("trap.pt", "wb") as stream:
        pickle.dump(Trap(), stream, protocol=2)
    for name in ("trap.pt", save(nn.Linear(4, 4))):
        with pytest.raises(TargetError, match=r"runs code of its author's choice.*--trust-pickle"):
            targets.build(saved_source(name, trust_pickle=False))
    assert not targets.Path("trapped").exists()


def test_a_saved_model_with_equal_shapes_gets_the_published_losses():
    built = targets.build(saved_source(save(nn.Linear(4, 4)), batch=3))
    assert built.problem.losses == [ClampLoss(0.5), ClampLoss(1.0)]
    assert built.problem.data.shape == (3, 4)
    assert "published losses" in built.losses


def test_another_saved_model_gets_random_sums_of_its_outputs_and_says_so():
    built = targets.build(saved_source(save(nn.LSTM(4, 3)), shape=(5, 4), num_losses=3))
    assert built.problem.losses == [WeightedSum(0), WeightedSum(1), WeightedSum(2)]
    assert "3 randomly weighted sums" in built.losses
    output = built.problem.model(built.problem.data)
    first = built.problem.losses[0](output, None)
    assert first.requires_grad
    assert torch.equal(first, built.problem.losses[0](output, None))


def test_what_was_decided_once_is_not_decided_again_by_a_forward():
    name = save(nn.Linear(4, 4))
    built = targets.build(saved_source(name, saved_losses="random"))
    assert built.saved_losses == "random"
    assert isinstance(built.problem.losses[0], WeightedSum)


def test_loss_options_serve_saved_models_too():
    built = targets.build(saved_source(save(nn.Linear(4, 4)), losses=["train.py:other"]))
    assert built.problem.losses[0].__name__ == "other"


def test_a_saved_model_needs_the_shape_of_its_input():
    with pytest.raises(OptionError, match="--input: a saved model needs the shape"):
        targets.build(Source(target=save(nn.Linear(4, 4)), trust_pickle=True))


def test_an_input_that_the_model_does_not_take_is_refused():
    with pytest.raises(ProblemError, match=r"--input 1x5: the model must take this input; it raised RuntimeError"):
        targets.build(saved_source(save(nn.Linear(4, 4)), shape=(1, 5)))


@pytest.mark.parametrize(
    ("content", "message"),
    [({"weight": torch.ones(2)}, "a state dict has no forward"), ([1, 2], "it holds list")],
)
def test_a_file_without_a_model_is_refused(content, message):
    with pytest.raises(TargetError, match=message):
        targets.build(saved_source(save(content), trust_pickle=False))


@pytest.mark.parametrize("trust", [True, False])
def test_a_file_that_torch_did_not_write_is_refused(tmp_path, trust):
    (tmp_path / "junk.pt").write_bytes(b"junk that is no archive")
    with pytest.raises(TargetError, match=r"junk.pt: "):
        targets.build(saved_source("junk.pt", trust_pickle=trust))


def test_a_model_whose_class_is_gone_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from importlib import import_module

    save(import_module("gone").Net(4, 4))
    (tmp_path / "gone.py").unlink()
    sys.modules.pop("gone")
    with pytest.raises(TargetError, match="the model's class must be importable here"):
        targets.build(saved_source("model.pytorch"))


# ---- problems given in Python ----------------------------------------------------------------------


def pickled_source(tmp_path, value):
    path = tmp_path / "problem.pickle"
    path.write_bytes(cloudpickle.dumps(value))
    return Source(target="given", pickled=str(path))


def test_a_pickled_problem_comes_back_with_its_lambdas(tmp_path):
    problem = Problem(nn.Linear(3, 3), torch.rand(2, 3), [lambda o, _: o.sum() * 7])
    built = targets.build(pickled_source(tmp_path, problem)).problem
    assert built.losses[0](torch.ones(2), None) == 14


def test_something_else_than_a_problem_is_refused(tmp_path):
    with pytest.raises(ProblemError, match=r"must be a multiback.Problem; got int"):
        targets.build(pickled_source(tmp_path, 3))


def test_a_class_that_is_not_importable_elsewhere_is_refused(tmp_path):
    path = tmp_path / "problem.pickle"
    path.write_bytes(b"cno_such_module_at_all\nNet\n.")
    with pytest.raises(TargetError, match="must be buildable in a fresh process"):
        targets.build(Source(target="given", pickled=str(path)))


# ---- dtype and device ------------------------------------------------------------------------------


def test_floating_dtypes_are_taken_and_others_refused():
    assert targets.dtype_of("bfloat16") == torch.bfloat16
    assert targets.dtype_of(None) is None
    for name in ("int32", "nonsense", "nn"):
        with pytest.raises(OptionError, match="--dtype: must be a floating dtype"):
            targets.dtype_of(name)


def test_devices_that_torch_cannot_use_are_refused():
    targets.check_device("cpu")
    with pytest.raises(OptionError, match="--device: must be a device that torch can use here; got 'quux'"):
        targets.check_device("quux")


def test_every_error_of_ours_is_a_multiback_error():
    assert all(issubclass(kind, MultibackError) for kind in (OptionError, ProblemError, TargetError))
