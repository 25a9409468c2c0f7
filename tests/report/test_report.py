"""Reports say what records hold, in words that a reader can act on."""

import io

import msgspec
import pytest
from rich.console import Console

from multiback.measure.verdicts import Evidence, Pair, Side, judge, judge_again
from multiback.records import Growth
from multiback.report import claims, console, document, markdown, sentences
from multiback.report import format as fmt


def text_of(record):
    return " ".join(console.to_text(record).split())


def verdict_of(record, candidate, metric="seconds", **changes):
    found = next(v for v in record.verdicts if (v.candidate, v.metric) == (candidate, metric))
    return msgspec.structs.replace(found, **changes)


# ---- sentences -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"outcome": "less", "ratio": 1.72, "interval": (1.68, 1.77)},
            "func2 is 1.72x faster than func1 (95% CI 1.68-1.77)",
        ),
        (
            {"outcome": "more", "ratio": 1 / 1.72, "interval": (1 / 1.77, 1 / 1.68)},
            "func2 is 1.72x slower than func1 (95% CI 1.68-1.77)",
        ),
        (
            {"outcome": "small", "ratio": 1 / 1.036, "interval": (1 / 1.069, 1 / 1.005)},
            "func2 is 3.6% slower than func1 (95% CI 0.5%-6.9%): real but small, it may be under the margin of 5%.",
        ),
        (
            {"outcome": "small", "ratio": 1 / 1.24, "interval": (1 / 1.48, 1 / 1.048)},
            "func2 is 24% slower than func1 (95% CI 4.8%-48%): real, but it may be under the margin of 5%.",
        ),
        (
            {"outcome": "same", "ratio": 1.0, "interval": (0.98, 1.02)},
            "func2 shows no difference over 5% against func1 (95% CI: between 2% faster and 2% slower).",
        ),
        (
            {"outcome": "cannot-tell", "interval": (0.97, 1.09), "reason": "processes=22", "processes": 10},
            "func2 against func1: cannot tell, between 8.3% faster and 3.1% slower; about 12 more processes would "
            "tell: --processes 22.",
        ),
        (
            {"outcome": "cannot-tell", "ratio": 1.0, "interval": (0.5, 2.0), "reason": "processes=6", "processes": 5},
            "func2 against func1: cannot tell, between 2.00x faster and 2.00x slower; about 1 more process would tell: "
            "--processes 6.",
        ),
        (
            {"outcome": "cannot-tell", "ratio": 1.0, "interval": (0.1, 9.0), "reason": "no-use"},
            "more processes would not tell on this machine as it is now",
        ),
        (
            {"outcome": "cannot-tell", "ratio": 1.0, "interval": None, "reason": "processes=5", "processes": 1},
            "cannot tell, one process gives no interval",
        ),
        (
            {"outcome": "cannot-tell", "ratio": 3.0, "interval": (2.9, 3.1), "reason": "control-differs"},
            "the A/A control differs, so no outcome of this run stands",
        ),
    ],
)  # fmt: skip
def test_each_outcome_has_its_sentence(combine_record, changes, expected):
    verdict = verdict_of(combine_record, "func2", **{"outcome_without_contaminated": None, **changes})
    assert expected in sentences.sentence(verdict, combine_record)


def test_flops_stand_beside_time(combine_record):
    verdict = verdict_of(combine_record, "one-forward summed")
    assert "FLOPs alone say 2.00x" in sentences.sentence(verdict, combine_record)


def test_a_verdict_that_disturbed_calls_decide_says_so(combine_record):
    verdict = verdict_of(combine_record, "func2", outcome_without_contaminated="cannot-tell")
    assert "(without the calls that were disturbed from outside: cannot tell)" in sentences.sentence(
        verdict, combine_record
    )


def test_a_way_with_other_gradients_is_named_with_its_difference_and_not_ranked(combine_record):
    text = text_of(combine_record)
    assert "func3: not the same gradients (max relative difference 0.32), so it is not ranked against func1." in text
    assert "func3 is" not in text


def test_the_mean_is_said_to_differ_by_its_factor(full_record):
    text = text_of(full_record)
    assert (
        "reduction=mean: not the same gradients, 0.25 times the others', that is 1/4, one over the number of rows B"
        in text
    )


def test_the_difference_from_each_way_is_said_once(combine_record):
    assert text_of(combine_record).count("func3: not the same gradients") == 1


def test_gradients_that_are_not_finite_are_called_that(combine_record):
    note = "gradients are not finite (NaN or infinite): check data and losses"
    ways = [
        msgspec.structs.replace(fact, comparable=False, group=-1, note=note, difference_from_reference=float("inf"))
        for fact in combine_record.ways
    ]
    record = judge_again(msgspec.structs.replace(combine_record, ways=ways))
    assert "func2: gradients are not finite (NaN or infinite): check data and losses, so" in text_of(record)
    assert claims.judge(record) == []
    assert claims.advice(record).startswith("none of these ways can be recommended")


def test_ways_that_agree_with_one_another_but_not_with_the_usual_code_are_ranked(combine_record):
    ways = [
        msgspec.structs.replace(fact, comparable=fact.way == "func1", group=0 if fact.way == "func1" else 1)
        for fact in combine_record.ways
    ]
    pair = Pair("combine", Side("func2"), Side("one-forward summed"), "none")
    evidence = Evidence(combine_record.samples, ways, None, 0.05, 0.95)
    verdicts, _ = judge(evidence, [pair], None)
    record = msgspec.structs.replace(combine_record, ways=ways, verdicts=verdicts)
    assert verdicts[0].outcome == "less"
    assert "3.99x faster here than func2" in claims.advice(record)


def test_an_interval_beyond_one_that_does_not_count_says_why(combine_record):
    verdict = verdict_of(
        combine_record, "func2", outcome="cannot-tell", interval=(1.05, 1.09), p_adjusted=0.07, reason="no-use"
    )
    text = sentences.sentence(verdict, combine_record)
    assert "which may be chance among the pairs of this question (adjusted p 0.07)" in text


def test_hopeless_intervals_are_called_that_instead_of_printed(combine_record):
    verdict = verdict_of(combine_record, "func2", outcome="cannot-tell", interval=(1e-9, 1e9), reason="no-use")
    assert "cannot tell, far too noisy;" in sentences.sentence(verdict, combine_record)


def test_a_small_difference_that_is_wholly_under_the_margin_is_said_to_be(combine_record):
    verdict = verdict_of(combine_record, "func2", outcome="small", ratio=1 / 1.02, interval=(1 / 1.03, 1 / 1.01))
    assert "real, but under the margin of 5%" in sentences.sentence(verdict, combine_record)


def test_a_busy_machine_is_named_at_the_top(combine_record):
    environment = msgspec.structs.replace(combine_record.environment, load_before=[4.2, 1.0, 1.0])
    record = msgspec.structs.replace(combine_record, environment=environment)
    assert "The machine was busy (load 4.2 on 2 cores before the run)" in document.build(record).advice


def test_a_run_beyond_its_budget_says_so(combine_record):
    run = msgspec.structs.replace(combine_record.run, seconds=99.0)
    assert "The budget was 35 s" in text_of(msgspec.structs.replace(combine_record, run=run))


def test_a_loss_per_row_brings_slices_up(combine_record):
    problem = msgspec.structs.replace(combine_record.problem, num_losses=4)
    record = msgspec.structs.replace(combine_record, problem=problem)
    assert "--question slices compares" in document.build(record).advice


def test_one_loss_has_nothing_to_combine(combine_record):
    problem = msgspec.structs.replace(combine_record.problem, num_losses=1)
    record = msgspec.structs.replace(combine_record, problem=problem)
    assert claims.advice(record).startswith("there is one loss and nothing to combine")
    assert "There is one loss, so there is nothing to combine" in text_of(record)
    assert claims.judge(record) == []


def test_published_claims_are_judged_on_published_problems_only(combine_record):
    problem = msgspec.structs.replace(combine_record.problem, losses="the target's own")
    record = msgspec.structs.replace(combine_record, problem=problem)
    assert not any("claimed" in section.title for section in document.build(record).sections)


def test_exact_bytes_stand_beside_one_another(combine_record):
    text = text_of(combine_record)
    assert "peak memory: 1000 B for one-forward summed, 2.93 KiB for func1 (0.33x)." in text


def test_what_retaining_holds_is_given_even_where_it_is_small(full_record):
    text = text_of(full_record)
    assert "memory held afterwards: 60 B for retain_graph=True, 10 B for retain_graph=False (6.00x)." in text
    assert "peak memory: 1.04 KiB for retain_graph=True, 1010 B for retain_graph=False (+50 B)." in text


def test_the_confidence_of_a_run_that_stopped_itself_is_said(make_combine):
    assert "(97% CI" in text_of(make_combine(stopped_by="precision"))


# ---- claims and advice -----------------------------------------------------------------------------


def judged(record):
    return {claim.text: claim for claim in claims.judge(record)}


def test_every_published_claim_is_judged_on_a_full_record(full_record):
    found = judged(full_record)
    assert len(found) == 6  # func1 and func2 were not run
    assert (
        found['"A second backward is cheaper, since the graph need not be computed again."'].verdict == "did not hold"
    )
    assert (
        found['"The first backward is slower because computations are cached."'].verdict == "slower, but not by caching"
    )
    assert found['"A retained graph grows bigger and slower with every backward."'].verdict == "did not hold"
    assert found['"retain_graph does nothing but occupy memory, so it does not matter."'].verdict == "held in time"
    assert found['"A summed loop is slower than one call on the batch."'].verdict == "held"
    mean = found['"With the loss\'s mean the gradients differ slightly."']
    assert mean.verdict == "did not hold"
    assert "4 times the mean's" in mean.because


def test_the_claim_on_two_forwards_gives_the_reason_with_figures(combine_record):
    (claim,) = claims.judge(combine_record)
    assert claim.verdict == "held"
    assert "2 graphs" in claim.because
    assert "peak 4.88 KiB against 2.93 KiB" in claim.because


def test_claims_cannot_be_told_where_the_control_differs(make_combine):
    (claim,) = claims.judge(make_combine(control_seconds=1.5))
    assert claim.verdict == "cannot tell"


def replaced(record, question, candidate, **changes):
    """The record with one verdict on time changed."""
    verdicts = [
        msgspec.structs.replace(v, **changes)
        if (v.question, v.candidate, v.metric) == (question, candidate, "seconds")
        else v
        for v in record.verdicts
    ]
    return msgspec.structs.replace(record, verdicts=verdicts)


@pytest.mark.parametrize(
    ("outcome", "ratio", "expected"),
    [
        ("small", 0.97, "held"),
        ("small", 1.03, "did not hold"),
        ("same", 1.0, "did not hold"),
        ("less", 2.0, "did not hold"),
    ],
)
def test_a_small_difference_counts_in_its_direction(combine_record, outcome, ratio, expected):
    (claim,) = claims.judge(replaced(combine_record, "combine", "func2", outcome=outcome, ratio=ratio))
    assert claim.verdict == expected


def test_a_first_call_that_is_a_little_faster_is_not_called_slower(full_record):
    record = replaced(full_record, "cold", "backward, cold", outcome="small", ratio=1.03)
    claim = judged(record)['"The first backward is slower because computations are cached."']
    assert claim.verdict == "not seen to be slower, nor any caching"


@pytest.mark.parametrize(
    ("outcome", "ratio", "expected"),
    [("less", 1.2, "held"), ("small", 1.03, "held"), ("cannot-tell", 1.0, "cannot tell")],
)
def test_a_later_call_must_be_cheaper_under_both_policies(full_record, outcome, ratio, expected):
    record = replaced(full_record, "successive", "backward, call 2", outcome=outcome, ratio=ratio)
    claim = judged(record)['"A second backward is cheaper, since the graph need not be computed again."']
    assert claim.verdict == expected


def test_later_calls_that_are_slower_do_not_make_the_graph_bigger(full_record):
    record = replaced(full_record, "successive", "backward, call 4", outcome="more", ratio=0.5)
    claim = judged(msgspec.structs.replace(record, growth=None))[
        '"A retained graph grows bigger and slower with every backward."'
    ]
    assert claim.verdict == "slower here, but not bigger"


def test_no_way_is_recommended_where_no_gradients_agree(combine_record):
    record = combine_record
    for way in ("func2", "func3", "one-forward summed"):
        record = replaced(record, "combine", way, outcome="not-comparable")
    assert claims.advice(record).startswith("none of these ways can be recommended")


def test_growth_by_successive_calls_is_judged_where_growth_was_not_asked(full_record):
    record = msgspec.structs.replace(full_record, growth=None)
    claim = judged(record)['"A retained graph grows bigger and slower with every backward."']
    assert "every call walks the same 7 nodes" in claim.because


def test_the_advice_is_the_plainest_of_the_fastest_ways(combine_record):
    advice = claims.advice(combine_record)
    assert advice.startswith(
        "run one forward, add the losses up and call backward() once: 2.99x faster here than func1"
    )


def test_no_advice_is_given_on_verdicts_that_do_not_stand(make_combine):
    assert claims.advice(make_combine(control_seconds=1.5)).startswith("run again on a quieter machine")


def test_a_loop_that_was_too_slow_to_time_is_advised_against(full_record):
    ways = [
        msgspec.structs.replace(fact, note="not timed: one run takes 31.0 s, too long for the budget")
        if fact.way == "retained loop"
        else fact
        for fact in full_record.ways
    ]
    kept = [v for v in full_record.verdicts if "retained loop" not in (v.baseline, v.candidate)]
    record = msgspec.structs.replace(full_record, ways=ways, verdicts=kept)
    assert claims.advice(record).startswith("leave the retained loop (not timed: one run takes 31.0 s")


def test_growth_names_what_was_proved_and_nothing_else(full_record):
    assert "reaches the node that made hidden. Detach it" in claims.growth_finding(full_record)
    unproved = msgspec.structs.replace(full_record, growth=Growth(steps=full_record.growth.steps, carried=[]))
    assert "what does is not named" in claims.growth_finding(unproved)


def test_no_growth_is_said_to_be_none(full_record):
    flat = [step for step in full_record.growth.steps if step.way == "one graph, retained"]
    steps = [msgspec.structs.replace(step, way="a forward per step") for step in flat]
    record = msgspec.structs.replace(full_record, growth=Growth(steps=steps, carried=[]))
    assert claims.growth_finding(record) == "The graph does not grow: every step walks 10 nodes, retained or not."


def test_bytes_that_grow_under_a_graph_that_does_not_are_said_to(full_record):
    steps = [
        msgspec.structs.replace(step, nodes=10, saved_bytes=1024 * step.step)
        for step in full_record.growth.steps
        if step.way == "a forward per step"
    ]
    record = msgspec.structs.replace(full_record, growth=Growth(steps=steps, carried=[]))
    assert claims.growth_finding(record).startswith("The graph keeps its 10 nodes and holds 1.00 KiB more a step")


@pytest.mark.parametrize(
    ("question", "start"),
    [("retain", "call backward() without retain_graph"), ("successive", "see the verdicts below")],
)
def test_other_questions_have_advice_of_their_own(full_record, question, start):
    kept = [v for v in full_record.verdicts if v.question == question]
    record = msgspec.structs.replace(full_record, verdicts=kept, growth=None)
    assert claims.advice(record).startswith(start)


# ---- documents and renderers -----------------------------------------------------------------------


def test_a_report_has_a_section_per_question_the_claims_and_the_conduct(full_record):
    titles = [section.title.split(":")[0] for section in document.build(full_record).sections]
    assert titles == [
        "successive",
        "cold",
        "retain",
        "slices",
        "growth",
        "What a published answer to these questions (func1 to func4, 100 repetitions each) claimed",
        "How this was measured",
    ]


def test_questions_without_anything_in_the_record_are_left_out(combine_record):
    settings = msgspec.structs.replace(combine_record.run.settings, questions=["combine", "retain"])
    record = msgspec.structs.replace(combine_record, run=msgspec.structs.replace(combine_record.run, settings=settings))
    assert [s.title.split(":")[0] for s in document.build(record).sections][:2] == [
        "combine",
        "What a published answer to these questions (func1 to func4, 100 repetitions each) claimed",
    ]


def test_the_conduct_says_what_the_control_read(make_combine):
    assert "reads the same, as it must" in text_of(make_combine())
    assert "DIFFERS, so every outcome on time is 'cannot tell'" in text_of(make_combine(control_seconds=1.5))
    without = msgspec.structs.replace(make_combine(), control=None)
    assert "A/A control: not run" in text_of(without)


def test_the_conduct_says_how_the_run_ended(make_combine):
    assert "INTERRUPTED, this record is partial" in text_of(make_combine(stopped_by="interrupt"))
    assert "the budget was spent" in text_of(make_combine(stopped_by="budget"))


def test_memory_figures_that_disagree_are_reported(combine_record):
    ways = [
        msgspec.structs.replace(fact, peak_bytes=1000, high_water_bytes=64 << 20) for fact in combine_record.ways[:1]
    ]
    record = msgspec.structs.replace(combine_record, ways=ways, memory_fault="a tensor read as nothing")
    text = text_of(record)
    assert "the system saw a peak of 64.0 MiB where allocation events say 1000 B" in text
    assert "Memory figures are not to be trusted here: a tensor read as nothing." in text


def test_cycles_that_only_the_collector_frees_are_reported(combine_record):
    ways = [msgspec.structs.replace(combine_record.ways[0], collected=12)]
    assert "func1 leaves 12 objects in reference cycles" in text_of(msgspec.structs.replace(combine_record, ways=ways))


def test_the_terminal_report_fits_its_width_and_has_no_control_codes_in_a_pipe(full_record):
    text = console.to_text(full_record)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    stream = io.StringIO()
    console.render(full_record, console.make_console(stream))
    assert stream.getvalue() == text


def test_a_terminal_gets_colours_and_the_same_words(full_record):
    stream = io.StringIO()
    console.render(full_record, Console(file=stream, width=100, force_terminal=True, color_system="standard"))
    assert "\x1b[" in stream.getvalue()


def test_markdown_has_a_table_per_question_and_escapes_what_would_format(full_record):
    text = markdown.render(full_record)
    assert text.startswith("# multiback bench mlp")
    assert text.count("| --- |") == 5
    assert "retain\\_graph=True" in text
    assert "\n\n\n" not in text


def test_a_record_read_back_reports_the_same(full_record):
    assert console.to_text(judge_again(full_record)) == console.to_text(full_record)


# ---- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formatter", "value", "expected"),
    [
        (fmt.seconds, 1.234, "1.23 s"),
        (fmt.seconds, 0.0123, "12.3 ms"),
        (fmt.seconds, 0.000123, "123 us"),
        (fmt.seconds, 1e-8, "0.01 us"),
        (fmt.size, 0, "0 B"),
        (fmt.size, 1023, "1023 B"),
        (fmt.size, 100_716_560, "96.1 MiB"),
        (fmt.size, 5 << 30, "5.00 GiB"),
        (fmt.count, 16385.0, "16,385"),
        (fmt.flops, 285_212_672, "285 M"),
        (fmt.flops, 2_000_000_000, "2.00 G"),
        (fmt.flops, 1_500, "1.50 k"),
        (fmt.flops, 0, "0"),
        (fmt.times, 441.2, "441x"),
        (fmt.percent, -0.05, "5%"),
        (fmt.percent, 0.036, "3.6%"),
        (fmt.number, 0.0078125, "0.00781"),
    ],
)
def test_numbers_have_three_figures_and_their_unit(formatter, value, expected):
    assert formatter(value) == expected


@pytest.mark.parametrize("formatter", [fmt.seconds, fmt.size, fmt.count, fmt.flops])
def test_what_was_not_measured_is_a_dash(formatter):
    assert formatter(None) == "-"
