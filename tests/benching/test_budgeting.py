"""Designs fit the budget where they can, processes before rounds."""

from hypothesis import given
from hypothesis import strategies as st

from multiback.benching.budgeting import FEWEST_ROUNDS, Limits, design
from multiback.benching.protocol import Act
from multiback.measure.statistics import MIN_PROCESSES

INFINITE = float("inf")


def act(question, way="a"):
    return Act(question, way, "none")


def limits(available=60.0, patience=INFINITE, **changes):
    chosen = {"build_seconds": 0.1, "warmup_rounds": 1, "max_processes": 10, "max_rounds": 30, **changes}
    return Limits(available, patience, **chosen)


@given(
    st.dictionaries(st.sampled_from(["combine", "retain", "slices"]).map(act), st.floats(1e-5, 1.0), min_size=1),
    st.floats(5.0, 200.0),
)
def test_a_design_has_five_processes_and_two_rounds_at_least_and_fits_where_more_is_used(prices, available):
    found = design(prices, None, limits(available))
    assert MIN_PROCESSES <= found.processes <= 10
    assert all(FEWEST_ROUNDS <= rounds <= 30 for rounds in found.rounds.values())
    if found.processes > MIN_PROCESSES or any(rounds > FEWEST_ROUNDS for rounds in found.rounds.values()):
        assert found.seconds <= available * 1.001


def test_cheap_ways_get_the_ceiling():
    found = design({act("combine"): 0.001}, None, limits(60.0))
    assert (found.processes, found.rounds) == (10, {"combine": 30})


def test_dear_ways_get_the_floor():
    found = design({act("slices"): 5.0}, None, limits(60.0))
    assert (found.processes, found.rounds) == (MIN_PROCESSES, {"slices": FEWEST_ROUNDS})


def test_what_a_cheap_question_does_not_need_goes_to_the_dear_one():
    alone = design({act("combine"): 0.2}, None, limits(30.0, processes=5))
    both = design({act("combine"): 0.2, act("retain"): 0.0001}, None, limits(30.0, processes=5))
    assert both.rounds["retain"] == 30
    assert both.rounds["combine"] >= alone.rounds["combine"] - 1


def test_the_dearest_ways_are_left_out_where_even_the_floor_would_try_the_patience():
    prices = {act("slices", "loop"): 10.0, act("slices", "sum"): 0.01}
    found = design(prices, None, limits(30.0, patience=100.0))
    assert found.dropped == [act("slices", "loop")]
    assert found.acts == [act("slices", "sum")]


def test_the_last_way_is_never_left_out():
    found = design({act("slices"): 1000.0}, None, limits(30.0, patience=100.0))
    assert found.dropped == []


def test_without_a_budget_everything_runs_at_the_ceiling():
    found = design({act("combine"): 1000.0}, None, limits(None, max_processes=20))
    assert (found.processes, found.rounds) == (20, {"combine": 30})


def test_what_the_user_asked_for_is_kept():
    found = design({act("combine"): 5.0}, None, limits(1.0, processes=22, rounds=7))
    assert (found.processes, found.rounds) == (22, {"combine": 7})


def test_the_second_run_of_the_control_is_paid_for():
    prices = {act("combine"): 1.0}
    without = design(prices, None, limits(processes=5, rounds=2)).seconds
    assert design(prices, act("combine"), limits(processes=5, rounds=2)).seconds > without * 1.9
