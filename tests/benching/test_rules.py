"""Rules are checked before the run and decided by the whole interval after it."""

import pytest

from multiback.benching import options, rules
from multiback.benching.protocol import Source
from multiback.errors import OptionError

OPTIONS = options.make(Source(target="mlp"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("func1<2", "must be QUESTION:CANDIDATE/BASELINE<RATIO"),
        ("combine:func1/func2>2", "must be QUESTION:CANDIDATE/BASELINE<RATIO"),
        ("slices:multiback/reduction=sum<2", "the question must be one that is asked"),
        ("combine:func1/func9<2", "a way must be one of func1, func2"),
        ("combine:func1/func2<zero", "the ratio must be a positive number"),
        ("combine:func1/func2<-1", "the ratio must be a positive number"),
        ("combine:func1/func2<inf", "the ratio must be a positive number"),
    ],
)
def test_a_malformed_rule_is_refused(text, message):
    with pytest.raises(OptionError) as caught:
        rules.parse(text, OPTIONS)
    assert message in str(caught.value)


def test_a_rule_on_a_way_that_is_not_run_is_refused():
    few = options.make(Source(target="mlp"), ways=["func1", "func2"])
    with pytest.raises(OptionError, match="a way must be one of func1, func2; got 'func3'"):
        rules.parse("combine:func3/func1<2", few)


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        ("combine:func1/one-forward summed<4", "true"),  # 3 s over 1 s is below 4
        ("combine:func1/one-forward summed<2", "false"),
        ("combine:func1/one-forward summed<3", "undecided"),
        ("combine:one-forward summed/func1<0.5", "true"),
        ("combine:func2/one-forward summed<3", "false"),  # not a pair of the report
        ("combine:func3/func1<9", "undecided"),  # other gradients
        ("combine:func4/func1<9", "undecided"),  # not timed
    ],
)
def test_a_rule_is_decided_by_the_whole_interval(combine_record, text, decision):
    assert rules.decide(rules.parse(text, OPTIONS), combine_record)[0] == decision


def test_no_rule_is_decided_where_the_control_differs(make_combine):
    record = make_combine(control_seconds=1.5)
    rule = rules.parse("combine:func1/one-forward summed<4", OPTIONS)
    assert rules.decide(rule, record) == ("undecided", "the A/A control differs")


def test_rules_may_name_call_indexes(full_record):
    rule = rules.parse("successive:backward, call 2/backward, call 1<1.2", OPTIONS)
    assert rules.decide(rule, full_record)[0] == "true"
