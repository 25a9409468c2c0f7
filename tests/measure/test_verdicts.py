"""Verdicts follow from samples and facts alone, guarded by the A/A control."""

import msgspec
import pytest

from multiback import records
from multiback.measure import verdicts
from multiback.measure.verdicts import Evidence, Pair, Side, judge
from multiback.records import Samples


def find(record, candidate, metric="seconds", question="combine"):
    return next(v for v in record.verdicts if (v.question, v.candidate, v.metric) == (question, candidate, metric))


def test_a_way_that_takes_a_third_of_the_time_is_less(combine_record):
    verdict = find(combine_record, "one-forward summed")
    assert verdict.outcome == "less"
    assert verdict.ratio == pytest.approx(3.0, rel=0.05)
    low, high = verdict.interval
    assert low < verdict.ratio < high
    assert verdict.processes == 5


def test_a_way_that_takes_longer_is_more(combine_record):
    assert find(combine_record, "func2").outcome == "more"


def test_a_way_with_other_gradients_is_never_ranked(combine_record):
    for metric in ("seconds", "peak_bytes"):
        assert find(combine_record, "func3", metric).outcome == "not-comparable"


def test_bytes_are_compared_exactly(combine_record):
    verdict = find(combine_record, "one-forward summed", "peak_bytes")
    assert (verdict.outcome, verdict.ratio, verdict.interval) == ("less", 3.0, (3.0, 3.0))
    assert verdict.reason == "exact"


def test_where_the_control_differs_no_outcome_on_time_stands_and_ratios_stay(make_combine):
    record = make_combine(control_seconds=1.5)
    assert record.control.outcome == "more"
    verdict = find(record, "one-forward summed")
    assert (verdict.outcome, verdict.reason) == ("cannot-tell", "control-differs")
    assert verdict.ratio == pytest.approx(3.0, rel=0.05)
    assert verdict.interval is not None
    assert find(record, "one-forward summed", "peak_bytes").outcome == "less"
    assert find(record, "func3").outcome == "not-comparable"


def test_judging_a_record_again_gives_the_same_verdicts(full_record, combine_record):
    for record in (full_record, combine_record):
        again = verdicts.judge_again(records.decode(records.encode(record), "memory"))
        assert again.verdicts == record.verdicts
        assert again.control == record.control


def test_a_verdict_edited_by_hand_does_not_survive_being_shown(combine_record):
    forged = msgspec.structs.replace(combine_record.verdicts[0], outcome="less", ratio=99.0)
    record = msgspec.structs.replace(combine_record, verdicts=[forged, *combine_record.verdicts[1:]])
    assert verdicts.judge_again(record).verdicts == combine_record.verdicts


def test_later_calls_are_compared_with_the_first_by_policy(full_record):
    found = {(v.grads, v.candidate): v.outcome for v in full_record.verdicts if v.question == "successive"}
    assert found["none", "backward, call 2"] == "same"
    assert found["accumulate", "backward, call 4"] == "more"


def test_cold_calls_are_paired_with_warm_ones_of_the_same_process(full_record):
    verdict = find(full_record, "backward, cold", question="cold")
    assert verdict.baseline == "backward, warm"
    assert verdict.ratio == pytest.approx(0.5, rel=0.05)


def test_growth_is_judged_by_the_slope_and_by_exact_nodes(full_record):
    assert find(full_record, "a forward per step, step 3", "nodes", "growth").outcome == "more"
    assert find(full_record, "one graph, retained, step 3", "nodes", "growth").outcome == "same"
    assert find(full_record, "a forward per step, step 3", "seconds", "growth").outcome == "more"


@pytest.mark.parametrize(
    ("side", "question", "label"),
    [
        (Side("func1"), "combine", "func1"),
        (Side("backward", 2), "successive", "backward, call 2"),
        (Side("backward", phase="cold"), "cold", "backward, cold"),
        (Side("one graph, retained", 8), "growth", "one graph, retained, step 8"),
    ],
)
def test_sides_are_named_and_read_back(side, question, label):
    assert side.label(question) == label
    assert Side.parse(label) == side


def test_the_interval_of_a_run_that_stopped_itself_is_wider(full_record):
    settings = full_record.run.settings
    assert verdicts.confidence_of(settings) == 0.95
    assert verdicts.confidence_of(msgspec.structs.replace(settings, stopped_by="precision")) == 0.97


def test_pairs_without_samples_are_left_out():
    pair = Pair("combine", Side("func1"), Side("func2"), "none")
    evidence = Evidence(Samples(), [], None, 0.05, 0.95)
    assert judge(evidence, [pair], pair) == ([], None)
    assert verdicts.half_widths(evidence, [pair]) == {}


def test_the_widest_interval_so_far_is_known_while_running(combine_record):
    evidence = Evidence(combine_record.samples, combine_record.ways, None, 0.05, 0.95)
    pair = Pair("combine", Side("func1"), Side("func2"), "none")
    assert 0 < verdicts.half_widths(evidence, [pair])[pair] < 0.05


def test_a_verdict_that_rests_on_disturbed_calls_says_what_it_would_be_without_them(combine_record):
    table = combine_record.samples
    for row in range(len(table)):
        if table.way[row] == "func1" and table.round[row] == 0:
            table.seconds[row] *= 30.0
    evidence = Evidence(table, combine_record.ways, None, 0.05, 0.95)
    judged, _ = judge(evidence, [Pair("combine", Side("func1"), Side("one-forward summed"), "none")], None)
    assert judged[0].outcome_without_contaminated == "less"
