"""Runs programs in forks of a process that has imported torch: a line of JSON in, a line of JSON out.

`{"program": path, "record": path or null, "output": path, "sample_locals": bool}`: the program is run as `__main__`,
recorded where a record is wanted, its standard output written to `output`. The answer is its exit code.
"""

import contextlib
import json
import os
import runpy
import sys

import torch

from multiback import traces
from multiback.tracing import recorder


def run(program, record, output, sample_locals):
    """The exit code of the program, run in this process."""
    sys.argv, sys.path[0] = [program], os.path.dirname(program)
    recording = recorder.start(sample_locals=sample_locals) if record else None
    code = 0
    with open(output, "w") as stream, contextlib.redirect_stdout(stream):
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            code = 1
    if recording is not None:
        found = recording.finish(f"exit {code}")
        with open(record, "wb") as stream:
            stream.write(traces.encode(found))
    return code


# what every program would import at its first step, once; no backward is run, whose engine does not outlive a fork
torch.set_num_threads(1)
_weight = torch.nn.Parameter(torch.ones(2))
_weight.grad = torch.ones(2)
torch.optim.SGD([_weight], 0.1).step()

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        os.close(0)
        status = 1
        try:
            status = run(**asked)
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
    sys.stdout.flush()
