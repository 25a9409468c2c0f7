"""What starting costs, in fresh processes: importing multiback after torch, and `multiback --help`."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from harness import Table, options
from multiback.measure import statistics

PROCESSES = 20

TIMED_IMPORT = """
import time, torch
start = time.perf_counter()
{code}
print(time.perf_counter() - start)
"""
IMPORTS = {
    "import multiback, after torch": "import multiback",
    "import multiback and its backward, after torch": "from multiback import backward",
}


def imported(code: str) -> float:
    """Seconds that an import takes in a process that has imported torch."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED_IMPORT.format(code=code)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def helped() -> float:
    """Seconds from starting `multiback --help` to its end."""
    command = str(Path(sys.executable).with_name("multiback"))
    start = time.perf_counter()
    subprocess.run([command, "--help"], capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> int:
    """Measure both and print a Markdown table; 1 where a target is surely missed."""
    design = options(__doc__ or "", processes=PROCESSES, rounds=None)
    table = Table("milliseconds")
    works: dict[str, tuple[Callable[[], float], float]] = {
        name: (lambda code=code: imported(code), 50.0) for name, code in IMPORTS.items()
    }
    works["multiback --help"] = (helped, 300.0)
    for name, (measure, target) in works.items():
        if design.only in name:
            measure()  # fills the caches of files and of bytecode
            found = statistics.compare(np.log([measure() * 1e3 for _ in range(design.processes)]))
            table.add(name, found.ratio, found.interval, target, most=True)
    return table.status(smoke=design.smoke)


if __name__ == "__main__":
    sys.exit(main())
