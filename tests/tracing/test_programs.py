"""Programs at fault get the right findings at the right lines; their mended twins, and faultless ones, none."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from multiback import traces

PROGRAMS = Path(__file__).with_name("programs")
FAULTY, MENDED, FAULTLESS = (sorted((PROGRAMS / kind).glob("*.py")) for kind in ("faulty", "mended", "faultless"))
RANKS = ("ddp_twice", "ddp_once")
OF_THEIR_OWN = {"spawned_ranks", "loader_workers", "compiled_model", "two_threads"}
QUESTIONS = {"polluted-step", "uneven-mean"}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass
class Run:
    """What one run of a program printed, its exit code, and its record."""

    stdout: str
    returncode: int
    record: traces.TraceRecord | None


@pytest.fixture(scope="module")
def driver():
    """A process that runs programs in forks of itself."""
    command = [sys.executable, str(Path(__file__).with_name("driver.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(driver, tmp_path):
    """Runs a program, traced or not: most in a fork, those with processes or threads of their own by the command."""

    def call(path, *, traced, sample_locals=False):
        record, output = tmp_path / "record.json", tmp_path / "output"
        if path.stem in OF_THEIR_OWN:
            main = ["-c", "from multiback.cli import main; main()", "trace", "--output", str(record), "--force"]
            options = ["--sample-locals"] * sample_locals
            command = [sys.executable, *([*main, *options] if traced else []), str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=200)
            return Run(done.stdout, done.returncode, traces.load(record) if traced else None)
        asked = {"program": str(path), "record": str(record) if traced else None, "output": str(output)}
        asked["sample_locals"] = sample_locals
        driver.stdin.write(json.dumps(asked) + "\n")
        driver.stdin.flush()
        code = int(driver.stdout.readline())
        return Run(output.read_text(), code, traces.load(record) if traced else None)

    return call


def marks(path):
    """The codes and lines that a program's `# HERE` comments name."""
    found = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        said = re.search(r"# HERE (.*)", line)
        found |= {(code, number) for code in (said[1].split() if said else [])}
    return found


def told(record, *levels):
    return {(one.code, one.place.line) for one in record.findings if one.level in levels}


@pytest.mark.parametrize("path", [path for path in FAULTY if path.stem not in RANKS], ids=lambda path: path.stem)
def test_a_fault_is_found_at_its_line_and_the_program_runs_as_ever(path, run):
    done = run(path, traced=True)
    wanted = marks(path)
    assert wanted
    assert wanted <= told(done.record, "finding", "likely")
    assert {code for code, _ in told(done.record, "likely")} <= QUESTIONS
    assert done.record.faults == []
    untraced = run(path, traced=False)
    assert (done.stdout, done.returncode) == (untraced.stdout, untraced.returncode) == (untraced.stdout, 0)
    assert untraced.stdout.strip()


@pytest.mark.parametrize(
    "path",
    [path for path in (*MENDED, *FAULTLESS) if path.stem not in RANKS],
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_a_faultless_program_has_no_finding_and_the_same_bits(path, run):
    untraced = run(path, traced=False)
    assert (untraced.returncode, bool(untraced.stdout.strip())) == (0, True)
    for sample_locals in (False, True):
        done = run(path, traced=True, sample_locals=sample_locals)
        assert told(done.record, "finding") == set()
        assert done.record.faults == []
        assert (done.stdout, done.returncode) == (untraced.stdout, 0)


def test_the_published_loop_over_slices_has_its_saving(run):
    path = PROGRAMS / "published" / "slices.py"
    record = run(path, traced=True).record
    assert told(record, "finding") == marks(path)
    (repeated,) = (one for one in record.findings if one.code == "repeated-traversal")
    assert 0 < repeated.seconds < sum(site.seconds for site in record.sites)


def test_the_published_timing_loop_adds_up_gradients_and_its_first_call_is_told_apart(run):
    path = PROGRAMS / "published" / "two_losses.py"
    record = run(path, traced=True).record
    adding = {number for number, line in enumerate(path.read_text().splitlines(), 1) if "# ADDS" in line}
    assert {(site.place.line, site.calls, site.accumulating_calls) for site in record.sites} == {
        (line, 30, 29) for line in adding
    }
    assert ("cold-start", min(adding)) in told(record, "note")


@pytest.mark.parametrize(
    ("name", "codes"), [("faulty/ddp_twice.py", {"unreduced-ranks"}), ("mended/ddp_once.py", set())]
)
def test_ranks_under_torchrun(name, codes, tmp_path):
    record = tmp_path / "record.json"
    main = "from multiback.cli import main; main()"
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAMS / name)]
    command = [sys.executable, "-c", main, "trace", "--output", str(record), *run]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=250)
    found = traces.load(record)
    assert done.returncode == 0, done.stderr
    assert found.processes >= 2
    assert {code for code, _ in told(found, "finding")} == codes
    if codes:
        (finding,) = (one for one in found.findings if one.code == "unreduced-ranks")
        assert re.search(r"They differed by [\d.]+% here", finding.said)


def test_every_code_that_can_be_found_has_a_program():
    seen = {code for path in FAULTY for code, _ in marks(path)}
    codes = set(traces.Code.__args__) - {"cold-start", "page-fault-bound"}
    assert seen == codes


def test_every_code_has_a_section_in_the_guide():
    guide = (Path(__file__).parents[2] / "docs" / "findings.md").read_text()
    assert set(re.findall(r"^## `([a-z-]+)`", guide, re.MULTILINE)) == set(traces.Code.__args__)


def test_a_record_is_json_of_its_schema(run):
    record = run(PROGRAMS / "faulty" / "retained_once.py", traced=True).record
    head = json.loads(traces.encode(record))
    assert head["schema"] == "multiback.trace/1"
    assert traces.decode(traces.encode(record), "here") == record
