"""The benchmark scripts run; what they measure is not asserted here."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(
    path for path in (Path(__file__).resolve().parents[2] / "benchmarks").glob("*.py") if path.name != "harness.py"
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_script_prints_its_table(script):
    done = subprocess.run(
        [sys.executable, str(script), "--smoke"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) > 3
    assert all(row.split("|")[-2].strip() in ("met", "missed", "cannot tell") for row in rows[2:])
