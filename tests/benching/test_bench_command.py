"""`multiback bench` and `multiback show` as typed: what they print, write and return."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from multiback import records

TARGETS = """
import multiback as mb
import torch
from torch import nn

LABELS = torch.randint(3, (4,))

def two(batch=4):
    print("the target prints")
    return mb.Problem(
        nn.Linear(3, 3), torch.rand(batch, 3), [lambda o, d: o.sum(), lambda o, d: o.square().sum()]
    )

def square(output, data):
    return output.square().sum()

def slow():
    class Slow(nn.Linear):
        def forward(self, data):
            import time
            time.sleep(0.05)
            return super().forward(data)
    return mb.Problem(Slow(3, 3), torch.rand(2, 3), [lambda o, d: o.sum(), lambda o, d: o.square().sum()])

def wrong():
    return 3

def frozen():
    model = nn.Linear(3, 3)
    model.requires_grad_(False)
    return mb.Problem(model, torch.rand(2, 3), square)

def complex_loss():
    return mb.Problem(nn.Linear(3, 3), torch.rand(2, 3), lambda o, d: (o * 1j).sum())

def integer_loss():
    return mb.Problem(nn.Linear(3, 3), torch.rand(2, 3), lambda o, d: o.argmax())

def detached_loss():
    return mb.Problem(nn.Linear(3, 3), torch.rand(2, 3), lambda o, d: o.detach().sum())

def raising_loss():
    return mb.Problem(nn.Linear(3, 3), torch.rand(2, 3), lambda o, d: o @ o)

def dying():
    import os
    os.abort()

def loud():
    print("loud" * 100_000, flush=True)
    return two()

def leaving():
    import os
    os._exit(0)

def another_size():
    import os
    n = 2 + os.getpid() % 50
    return mb.Problem(nn.Linear(3, 3), torch.rand(n, 3), [lambda o, d: o.sum(), lambda o, d: o.mean()])

def mixed_rows():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    return mb.Problem(
        model, torch.rand(4, 3), nn.CrossEntropyLoss(reduction="none"), targets=LABELS
    )
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TARGETS)
    (tmp_path / "broken.py").write_text("import no_such_package_anywhere")
    return tmp_path


SMALL = ("--processes", "2", "--rounds", "2")


def test_a_bench_of_a_users_function_writes_a_whole_record_and_a_report(folder, multiback):
    done = multiback("bench", "train.py:two", "--quick", *SMALL, "--json", "run.json", "--markdown", "run.md")
    assert done.code == 0, done.err
    assert done.err == ""
    assert "the target prints" not in done.out
    assert "combine: separate backwards" in done.out
    assert (folder / "run.md").read_text().startswith("# multiback bench train.py:two")
    record = records.load(folder / "run.json")
    assert not record.run.partial
    assert record.run.settings.stopped_by == "plan"
    assert (record.problem.num_losses, record.problem.num_parameters, record.problem.num_rows) == (2, 12, 4)
    table = record.samples
    seen = set(zip(table.question, table.way, table.phase, strict=True))
    for way in ("func1", "func2", "func3", "func4", "one-forward retained", "one-forward summed", "multiback"):
        assert ("combine", way, "warm") in seen
        assert ("combine", way, "warmup") in seen
    assert ("cold", "backward", "cold") in seen
    assert ("cold", "thread start", "cold") in seen
    assert ("combine", "one-forward summed (again)", "warm") in seen
    assert record.control is not None
    policies = {
        (grads, index)
        for question, grads, index in zip(table.question, table.grads, table.call_index, strict=True)
        if question == "successive"
    }
    assert policies == {(grads, index) for grads in ("none", "accumulate") for index in (1, 2, 3, 4)}
    assert {process for process, q in zip(table.process, table.question, strict=True) if q == "combine"} == {0, 1}
    assert {v.question for v in record.verdicts} == {"successive", "cold", "retain", "combine"}
    shown = multiback("show", "run.json")
    assert shown.out == done.out


def test_show_prints_json_and_markdown_and_no_two_forms_at_once(folder, multiback, full_record):
    records.write_atomically(folder / "run.json", records.encode(full_record))
    assert json.loads(multiback("show", "run.json", "--json").out)["schema"] == "multiback.bench/1"
    assert multiback("show", "run.json", "--markdown").out.startswith("# multiback bench mlp")
    done = multiback("show", "run.json", "--json", "--markdown")
    assert (done.code, done.out) == (2, "")
    assert multiback("show", "none.json").code == 2


REFUSED = {
    "a target that fails to import": (["broken.py:f"], "importing it raised ModuleNotFoundError"),
    "a function that returns the wrong thing": (["train.py:wrong"], "must return multiback.Problem"),
    "a missing file": (["none.py:f"], "the target's file must exist"),
    "no trainable parameter": (["train.py:frozen"], "must have a trainable parameter"),
    "a complex loss": (["train.py:complex_loss"], "must be real; got torch.complex64"),
    "an integer loss": (["train.py:integer_loss"], "must be floating; got torch.int64"),
    "a loss without graph": (["train.py:detached_loss"], "must have a graph"),
    "a loss that raises": (["train.py:raising_loss"], "it raised RuntimeError"),
    "a target that dies": (["train.py:dying"], "it ended with SIGABRT"),
    "a target that leaves without a word": (["train.py:leaving"], "it ended with exit status 0"),
    "another problem in every process": (["train.py:another_size"], "must build the same problem in every process"),
    "the same file by two names": (["mlp", "--markdown", "./out.json"], "must be two files"),
    "a huge batch": (["mlp", "--batch", "99999999999999999999"], "--batch: must be at most 2147483647"),
    "a shape in other digits": (["mlp", "--input", "\u00b2x4"], "--input: must be a shape"),
    "an unwritable output": (["mlp", "--markdown", "no/folder.md"], "does not exist"),
    "two outputs in one file": (["mlp", "--markdown", "out.json"], "must be two files"),
    "a batch of zero": (["mlp", "--batch", "0"], "--batch: must be 1 or more; got 0"),
    "too many threads": (["mlp", "--threads", "9999"], "--threads: must be from 1 to"),
    "both modes": (["mlp", "--quick", "--rigorous"], "a run has one mode"),
    "a malformed rule": (["mlp", "--fail-if", "nonsense"], "--fail-if: must be QUESTION"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_ends_with_one_sentence_code_2_and_nothing_written(folder, multiback, case):
    arguments, message = REFUSED[case]
    done = multiback("bench", *arguments, "--json", "out.json")
    assert done.code == 2
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("multiback: ")
    assert message in line
    assert sorted(path.name for path in folder.iterdir() if path.suffix != "") == ["broken.py", "train.py"]


def test_a_pickled_model_is_refused_without_trust(folder, multiback):
    import torch

    torch.save(torch.nn.Linear(3, 3), folder / "model.pytorch")
    done = multiback("bench", "model.pytorch", "--input", "1x3")
    assert done.code == 2
    assert "--trust-pickle" in done.err


def test_standard_output_takes_one_form(multiback):
    done = multiback("bench", "mlp", "--json", "-", "--markdown", "-")
    assert (done.code, done.out) == (2, "")
    assert "standard output takes one of them" in done.err


def test_debug_shows_the_traceback_of_the_process_where_it_happened(folder, multiback):
    done = multiback("bench", "train.py:raising_loss", "--debug")
    assert done.code == 2
    assert "train.py" in done.err
    assert "Traceback" in done.err
    assert "o @ o" in done.err


def test_debug_lets_the_target_print(folder, multiback):
    done = multiback("bench", "train.py:two", "--quick", *SMALL, "--question", "retain", "--debug")
    assert done.code == 0
    assert "the target prints" in done.err
    assert "the target prints" not in done.out


def test_a_target_that_prints_into_a_closed_pipe_does_not_hang(folder, multiback):
    command = [sys.executable, "-c", "from multiback.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "bench", "train.py:loud", "--question", "retain", "--quick", *SMALL, "--debug"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    process.stderr.close()
    assert process.wait(timeout=120) != 0


def test_json_to_standard_output_keeps_the_report_apart(folder, multiback):
    done = multiback("bench", "train.py:two", "--quick", *SMALL, "--question", "retain", "--json", "-")
    record = records.decode(done.out.encode(), "stdout")
    assert record.run.settings.questions == ["retain"]
    assert "retain: what does retain_graph=True cost?" in done.err


def test_an_existing_output_is_kept_unless_forced(folder, multiback):
    (folder / "run.json").write_text("precious")
    arguments = ["bench", "train.py:two", "--quick", *SMALL, "--question", "retain", "--json", "run.json"]
    done = multiback(*arguments)
    assert (done.code, (folder / "run.json").read_text()) == (2, "precious")
    assert multiback(*arguments, "--force").code == 0
    assert records.load(folder / "run.json").run.settings.processes == 2


def test_options_reach_the_record(folder, multiback):
    done = multiback(
        "bench", "train.py:two", "--quick", *SMALL, "--question", "combine", "--way", "func1", "--way", "multiback",
        "--batch", "6", "--dtype", "float64", "--grads", "prealloc", "--threads", "1", "--seed", "7", "--margin", "9",
        "--loss", "train.py:square", "--json", "run.json",
    )  # fmt: skip
    assert done.code == 0, done.err
    record = records.load(folder / "run.json")
    settings = record.run.settings
    assert (settings.threads, settings.seed, settings.margin, settings.grads) == (1, 7, 0.09, "prealloc")
    assert record.problem.shapes == {"data": [6, 3]}
    assert record.problem.dtypes == {"data": "float64"}
    assert record.problem.losses == "train.py:square"
    assert {way.removesuffix(" (again)") for way in record.samples.way} == {"func1", "multiback"}
    assert set(record.samples.grads) == {"prealloc"}


@pytest.mark.parametrize(
    ("rule", "code", "word"),
    [
        ("combine:func1/multiback<1e9", 1, "true"),
        ("combine:func1/multiback<1e-9", 0, "false"),
        ("combine:func1/one-forward retained<1", 3, "undecided"),
    ],
)
def test_a_rule_decides_the_exit_code(folder, multiback, rule, code, word):
    arguments = ["bench", "train.py:two", "--quick", "--processes", "3", "--rounds", "1", "--question", "combine"]
    if code == 3:  # one process gives no interval, so nothing can be decided
        arguments[arguments.index("3")] = "1"
    done = multiback(*arguments, "--fail-if", rule)
    assert f"--fail-if {rule}: " in done.out
    if "A/A control differs" not in done.out.split("--fail-if")[1]:
        assert done.code == code, done.out
        assert f"{rule}: {word}" in done.out


def test_a_way_whose_gradients_differ_is_not_ranked(folder, multiback):
    done = multiback("bench", "train.py:mixed_rows", "--quick", *SMALL, "--question", "slices", "--json", "run.json")
    assert done.code == 0, done.err
    record = records.load(folder / "run.json")
    outcomes = {v.outcome for v in record.verdicts if "forward per slice" in (v.baseline, v.candidate)}
    assert outcomes <= {"not-comparable"}
    assert "forward per slice" in done.out


def test_ctrl_c_keeps_a_partial_record_marked_partial(folder):
    command = [sys.executable, "-c", "from multiback.cli import main; main()"]
    arguments = ["bench", "train.py:slow", "--question", "combine", "--processes", "30", "--json", "run.json"]
    process = subprocess.Popen(
        command + arguments,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while not (folder / "run.json").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=100)
    assert process.returncode == 130, error
    record = records.load(folder / "run.json")
    assert record.run.partial
    assert record.run.settings.stopped_by == "interrupt"
    assert len(record.samples) > 0
    assert "INTERRUPTED, this record is partial" in " ".join(out.split())
    assert "Traceback" not in error


def test_terminating_the_run_ends_its_processes_and_removes_its_files(folder):
    temporary = folder / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-c", "from multiback.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "bench", "train.py:slow", "--question", "combine"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children = _wait_for_workers(process.pid, 1)
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    _wait_until_gone(children)
    assert not list(temporary.glob("multiback-*"))


def test_killing_the_run_ends_its_processes_too(folder):
    command = [sys.executable, "-c", "from multiback.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "bench", "train.py:slow"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    children = _wait_for_workers(process.pid, 2)
    process.kill()
    process.wait(timeout=60)
    _wait_until_gone(children)


def _wait_for_workers(pid, count):
    """The measuring processes of a run once it has `count`; its other children (uname, say) end by themselves."""
    deadline = time.monotonic() + 100
    while len(workers := _workers(pid)) < count:
        assert time.monotonic() < deadline, f"{len(workers)} of {count} measuring processes started"
        time.sleep(0.02)
    return workers


def _workers(pid):
    import psutil

    workers = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "multiback.benching.worker" in child.cmdline():
                    workers.append(child)
    return workers


def _wait_until_gone(processes):
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_reader_that_leaves_early_is_no_error_of_a_rule(folder, multiback, full_record):
    records.write_atomically(folder / "run.json", records.encode(full_record))
    command = f"{sys.executable} -c 'from multiback.cli import main; main()' show run.json"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 141)
    assert "Traceback" not in done.stderr
    full = subprocess.run(
        ["bash", "-c", f"{command} > /dev/full"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert full.returncode == 2
    assert full.stderr.startswith("multiback: standard output: cannot be written")


def test_ctrl_c_before_anything_was_measured_writes_nothing(folder):
    command = [sys.executable, "-c", "from multiback.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "bench", "mlp", "--json", "run.json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_for_workers(process.pid, 1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted before anything was measured; nothing was written" in error
    assert not (folder / "run.json").exists()


def test_a_file_beside_the_user_does_not_replace_a_standard_module(folder, multiback):
    (folder / "random.py").write_text("raise RuntimeError('not this one')")
    done = multiback("bench", "mlp", "--list", PYTHONSAFEPATH="1")
    assert done.code == 0
    done = multiback("bench", "two-layer", "--quick", *SMALL, "--question", "retain", PYTHONSAFEPATH="1")
    assert done.code == 0, done.err


def test_the_list_names_every_preset_question_and_way(multiback):
    from multiback.benching.names import PRESETS, QUESTIONS, WAYS

    out = multiback("bench", "--list").out
    for name in (*PRESETS, *QUESTIONS, *(way for ways in WAYS.values() for way in ways)):
        assert name in out


def test_the_version_is_printed(multiback):
    assert multiback("--version").out.startswith("multiback 0.")
