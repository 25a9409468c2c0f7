"""Questions turn into acts and pairs whose baselines are always run."""

import pytest

from multiback.benching import questions
from multiback.benching.names import QUESTIONS, WAYS
from multiback.benching.protocol import Act


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_pair_compares_ways_that_are_run(question):
    acts = questions.acts_of(question, None, None)
    names = {act.way for act in acts}
    pairs = questions.pairs_of(question, acts)
    assert pairs
    assert all({pair.baseline.way, pair.candidate.way} <= names for pair in pairs)
    assert all(pair.baseline != pair.candidate for pair in pairs)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_reference_is_one_of_the_ways(question):
    assert questions.reference_of(question) in WAYS[question]


def test_combine_compares_every_way_with_func1():
    pairs = questions.pairs_of("combine", questions.acts_of("combine", None, None))
    against = {pair.candidate.way for pair in pairs if pair.baseline.way == "func1" and pair.metric == "seconds"}
    assert against == set(WAYS["combine"]) - {"func1"}


def test_successive_is_asked_under_two_policies_and_grad_under_one():
    acts = questions.acts_of("successive", None, None)
    assert [(act.way, act.grads) for act in acts] == [
        ("backward", "none"),
        ("autograd.grad", "none"),
        ("backward", "accumulate"),
    ]


def test_a_policy_that_was_asked_for_overrides_the_defaults():
    assert {act.grads for act in questions.acts_of("successive", None, "prealloc")} == {"prealloc"}


def test_leaving_out_the_reference_leaves_pairs_without_it_out():
    acts = questions.acts_of("combine", ["one-forward summed", "multiback"], None)
    pairs = questions.pairs_of("combine", acts)
    assert {(pair.baseline.way, pair.candidate.way) for pair in pairs} == {("one-forward summed", "multiback")}


def test_the_control_is_a_cheap_way_and_never_a_cold_one():
    acts = [act for question in QUESTIONS for act in questions.acts_of(question, None, None)]
    assert questions.control_of(acts) == Act("combine", "one-forward summed", "none")
    assert questions.control_of([Act("cold", "forward", "none")]) is None
    assert questions.control_of([Act("combine", "func3", "none")]) == Act("combine", "func3", "none")
