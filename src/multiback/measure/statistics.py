"""Pure statistics of interleaved runs: ratios, intervals, outcomes; no torch, no records, no clock.

The design that these functions assume: several processes, in each of them rounds in which every
way runs once in shuffled order. Calls of one process are correlated, so a process yields one
number per pair of ways, and only processes count as independent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from multiback.records import Outcome

POWER = 0.8
FULL_CONFIDENCE = 0.95
# A run that stops because its own interval looks narrow stops too often on lucky spreads: plain
# 95 % intervals then exclude a true ratio of 1 in up to 7.4 % of runs (simulated, see the tests).
# At 97 % the rate is 3-6 % over all spreads.
EARLY_STOP_CONFIDENCE = 0.97
MIN_PROCESSES = 5
MAX_USEFUL_PROCESSES = 200

_FEWEST_FOR_INTERVAL = 2
_FEWEST_FOR_WILCOXON = 6  # below, no two-sided p under 0.05 exists
_SHARE_ON_PROCESSOR = 0.8


@dataclass(frozen=True)
class Comparison:
    """Baseline over candidate: the geometric mean ratio over processes and what is known of it.

    `log_ratio`, `half_width` and `equivalence_half_width` (that of the two one-sided tests) are
    natural logarithms; `smallest_effect` is the relative difference that this design would have
    found in 80 % of runs.
    """

    log_ratio: float
    half_width: float
    equivalence_half_width: float
    p_value: float
    processes: int
    smallest_effect: float

    @property
    def ratio(self) -> float:
        """Baseline over candidate, above 1 where the candidate needs less."""
        return math.exp(self.log_ratio)

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval of the ratio."""
        return math.exp(self.log_ratio - self.half_width), math.exp(self.log_ratio + self.half_width)


def process_effects(
    baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]]
) -> npt.NDArray[np.float64]:
    """One number per process: the median over its rounds of log(baseline / candidate)."""
    return np.array(
        [float(np.median(np.log(first) - np.log(second))) for first, second in zip(baseline, candidate, strict=True)]
    )


def compare(effects: Sequence[float] | npt.NDArray[np.float64], *, confidence: float = FULL_CONFIDENCE) -> Comparison:
    """A t-interval across processes of their log ratios.

    With one process nothing is known of the spread, and the interval is unbounded.
    """
    from scipy.special import stdtr, stdtrit

    values = np.asarray(effects, dtype=np.float64)
    count = len(values)
    mean = float(values.mean())
    if count < _FEWEST_FOR_INTERVAL:
        return Comparison(mean, math.inf, math.inf, 1.0, count, math.inf)
    freedom = count - 1
    error = float(values.std(ddof=1)) / math.sqrt(count)
    quantile = float(stdtrit(freedom, 0.5 + confidence / 2))
    # without spread the mean is known: 1 exactly, or certainly not
    p_value = 2 * float(stdtr(freedom, -abs(mean) / error)) if error > 0.0 else float(mean == 0.0)
    return Comparison(
        log_ratio=mean,
        half_width=quantile * error,
        # two one-sided tests at alpha are an interval of confidence 1 - 2 alpha (Schuirmann 1987)
        equivalence_half_width=float(stdtrit(freedom, confidence)) * error,
        p_value=p_value,
        processes=count,
        smallest_effect=math.expm1((quantile + float(stdtrit(freedom, POWER))) * error),
    )


def wilcoxon_p(effects: Sequence[float] | npt.NDArray[np.float64]) -> float | None:
    """Wilcoxon's signed-rank p value, a check on the t-interval; None where it could not reject."""
    values = np.asarray(effects, dtype=np.float64)
    if len(values) < _FEWEST_FOR_WILCOXON or not values.any():
        return None
    from scipy.stats import wilcoxon

    return float(wilcoxon(values).pvalue)


def adjust(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg adjusted p values of the pairs of one question."""
    if not p_values:
        return []
    from scipy.stats import false_discovery_control

    return [float(value) for value in false_discovery_control(list(p_values))]


def classify(
    comparison: Comparison, p_adjusted: float, *, margin: float, confidence: float = FULL_CONFIDENCE
) -> Outcome:
    """The outcome of one pair; `margin` is relative (0.05 for 5 %).

    `less` or `more`: significant, and the whole interval lies beyond the margin. `small`:
    significant, but the interval reaches into the margin. `same`: both one-sided tests place the
    ratio inside the margin; never merely "not significant". Else `cannot-tell`.
    """
    edge = math.log1p(margin)
    mean, half = comparison.log_ratio, comparison.half_width
    if p_adjusted <= 1 - confidence and abs(mean) > half:
        if abs(mean) - half <= edge:
            return "small"
        return "less" if mean > 0 else "more"
    if abs(mean) + comparison.equivalence_half_width <= edge:
        return "same"
    return "cannot-tell"


def processes_to_tell(comparison: Comparison, *, margin: float) -> int | None:
    """About how many processes would settle a `cannot-tell`; None where over 200 would not.

    Settled means that the interval excludes 1, or that it fits inside the margin, whichever
    needs fewer, if mean and spread stay what they are.
    """
    if comparison.processes < _FEWEST_FOR_INTERVAL:
        return MIN_PROCESSES
    from scipy.special import stdtrit

    mean = abs(comparison.log_ratio)
    wanted = max(mean, math.log1p(margin) - mean)
    quantile = float(stdtrit(comparison.processes - 1, 0.5 + FULL_CONFIDENCE / 2))
    spread = comparison.half_width / quantile * math.sqrt(comparison.processes)
    for count in range(comparison.processes + 1, MAX_USEFUL_PROCESSES + 1):
        if float(stdtrit(count - 1, 0.5 + FULL_CONFIDENCE / 2)) * spread / math.sqrt(count) <= wanted:
            return count
    return None


def contaminated(
    seconds: Sequence[float], cpu_seconds: Sequence[float], switches: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Which calls of one way were disturbed from outside.

    A call is marked where CPU time fell to less than 80 % of the way's usual share of wall time
    (the processor was taken away), or where it was switched out far more often than usual.
    """
    wall = np.maximum(np.asarray(seconds, dtype=np.float64), 1e-9)
    share = np.asarray(cpu_seconds, dtype=np.float64) / wall
    count = np.asarray(switches, dtype=np.float64)
    usual = float(np.median(count))
    deviation = float(np.median(np.abs(count - usual)))
    return (share < _SHARE_ON_PROCESSOR * float(np.median(share))) | (count > usual + 5 * deviation + 2)


def slope_effects(steps: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """One number per process: log(time at the first step / time at the last), from a straight line.

    The line is a least-squares fit of log seconds on the step number, so that all steps count
    and not only the two ends.
    """
    effects = []
    for numbers, times in zip(steps, seconds, strict=True):
        x = np.asarray(numbers, dtype=np.float64)
        slope = float(np.polyfit(x, np.log(np.asarray(times)), 1)[0])
        effects.append(-slope * float(x.max() - x.min()))
    return np.array(effects)


def levelled(previous: Sequence[float], current: Sequence[float], tolerance: float = 0.1) -> bool:
    """Whether two successive warm-up rounds agree: the median relative change is within tolerance."""
    before = np.maximum(np.asarray(previous, dtype=np.float64), 1e-12)
    after = np.maximum(np.asarray(current, dtype=np.float64), 1e-12)
    return bool(np.median(np.abs(np.log(after / before))) <= math.log1p(tolerance))
