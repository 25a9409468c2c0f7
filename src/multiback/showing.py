"""A record of either kind, read for `multiback show`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from multiback import records, traces
from multiback.errors import RecordError
from multiback.measure.verdicts import judge_again
from multiback.report import document, trace
from multiback.report.blocks import Document


@dataclass(frozen=True)
class Shown:
    """What `show` prints: the report, or the record itself."""

    document: Document
    json: str


def read(path: Path) -> Shown:
    """Read a record of a bench or of a trace; RecordError where it is neither."""
    data = records.read(path)
    try:
        head: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(
            f"{path}: a record must be JSON; {error}. Give a file that bench --json or trace --output wrote."
        ) from error
    if isinstance(head, dict) and str(head.get("schema", "")).startswith("multiback.trace/"):
        found = traces.decode(data, str(path))
        return Shown(trace.build(found), traces.encode(found).decode())
    judged = judge_again(records.decode(data, str(path)))
    return Shown(document.build(judged), records.encode(judged).decode())
