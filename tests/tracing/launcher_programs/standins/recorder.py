"""A recorder of the stand-in of torch: it counts calls."""

import os
import sys

import torch

from multiback.traces import TRACE_SCHEMA, Place, Site, TraceRecord


class Recording:
    def __init__(self, max_steps, keep):
        self.max_steps, self.calls, self.record = max_steps, 0, None
        self.keep = keep if os.environ.get("STAND_IN_KEEPS") else None
        torch.watchers.append(self.watch)

    def watch(self):
        self.calls += 1
        if self.keep is not None:
            self.keep(self.made("still running"))

    def finish(self, ended):
        if self.record is None:
            torch.watchers.remove(self.watch)
            self.record = self.made(ended)
        return self.record

    def made(self, ended):
        site = Site(place=Place("stand-in", 1), kind="backward")
        for _ in range(self.calls):
            site.add(1e-3, 0, 1)
        return TraceRecord(
            schema=TRACE_SCHEMA,
            program=list(sys.argv),
            started="",
            seconds=0.0,
            ended=ended,
            versions={"max_steps": str(self.max_steps), "process": str(os.getpid())},
            steps=0,
            processes=1,
            sites=[site] if self.calls else [],
            evidence=[],
            findings=[],
            unobserved=[],
            faults=[],
        )


def start(*, max_steps=None, keep=None, sample_locals=False):
    if os.environ.get("STAND_IN_BREAKS"):
        raise RuntimeError("the stand-in breaks")
    return Recording(max_steps, keep)
