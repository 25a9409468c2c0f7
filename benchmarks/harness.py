"""Interleaved comparisons for the scripts beside it: processes of shuffled rounds, ratios with intervals.

The design is that of `multiback bench` (docs/measuring.md): processes are forked from one that has
imported torch and run nothing; every round runs every way once in shuffled order; a process gives one
number per pair, the median log-ratio of its rounds; intervals are t-intervals across processes.
"""

import argparse
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from multiback.measure import clock, statistics
from multiback.measure.environment import describe

Calls = dict[str, Callable[[], Callable[[], object]]]


@dataclass(frozen=True)
class Claim:
    """`slow` must take at least `target` times the time of `fast`."""

    slow: str
    fast: str
    target: float


@dataclass(frozen=True)
class Experiment:
    """`build` makes, in a fresh process, a preparation for each way; preparing gives the call to time."""

    name: str
    build: Callable[[], Calls]
    claims: list[Claim]


def main(description: str, experiments: list[Experiment]) -> int:
    """Run all experiments and print a Markdown table; 1 where a target is surely missed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--smoke", action="store_true", help="two processes of two rounds: does it run at all?")
    given = parser.parse_args()
    processes, rounds = (2, 2) if given.smoke else (given.processes, given.rounds)
    environment = describe(threads=os.cpu_count() or 1, device="cpu")
    print(f"{description}\n\n{environment.cpu}, {environment.cores} cores, torch {torch.__version__},")
    print(f"{processes} processes of {rounds} rounds, load {environment.load_before[0]} before.\n")
    print("| work | ratio | target | 95% interval | verdict |\n| --- | --- | --- | --- | --- |")
    missed = False
    for experiment in experiments:
        times = [_in_child(experiment, rounds, seed) for seed in range(processes)]
        for claim in experiment.claims:
            effects = statistics.process_effects([t[claim.slow] for t in times], [t[claim.fast] for t in times])
            found = statistics.compare(effects)
            low, high = found.interval
            verdict = "met" if low >= claim.target else "missed" if high < claim.target else "cannot tell"
            missed |= verdict == "missed"
            work = f"{experiment.name}: {claim.slow} / {claim.fast}"
            print(f"| {work} | {found.ratio:.2f} | >= {claim.target} | {low:.2f}-{high:.2f} | {verdict} |", flush=True)
    return int(missed and not given.smoke)


def _in_child(experiment: Experiment, rounds: int, seed: int) -> dict[str, list[float]]:
    """Seconds by way and round, from a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as stream:
                pickle.dump(_measure(experiment, rounds, seed), stream)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"{experiment.name}: a measuring process failed.")
    return pickle.loads(data)


def _measure(experiment: Experiment, rounds: int, seed: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    shuffle = random.Random(seed)
    calls = experiment.build()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name in shuffle.sample(list(calls), len(calls)):
            call = calls[name]()
            with clock.without_gc():
                seconds = clock.time_call(call).seconds
            if number >= 2:  # the first rounds warm up
                times[name].append(seconds)
    return times
