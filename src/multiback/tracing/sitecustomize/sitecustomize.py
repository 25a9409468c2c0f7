"""Runs at the start of every Python process of a traced program, before its first line.

The folder of this file goes first on PYTHONPATH. It leaves `sys.path` as it would be without it, runs the
`sitecustomize` that would have run in its place, and then has the import of torch watched. It imports
nothing by way of `sys.path`, where the program may have modules named as those of the standard library.
"""

import os
import sys

_NAME = "multiback.tracing.entering"


def _chain() -> None:
    """Run the next `sitecustomize` on `sys.path`; what it raises is reported as always."""
    folder = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")  # the next one, now that this one has left sys.path
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if mine is not None:
            sys.modules.setdefault("sitecustomize", mine)


def _begin() -> None:
    """Load `entering` by its path, without the package around it, and begin."""
    try:
        path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "entering.py")
        module = sys.modules[_NAME] = type(sys)(_NAME)
        module.__file__ = path
        type(__loader__)(_NAME, path).exec_module(module)
        module.begin_in_child()
    except Exception as error:
        sys.stderr.write(f"multiback: this process is not recorded ({type(error).__name__}: {error}).\n")


try:
    _chain()
finally:
    _begin()
