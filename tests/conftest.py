"""Shared fixtures: records made of invented samples, and a way to call the command line."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import settings

from multiback.measure.verdicts import Evidence, Pair, Side, judge
from multiback.records import (
    BENCH_SCHEMA,
    BenchRecord,
    Environment,
    Growth,
    GrowthStep,
    ProblemFacts,
    Run,
    Samples,
    Settings,
    WayFacts,
)

settings.register_profile("multiback", deadline=None)
settings.register_profile("nightly", deadline=None, max_examples=1000)  # by option or HYPOTHESIS_PROFILE
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "multiback"))

SPREAD = (0.00, 0.01, -0.01, 0.005, -0.005)


def add_samples(samples, question, way, seconds, *, grads="none", call_index=1, phase="warm", processes=5, rounds=3):
    """Rows whose process means scatter a little around `seconds`, the same scatter at every call."""
    for process in range(processes):
        for number in range(rounds):
            wobble = SPREAD[(process * 2 + number + len(way)) % len(SPREAD)]
            samples.append(
                question=question,
                way=way,
                phase=phase,
                grads=grads,
                call_index=call_index,
                process=process,
                round=number,
                order=0,
                seconds=seconds * (1 + wobble),
                cpu_seconds=seconds * (1 + wobble) * 2,
                minor_faults=100,
                involuntary_switches=0,
                rss_bytes=1 << 20,
            )


def way_facts(question, way, **changes):
    facts = {
        "question": question,
        "way": way,
        "grads": "none",
        "comparable": True,
        "difference_from_reference": 0.0,
        "peak_bytes": 1000,
        "saved_bytes": 100,
        "held_bytes": 10,
        "flops": 1_000_000,
        "nodes": 7,
        "collected": 0,
    }
    return WayFacts(**{**facts, **changes})


def build_record(samples, ways, pairs, *, control=None, growth=None, **settings_changes):
    """A whole record around invented samples, judged as a run would judge it."""
    asked = list(dict.fromkeys([pair.question for pair in pairs]))
    chosen = Settings(
        **{
            "mode": "quick",
            "questions": asked,
            "ways": None,
            "grads": None,
            "processes": 5,
            "rounds": dict.fromkeys(asked, 3),
            "cold_processes": 3,
            "budget": 35.0,
            "margin": 0.05,
            "threads": 2,
            "seed": 0,
            "precision": 0.03,
            "stopped_by": "plan",
            **settings_changes,
        }
    )
    confidence = 0.97 if chosen.stopped_by == "precision" else 0.95
    verdicts, judged = judge(Evidence(samples, ways, growth, chosen.margin, confidence), pairs, control)
    return BenchRecord(
        schema=BENCH_SCHEMA,
        environment=Environment(
            versions={"multiback": "0", "torch": "2", "python": "3"},
            platform="test",
            cpu="test processor",
            cores=2,
            threads=2,
            device="cpu",
            allocator="glibc",
            allocator_settings={"MALLOC_ARENA_MAX": "1"},
            transparent_huge_pages="never",
            load_before=[0.1, 0.2, 0.3],
            load_after=[],
        ),
        run=Run(
            argv=["multiback"],
            started="2026-01-01T00:00:00+00:00",
            seconds=12.0,
            partial=chosen.stopped_by == "interrupt",
            settings=chosen,
        ),
        problem=ProblemFacts(
            target="mlp",
            shapes={"data": [4, 3]},
            dtypes={"data": "float32"},
            losses="the preset's own",
            num_losses=2,
            num_parameters=12,
            num_rows=4,
            seed=0,
        ),
        ways=ways,
        samples=samples,
        verdicts=verdicts,
        control=judged,
        growth=growth,
    )


@pytest.fixture
def make_combine():
    """Builds combine records with changes."""
    return make_combine_record


@pytest.fixture
def combine_record():
    """func1, func2 and one-forward summed at 3, 4 and 1 s, a way with other gradients, and a control."""
    return make_combine_record()


def make_combine_record(control_seconds=1.0, **changes):
    samples = Samples()
    for way, seconds in (("func1", 3.0), ("func2", 4.0), ("one-forward summed", 1.0), ("func3", 2.0)):
        add_samples(samples, "combine", way, seconds)
    add_samples(samples, "combine", "one-forward summed (again)", control_seconds)
    ways = [
        way_facts("combine", "func1", peak_bytes=3000, flops=2_000_000),
        way_facts("combine", "func2", peak_bytes=5000, flops=2_000_000),
        way_facts("combine", "func3", comparable=False, difference_from_reference=0.32),
        way_facts("combine", "one-forward summed", note="checkpointed values are not counted"),
    ]
    pairs = [
        Pair("combine", Side("func1"), Side(way), "none", metric)
        for metric in ("seconds", "peak_bytes")
        for way in ("func2", "func3", "one-forward summed")
    ]
    control = Pair("combine", Side("one-forward summed"), Side("one-forward summed (again)"), "none")
    return build_record(samples, ways, pairs, control=control, **changes)


def make_full_record(**changes):
    """A record with every question in it."""
    samples = Samples()
    ways, pairs = [], []
    for grads, later in (("none", 1.0), ("accumulate", 1.5)):
        for index in (1, 2, 3, 4):
            seconds = 1.0 if index == 1 else later
            add_samples(samples, "successive", "backward", seconds, grads=grads, call_index=index)
            if index > 1:
                pairs.append(Pair("successive", Side("backward", 1), Side("backward", index), grads))
        ways.append(way_facts("successive", "backward", grads=grads))
    for way, warm, cold in (("forward", 1.0, 1.5), ("backward", 2.0, 4.0)):
        add_samples(samples, "cold", way, cold, phase="cold", rounds=1)
        add_samples(samples, "cold", way, warm, phase="warm")
        pairs.append(Pair("cold", Side(way, phase="warm"), Side(way, phase="cold"), "none"))
    add_samples(samples, "cold", "thread start", 0.001, phase="cold", rounds=1)
    add_samples(samples, "cold", "thread start", 0.0001, phase="warm", rounds=1)
    for keep, held in ((False, 10), (True, 60)):
        add_samples(samples, "retain", f"retain_graph={keep}", 1.0)
        ways.append(way_facts("retain", f"retain_graph={keep}", held_bytes=held, peak_bytes=1000 + held))
    for metric in ("seconds", "peak_bytes", "held_bytes"):
        pairs.append(Pair("retain", Side("retain_graph=False"), Side("retain_graph=True"), "none", metric))
    for way, seconds in (("retained loop", 100.0), ("loss summed in the loop", 1.2), ("reduction=sum", 1.0)):
        add_samples(samples, "slices", way, seconds)
        ways.append(way_facts("slices", way))
    ways.append(way_facts("slices", "reduction=mean", comparable=False, difference_from_reference=0.75, factor=0.25))
    add_samples(samples, "slices", "reduction=mean", 1.0)
    pairs += [
        Pair("slices", Side(first), Side(second), "none")
        for first, second in (
            ("reduction=sum", "loss summed in the loop"),
            ("reduction=sum", "reduction=mean"),
            ("retained loop", "reduction=sum"),
        )
    ]
    growth = make_growth(samples, ways, pairs)
    return build_record(samples, ways, pairs, growth=growth, **changes)


def make_growth(samples, ways, pairs, carried=("hidden",)):
    steps = []
    for way, more in (("one graph, retained", 0), ("a forward per step", 9), ("carried tensors detached", 0)):
        for step in (1, 2, 3):
            add_samples(samples, "growth", way, 1.0 + more * step / 9, call_index=step)
            steps.append(GrowthStep(way=way, step=step, nodes=10 + more * step, saved_bytes=100 + more * step))
        ways.append(WayFacts(question="growth", way=way, grads="none", comparable=True))
        for metric in ("seconds", "nodes", "saved_bytes"):
            pairs.append(Pair("growth", Side(way, 1), Side(way, 3), "none", metric))
    return Growth(steps=steps, carried=list(carried))


@dataclass
class Finished:
    code: int
    out: str
    err: str


@pytest.fixture
def multiback(tmp_path):
    """Calls the command line in a process of its own, in an empty folder, on one thread."""

    def call(*arguments, cwd=tmp_path, timeout=300, **environment):
        done = subprocess.run(
            [sys.executable, "-c", "from multiback.cli import main; main()", *arguments],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def make_full():
    """Builds full records with changes."""
    return make_full_record


@pytest.fixture
def full_record():
    """A record with every question in it."""
    return make_full_record()
