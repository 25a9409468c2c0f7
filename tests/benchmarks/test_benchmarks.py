"""The benchmark scripts run; what they measure is not asserted here."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if 'if __name__ == "__main__":' in path.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_script_prints_its_table(script):
    done = subprocess.run(
        [sys.executable, str(script), "--smoke"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) > 3
    assert all(row.split("|")[-2].strip() in ("met", "missed", "cannot tell") for row in rows[2:])


def test_make_runs_every_script():
    makefile = (FOLDER.parent / "Makefile").read_text()
    (line,) = (line for line in makefile.splitlines() if line.startswith("BENCHMARKS := "))
    assert sorted(line.split()[2:]) == [path.stem for path in SCRIPTS]
