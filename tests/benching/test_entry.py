"""`mb.bench` measures problems given in Python, lambdas and notebook classes included."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import multiback as mb
from multiback import records
from multiback.benching import runner
from multiback.errors import OptionError, OutputError, ProblemError

SMALL = {"mode": "quick", "processes": 2, "rounds": 2, "questions": ["combine"], "threads": 1}


def problem():
    return mb.Problem(nn.Linear(3, 3), torch.rand(4, 3), [lambda o, _: o.sum(), lambda o, _: o.square().sum()])


def test_a_problem_given_in_python_is_measured_and_its_record_kept(tmp_path):
    given = problem()
    before = [parameter.clone() for parameter in given.model.parameters()]
    result = mb.bench(given, json=tmp_path / "run.json", **SMALL)
    assert "combine: separate backwards" in str(result)
    assert records.load(tmp_path / "run.json") == result.record
    assert all(parameter.grad is None for parameter in given.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, given.model.parameters(), strict=True))
    result.save(tmp_path / "copy.json")
    assert str(mb.Result.load(tmp_path / "copy.json")) == str(result)
    with pytest.raises(OutputError, match="exists already"):
        result.save(tmp_path / "copy.json")


def test_torch_objects_and_single_names_are_taken_too():
    result = mb.bench(
        problem(),
        mode="quick",
        processes=2,
        rounds=1,
        questions="retain",
        threads=1,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    assert result.record.problem.dtypes == {"data": "float64"}
    assert repr(result) == str(result)


def test_a_script_without_a_main_guard_can_call_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiback as mb, torch\n"
        "class Net(torch.nn.Linear):\n    pass\n"
        "problem = mb.Problem(Net(3, 3), torch.rand(4, 3), [lambda o, d: o.sum()])\n"
        "result = mb.bench(problem, mode='quick', processes=2, rounds=1, questions=['retain'], threads=1)\n"
        "print('measured', result.record.run.settings.processes)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=200)
    assert done.stdout.splitlines() == ["measured 2"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"problem": 3}, ProblemError, "problem: must be a multiback.Problem or a target's name; got int"),
        ({"problem": "mlp", "mode": "slow"}, OptionError, "mode: must be one of quick, default, rigorous"),
        ({"problem": "mlp", "rounds": 0}, OptionError, "--rounds: must be 1 or more"),
        ({"problem": "mlp", "json": "/no/such/run.json"}, OutputError, "does not exist"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments, kind, message):
    with pytest.raises(kind) as caught:
        mb.bench(**arguments)
    assert message in str(caught.value)


def test_a_problem_that_cannot_be_pickled_is_refused():
    class Stubborn(nn.Linear):
        def __reduce_ex__(self, _protocol):
            raise TypeError("no")

    with pytest.raises(ProblemError, match="problem: must be picklable"):
        mb.bench(mb.Problem(Stubborn(3, 3), torch.rand(2, 3), lambda o, _: o.sum()))


def test_a_bad_problem_is_refused_by_name_from_inside_the_process():
    with pytest.raises(mb.InputError, match=r"must be real; got torch\.complex64") as caught:
        mb.bench(mb.Problem(nn.Linear(3, 3), torch.rand(2, 3), lambda o, _: (o * 1j).sum()), **SMALL)
    assert "Traceback" in caught.value.details


def test_an_interrupted_run_is_an_interrupt_and_its_partial_record_is_kept(tmp_path, monkeypatch):
    measure_job = runner._Runner._measure_job

    def interrupt(self, number, plan):
        if number == 1:
            raise KeyboardInterrupt
        return measure_job(self, number, plan)

    monkeypatch.setattr(runner._Runner, "_measure_job", interrupt)
    with pytest.raises(KeyboardInterrupt):
        mb.bench(problem(), json=tmp_path / "run.json", **SMALL)
    assert records.load(tmp_path / "run.json").run.partial


def test_a_run_stops_on_precision_and_says_so(monkeypatch):
    monkeypatch.setattr(runner._Runner, "_widest", lambda _self: 0.01)
    result = mb.bench(problem(), mode="quick", questions=["retain"], rounds=1, threads=1)
    assert result.record.run.settings.stopped_by == "precision"
    assert result.record.run.settings.processes == 5


def test_a_run_stops_when_its_budget_is_spent(monkeypatch):
    monkeypatch.setattr(runner._Runner, "_widest", lambda _self: 1.0)
    monkeypatch.setattr(runner, "_LAST_SECONDS", 30.0)
    result = mb.bench(problem(), mode="quick", questions=["retain"], rounds=1, threads=1)
    assert result.record.run.settings.stopped_by in ("budget", "plan")
    assert result.record.run.settings.processes >= 5
