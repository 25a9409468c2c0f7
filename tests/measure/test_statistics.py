"""Statistics keep their promised error rates and obey their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiback.measure import statistics
from multiback.measure.statistics import EARLY_STOP_CONFIDENCE, FULL_CONFIDENCE, classify, compare

RUNS, PROCESSES, ROUNDS = 2000, 10, 30
PRECISION = 0.03


def simulated_effects(*, effect, between=0.03, within=0.10, phi=0.9, runs=RUNS, seed=0):
    """Log ratios by run and process: AR(1) log-times in shuffled order, and an offset per process and way."""
    rng = np.random.default_rng(seed)
    calls = np.empty((runs, PROCESSES, 2 * ROUNDS))
    calls[..., 0] = rng.normal(size=(runs, PROCESSES)) * within
    noise = rng.normal(size=calls.shape) * within * math.sqrt(1 - phi**2)
    for index in range(1, 2 * ROUNDS):
        calls[..., index] = phi * calls[..., index - 1] + noise[..., index]
    pairs = calls.reshape(runs, PROCESSES, ROUNDS, 2)
    swapped = rng.integers(0, 2, size=pairs.shape[:3]).astype(bool)
    baseline = np.where(swapped, pairs[..., 1], pairs[..., 0])
    candidate = np.where(swapped, pairs[..., 0], pairs[..., 1])
    offsets = rng.normal(size=(runs, PROCESSES, 2, 1)) * between
    return np.median(baseline + offsets[:, :, 0] + effect - candidate - offsets[:, :, 1], axis=-1)


def outcome_of(effects, confidence=FULL_CONFIDENCE):
    comparison = compare(effects, confidence=confidence)
    return classify(comparison, comparison.p_value, margin=0.05, confidence=confidence)


def share_different(runs):
    return np.mean([outcome_of(effects) in ("less", "more", "small") for effects in runs])


def test_identical_ways_under_drift_are_called_different_in_at_most_6_percent_of_runs():
    # three seeds of 2,000 runs: of one alone, chance takes a rate of 5 % over 6 % once in fifty
    rates = [share_different(simulated_effects(effect=0.0, seed=seed)) for seed in range(3)]
    assert np.mean(rates) <= 0.06


def test_a_10_percent_effect_is_found_in_at_least_90_percent_of_default_runs():
    runs = simulated_effects(effect=math.log(1.1))
    assert share_different(runs) >= 0.90


def test_without_any_drift_between_processes_the_rate_stays_bounded_too():
    assert share_different(simulated_effects(effect=0.0, between=0.0)) <= 0.06


def test_blocks_instead_of_rounds_would_break_the_rate_so_the_simulation_can_fail():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(300, 2, 30)) * 0.1 * math.sqrt(1 - 0.9**2)
    blocks = np.zeros_like(noise)
    blocks[..., 0] = rng.normal(size=(300, 2)) * 0.1
    for index in range(1, 30):
        blocks[..., index] = 0.9 * blocks[..., index - 1] + noise[..., index]
    assert share_different(blocks[:, 0] - blocks[:, 1]) > 0.25


@pytest.mark.parametrize("between", [0.04, 0.03, 0.02, 0.01])
def test_stopping_on_precision_keeps_the_rate_because_its_intervals_are_wider(between):
    different = 0
    for effects in simulated_effects(effect=0.0, between=between, seed=3):
        for count in range(statistics.MIN_PROCESSES, PROCESSES + 1):
            early = compare(effects[:count], confidence=EARLY_STOP_CONFIDENCE)
            if early.half_width <= PRECISION:
                break
        confidence = EARLY_STOP_CONFIDENCE if count < PROCESSES else FULL_CONFIDENCE
        different += outcome_of(effects[:count], confidence) in ("less", "more", "small")
    assert different / RUNS <= 0.06


finite = st.floats(-0.5, 0.5, allow_nan=False).map(lambda value: round(value, 6))
effects_lists = st.lists(finite, min_size=2, max_size=20)


@given(effects_lists)
def test_swapping_baseline_and_candidate_mirrors_the_verdict(effects):
    mirrored = {"less": "more", "more": "less"}
    there, back = outcome_of(effects), outcome_of([-value for value in effects])
    assert back == mirrored.get(there, there)


@given(effects_lists)
def test_the_interval_holds_the_ratio_and_same_is_never_said_of_an_interval_that_leaves_the_margin(effects):
    comparison = compare(effects)
    low, high = comparison.interval
    assert low <= comparison.ratio * (1 + 1e-12)
    assert comparison.ratio <= high * (1 + 1e-12)
    if outcome_of(effects) == "same":
        reach = abs(comparison.log_ratio) + comparison.equivalence_half_width
        assert reach <= math.log(1.05) + 1e-12


@given(effects_lists, st.floats(0.06, 2.0))
def test_less_or_more_is_said_only_where_the_whole_interval_is_beyond_the_margin(effects, shift):
    shifted = [value + shift for value in effects]
    comparison = compare(shifted)
    if outcome_of(shifted) in ("less", "more"):
        assert abs(comparison.log_ratio) - comparison.half_width > math.log(1.05)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20))
def test_adjusted_p_values_never_fall_below_the_raw_ones(p_values):
    assert all(after >= before for before, after in zip(p_values, statistics.adjust(p_values), strict=True))


def test_adjusting_no_p_values_gives_none():
    assert statistics.adjust([]) == []


def test_the_t_interval_equals_a_hand_computed_one():
    # mean 0.2, sd 0.1, n 4: half-width = 3.182446 * 0.1 / 2
    comparison = compare([0.1, 0.2, 0.2, 0.3])
    assert comparison.log_ratio == pytest.approx(0.2)
    assert comparison.half_width == pytest.approx(3.182446 * np.std([0.1, 0.2, 0.2, 0.3], ddof=1) / 2, rel=1e-6)


def test_wilcoxon_is_given_as_a_check_from_six_processes_on():
    assert statistics.wilcoxon_p([0.1, 0.2, 0.3, 0.15, 0.25, 0.35]) == pytest.approx(2 / 64)
    assert statistics.wilcoxon_p([0.1, 0.2, 0.3, 0.15, 0.25]) is None
    assert statistics.wilcoxon_p([0.0] * 8) is None


def test_one_process_gives_no_interval_and_no_outcome():
    comparison = compare([0.7])
    assert comparison.half_width == math.inf
    assert classify(comparison, comparison.p_value, margin=0.05) == "cannot-tell"
    assert statistics.processes_to_tell(comparison, margin=0.05) == statistics.MIN_PROCESSES


def test_without_spread_equal_times_are_the_same_and_others_are_different():
    assert outcome_of([0.0, 0.0, 0.0]) == "same"
    assert outcome_of([0.5, 0.5, 0.5]) == "less"
    assert outcome_of([0.02, 0.02, 0.02]) == "small"


def test_the_advised_number_of_processes_would_have_told():
    spread = [0.10, -0.06, 0.05, -0.02, 0.03]
    needed = statistics.processes_to_tell(compare(spread), margin=0.05)
    assert needed is not None
    assert needed > 5
    more = [value for _ in range(needed // 5 + 1) for value in spread]
    assert outcome_of(more) != "cannot-tell"


def test_no_number_of_processes_is_advised_where_none_would_help():
    assert statistics.processes_to_tell(compare([1.5, -1.5, 1.2, -1.2]), margin=0.05) is None


def test_a_call_that_lost_the_processor_is_marked_and_ordinary_ones_are_not():
    marks = statistics.contaminated([1.0, 1.0, 2.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0, 1, 0, 40])
    assert marks.tolist() == [False, False, True, True]


def test_a_slope_over_steps_is_the_fitted_change_from_first_to_last():
    steps = [[1, 2, 3, 4, 1, 2, 3, 4]]
    seconds = [[math.exp(0.1 * step) for step in steps[0]]]
    assert statistics.slope_effects(steps, seconds)[0] == pytest.approx(-0.3)


def test_warm_up_counts_as_level_within_ten_percent():
    assert statistics.levelled([1.0, 2.0, 3.0], [1.05, 2.1, 2.9])
    assert not statistics.levelled([1.0, 2.0, 3.0], [0.5, 1.0, 1.5])


def test_process_effects_take_the_median_over_rounds():
    effects = statistics.process_effects([[2.0, 2.0, 200.0]], [[1.0, 1.0, 1.0]])
    assert effects.tolist() == [pytest.approx(math.log(2.0))]
