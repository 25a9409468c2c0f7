"""The options of a run, checked once and filled in with defaults; no torch."""

import os
from dataclasses import dataclass
from typing import Literal

from multiback.benching.names import DEFAULT_QUESTIONS, KINDS, QUESTIONS, USER_TARGET_QUESTIONS, WAYS, check_names
from multiback.benching.protocol import Source
from multiback.errors import OptionError
from multiback.measure.environment import available_cores
from multiback.records import Grads

Mode = Literal["quick", "default", "rigorous"]
_LARGEST = 2**31 - 1
POLICIES: tuple[Grads, ...] = ("none", "accumulate", "prealloc")


@dataclass(frozen=True)
class ModeDefaults:
    """What a mode means: seconds, processes, rounds, cold starts and warm-up rounds (fewest, most)."""

    budget: float | None
    max_processes: int
    max_rounds: int
    cold_processes: int
    warmup: tuple[int, int]


MODES: dict[Mode, ModeDefaults] = {
    "quick": ModeDefaults(35.0, 10, 30, 3, (1, 1)),
    "default": ModeDefaults(110.0, 10, 30, 8, (2, 5)),
    "rigorous": ModeDefaults(None, 20, 30, 20, (2, 5)),
}


@dataclass(frozen=True)
class Options:
    """A run as it will be done. Build it with `make`, which checks every value."""

    source: Source
    questions: list[str]
    ways: list[str] | None
    grads: Grads | None
    threads: int
    processes: int | None
    rounds: int | None
    budget: float | None
    margin: float
    mode: Mode
    argv: list[str]

    @property
    def defaults(self) -> ModeDefaults:
        """The defaults of the run's mode."""
        return MODES[self.mode]


def make(
    source: Source,
    *,
    questions: list[str] | None = None,
    kind: str | None = None,
    ways: list[str] | None = None,
    grads: str | None = None,
    threads: int | None = None,
    processes: int | None = None,
    rounds: int | None = None,
    budget: float | None = None,
    margin_percent: float = 5.0,
    mode: Mode = "default",
    argv: list[str] | None = None,
) -> Options:
    """Check everything that can be checked without loading the target; OptionError names the first breach."""
    asked = _asked(source.target, questions, kind)
    check_names("--way", ways, list(dict.fromkeys(name for question in asked for name in WAYS[question])))
    if ways:
        asked = [question for question in asked if any(name in WAYS[question] for name in ways)]
    _positive("--batch", source.batch)
    _positive("--num-losses", source.num_losses)
    _positive("--processes", processes)
    _positive("--rounds", rounds)
    _check_numbers(budget, margin_percent, source.seed)
    return Options(
        source=source,
        questions=asked,
        ways=ways or None,
        grads=_policy(grads),
        threads=_threads(threads),
        processes=processes,
        rounds=rounds,
        budget=MODES[mode].budget if budget is None else budget,
        margin=margin_percent / 100,
        mode=mode,
        argv=argv or [],
    )


def parse_shape(text: str | None) -> list[int] | None:
    """The shape written as `1x40`."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= _LARGEST for part in parts):
        raise OptionError(f"--input: must be a shape such as 1x40 or 8x3x32x32, sizes of 1 or more; got {text!r}.")
    return [int(part) for part in parts]


def _asked(target: str, questions: list[str] | None, kind: str | None) -> list[str]:
    """The questions of a run; a kind is one of its own, asked alone unless others are named too."""
    kinds = [] if kind is None else [kind]
    check_names("--question", questions, list(QUESTIONS))
    check_names("--kind", kinds, list(KINDS))
    usual = () if kinds else DEFAULT_QUESTIONS.get(target, USER_TARGET_QUESTIONS)
    return list(dict.fromkeys([*(questions or usual), *kinds]))


def _check_numbers(budget: float | None, margin_percent: float, seed: int) -> None:
    if budget is not None and not 0 < budget < float("inf"):
        raise OptionError(f"--budget: must be a positive number of seconds; got {budget:g}. Try --budget 110.")
    if not 0 < margin_percent < 100:
        raise OptionError(f"--margin: must be a percentage between 0 and 100; got {margin_percent:g}. Try --margin 5.")
    if not 0 <= seed < 2**63:
        raise OptionError(f"--seed: must be a whole number from 0 to 2^63 - 1; got {seed}. Try --seed 0.")


def _policy(grads: str | None) -> Grads | None:
    for policy in POLICIES:
        if policy == grads:
            return policy
    if grads is not None:
        raise OptionError(f"--grads: must be one of {', '.join(POLICIES)}; got {grads!r}. Choose one of these.")
    return None


def _threads(threads: int | None) -> int:
    cores = available_cores()
    if threads is None:
        wanted = os.environ.get("OMP_NUM_THREADS", "")
        return min(int(wanted), cores) if wanted.isdigit() and int(wanted) > 0 else cores
    if not 1 <= threads <= cores:
        raise OptionError(
            f"--threads: must be from 1 to the {cores} cores that this process may use, since more threads "
            f"than cores make times meaningless; got {threads}. Use --threads {cores}."
        )
    return threads


def _positive(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise OptionError(f"{option}: must be 1 or more; got {value}. Leave it out for the default.")
    if value is not None and value > _LARGEST:
        raise OptionError(f"{option}: must be at most {_LARGEST}; got {value}. Leave it out for the default.")
