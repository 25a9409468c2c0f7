"""The process that forks stays as it was after importing torch."""

import subprocess
import sys

_LOADED = "import sys; print(*[name for name in sys.modules if name.startswith('multiback.')])"


def loaded(code):
    done = subprocess.run([sys.executable, "-c", f"{code}; {_LOADED}"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_process_that_forks_imports_nothing_that_computes_at_import():
    found = loaded("import multiback.benching.worker")
    assert "multiback.benching.worker" in found
    assert not [name for name in found if name.startswith(("multiback.api", "multiback.methods", "multiback.rules"))]


def test_the_check_sees_the_engine_where_it_is_imported():
    assert "multiback.api.gradients" in loaded("import multiback.benching.ways")
