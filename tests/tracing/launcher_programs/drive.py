"""Runs the launcher with arguments given as JSON, and writes the record that it shows to a file."""

import json
import sys
from pathlib import Path

from multiback import traces
from multiback.records import write_atomically
from multiback.tracing import launcher

given = json.loads(sys.argv[1])
output, shown = given.pop("output"), Path(given.pop("shown"))
arguments = launcher.TraceArguments(output=output and Path(output), **given)
sys.exit(launcher.run(arguments, lambda record: write_atomically(shown, traces.encode(record))))
