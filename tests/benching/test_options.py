"""Options are checked before anything is loaded, each breach in one sentence."""

import os

import pytest

from multiback.benching import options
from multiback.benching.protocol import Source
from multiback.errors import OptionError
from multiback.measure.environment import available_cores

REFUSED = {
    "an unknown question": ({"questions": ["speed"]}, "--question: must be one of successive, cold"),
    "an unknown kind": ({"kind": "sum"}, "--kind: must be one of each, rows, gram, norms; got 'sum'"),
    "an unknown way": ({"ways": ["func9"]}, "--way: must be one of"),
    "a way of a question that is not asked": ({"questions": ["retain"], "ways": ["func1"]}, "--way: must be one of"),
    "more threads than cores": ({"threads": 10_000}, "more threads than cores make times meaningless"),
    "no threads": ({"threads": 0}, "--threads: must be from 1"),
    "no processes": ({"processes": 0}, "--processes: must be 1 or more; got 0"),
    "negative rounds": ({"rounds": -2}, "--rounds: must be 1 or more; got -2"),
    "no budget": ({"budget": 0.0}, "--budget: must be a positive number of seconds"),
    "an endless budget": ({"budget": float("inf")}, "--budget: must be a positive number"),
    "a budget that is no number": ({"budget": float("nan")}, "--budget: must be a positive number"),
    "no margin": ({"margin_percent": 0.0}, "--margin: must be a percentage"),
    "an unknown policy": ({"grads": "zero"}, "--grads: must be one of none, accumulate, prealloc; got 'zero'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_breach_is_refused_by_name(case):
    arguments, message = REFUSED[case]
    with pytest.raises(OptionError) as caught:
        options.make(Source(target="mlp"), **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_beyond_the_generator_is_refused(seed):
    with pytest.raises(OptionError, match="--seed"):
        options.make(Source(target="mlp", seed=seed))


def test_a_batch_of_zero_is_refused():
    with pytest.raises(OptionError, match="--batch: must be 1 or more; got 0"):
        options.make(Source(target="mlp", batch=0))


def test_presets_ask_their_own_questions_and_targets_the_usual_ones():
    assert options.make(Source(target="mlp")).questions == ["successive", "cold", "retain", "combine"]
    assert options.make(Source(target="slices")).questions == ["slices", "retain"]
    assert options.make(Source(target="recurrent")).questions == ["growth"]
    assert options.make(Source(target="my.py:f")).questions == ["successive", "cold", "retain", "combine"]


def test_a_kind_is_asked_alone_or_beside_the_questions_that_are_named():
    assert options.make(Source(target="mlp"), kind="each").questions == ["each"]
    assert options.make(Source(target="mlp"), kind="rows", questions=["combine", "rows"]).questions == [
        "combine",
        "rows",
    ]
    assert options.make(Source(target="mlp"), questions=["gram"]).questions == ["gram"]


def test_naming_a_way_leaves_only_the_questions_that_have_it():
    assert options.make(Source(target="mlp"), ways=["func1"]).questions == ["combine"]


def test_modes_bring_their_budget_and_an_own_one_overrides_it():
    assert options.make(Source(target="mlp"), mode="quick").budget == 35.0
    assert options.make(Source(target="mlp")).budget == 110.0
    assert options.make(Source(target="mlp"), mode="rigorous").budget is None
    assert options.make(Source(target="mlp"), mode="rigorous", budget=7.0).budget == 7.0


def test_threads_follow_the_environment_and_never_exceed_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert options.make(Source(target="mlp")).threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "10000")
    assert options.make(Source(target="mlp")).threads == available_cores()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert options.make(Source(target="mlp")).threads == len(os.sched_getaffinity(0))


def test_shapes_are_read_as_typed():
    assert options.parse_shape("8x3x32x32") == [8, 3, 32, 32]
    assert options.parse_shape(None) is None


@pytest.mark.parametrize("text", ["", "1x", "ax3", "0x3", "1,40"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(OptionError, match="--input: must be a shape such as 1x40"):
        options.parse_shape(text)
