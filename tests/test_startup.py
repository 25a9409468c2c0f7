"""What starts at once imports no torch, and a program that does is told apart."""

import subprocess
import sys

import pytest

from multiback import records

LEAN = [
    "import multiback.cli",
    "import multiback.records, multiback.errors",
    "import multiback.report.console, multiback.report.markdown, multiback.report.progress",
    "import multiback.measure.statistics, multiback.measure.verdicts, multiback.measure.environment",
    "import multiback.benching.command, multiback.benching.runner, multiback.benching.rules",
    "import multiback",
    "import multiback; multiback.__version__; multiback.InputError",
]


def imported(code):
    """The names of heavy packages that `code` imports."""
    check = "; import sys; print(' '.join(n for n in ('torch', 'scipy.stats') if n in sys.modules))"
    return subprocess.run(
        [sys.executable, "-c", code + check], capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.parametrize("code", LEAN)
def test_lean_modules_import_neither_torch_nor_scipy_stats(code):
    assert imported(code) == []


def test_the_check_sees_torch_where_it_is_imported():
    assert "torch" in imported("import multiback; multiback.Problem")


@pytest.fixture
def run_main(tmp_path, full_record):
    path = tmp_path / "run.json"
    records.write_atomically(path, records.encode(full_record))

    def run(*arguments):
        code = (
            "import sys; sys.argv[1:] = sys.argv[1:]\n"
            "from multiback.cli import main\n"
            "try:\n    main()\n"
            "finally:\n    print('torch' in sys.modules, file=sys.stderr)\n"
        )
        arguments = [str(path) if argument == "RECORD" else argument for argument in arguments]
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["bench", "--help"],
        ["--version"],
        ["bench", "--list"],
        ["show", "RECORD"],
        ["show", "RECORD", "--markdown"],
    ],
)
def test_help_lists_and_show_run_without_torch(run_main, arguments):
    done = run_main(*arguments)
    assert done.stdout
    assert done.stderr.strip() == "False"


def test_every_public_name_exists():
    import multiback

    classes = {"Check", "Cut", "DeferredCut", "Plan", "Problem", "Result", "RowGradient", "SpanningCut", "Trace"}
    errors = {
        *("FreedGraphError", "InputError", "MultibackError", "RecomputationError", "RequestError"),
        *("ExplainedError", "StaleForwardError", "WorkerError", "CoupledRowsWarning", "ForgottenBackwardWarning"),
    }
    functions = {
        "backward",
        "bench",
        "cut",
        "explained",
        "trace",
        "each",
        "grad",
        "gram",
        "jac",
        "norms",
        "plan",
        "rows",
        "tune",
        "verify",
    }
    assert set(multiback.__all__) == {"__version__"} | classes | errors | functions
    assert all(getattr(multiback, name) is not None for name in multiback.__all__)


def test_importing_the_engine_starts_no_threads():
    code = (
        "import os, torch\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "import multiback as mb\n"
        "mb.backward, mb.jac, mb.rows, mb.gram, mb.verify\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
