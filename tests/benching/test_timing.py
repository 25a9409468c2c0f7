"""Rounds run every act once in shuffled order, warm-up is kept apart, and the first call is cold."""

import dataclasses

import pytest
import torch

from multiback.benching import questions, timing
from multiback.benching.bound import Bound
from multiback.benching.problems import build_preset
from multiback.benching.protocol import Cold, Measure, Source
from multiback.records import Samples

SOURCE = Source(target="two-layer")


def measured(*asked, rounds=4, warmup=(1, 2), process=0):
    torch.manual_seed(0)
    bound = Bound(build_preset("two-layer", batch=1, num_losses=None))
    acts = [act for question in asked for act in questions.acts_of(question, None, None)]
    job = Measure(
        source=SOURCE,
        threads=1,
        acts=acts,
        control=questions.control_of(acts),
        rounds=dict.fromkeys(asked, rounds),
        warmup=warmup,
        process=process,
    )
    samples = Samples()
    timing.measure(bound, job, samples.extend)
    return samples


def rows(samples, **wanted):
    columns = {name: getattr(samples, name) for name in wanted}
    return [row for row in range(len(samples)) if all(columns[name][row] == value for name, value in wanted.items())]


def test_every_way_and_the_control_run_once_in_every_round():
    samples = measured("combine")
    for number in range(4):
        ways = [samples.way[row] for row in rows(samples, phase="warm", round=number)]
        assert sorted(ways) == sorted({*ways})
        assert len(ways) == 7 + 1
    assert "one-forward summed (again)" in samples.way


def test_the_order_is_shuffled_and_recorded():
    samples = measured("combine")
    orders = {
        tuple(
            samples.way[row]
            for row in sorted(rows(samples, phase="warm", round=number), key=lambda r: samples.order[r])
        )
        for number in range(4)
    }
    assert len(orders) > 1
    assert set(samples.order) == set(range(8))


def test_the_same_seed_and_process_give_the_same_order_and_another_process_another():
    first, second, other = measured("combine"), measured("combine"), measured("combine", process=1)
    assert first.way[:8] == second.way[:8]
    assert (first.way[-32:], first.order[-32:]) != (other.way[-32:], other.order[-32:])


def test_call_indexes_and_policies_are_kept_apart():
    samples = measured("successive")
    for grads in ("none", "accumulate"):
        found = {samples.call_index[row] for row in rows(samples, way="backward", grads=grads, phase="warm")}
        assert found == {1, 2, 3, 4}


def test_warm_up_is_stored_and_marked_and_ends_at_its_limit(monkeypatch):
    monkeypatch.setattr(timing, "levelled", lambda *_arguments: False)
    samples = measured("retain", warmup=(2, 5))
    assert {samples.round[row] for row in rows(samples, phase="warmup")} == {0, 1, 2, 3, 4}


def test_warm_up_ends_once_times_and_faults_are_level(monkeypatch):
    monkeypatch.setattr(timing, "levelled", lambda *_arguments: True)
    samples = measured("retain", warmup=(2, 5))
    assert {samples.round[row] for row in rows(samples, phase="warmup")} == {0, 1}


def test_a_way_that_raises_while_it_is_timed_is_dropped_and_the_others_go_on(monkeypatch):
    calls = []

    def failing(_bound, _grads):
        calls.append(1)
        raise RuntimeError("only sometimes")
        yield

    way = timing.way_of("combine", "func2")
    broken = dataclasses.replace(way, calls=failing)
    real = timing.way_of
    monkeypatch.setattr(timing, "way_of", lambda question, name: broken if name == "func2" else real(question, name))
    torch.manual_seed(0)
    bound = Bound(build_preset("two-layer", batch=1, num_losses=None))
    acts = questions.acts_of("combine", None, None)
    job = Measure(source=SOURCE, threads=1, acts=acts, control=None, rounds={"combine": 3}, warmup=(1, 1), process=0)
    samples, dropped = Samples(), []
    timing.measure(bound, job, samples.extend, lambda act, reason: dropped.append((act.way, reason)))
    assert dropped == [("func2", "only sometimes")]
    assert len(calls) == 1
    assert "func2" not in samples.way
    assert samples.way.count("func1") == 4


def test_only_the_first_call_of_a_fresh_process_is_cold():
    torch.manual_seed(0)
    samples = Samples()
    bound = Bound(build_preset("two-layer", batch=1, num_losses=None))
    timing.first_calls(bound, Cold(source=SOURCE, threads=1, process=7), samples.extend)
    for way in ("forward", "backward"):
        phases = [samples.phase[row] for row in rows(samples, way=way)]
        assert phases == ["cold", "warmup", "warmup", "warm", "warm", "warm"]
    assert set(samples.process) == {7}


def test_a_process_that_times_its_first_call_runs_no_forward_before(monkeypatch):
    forwards = []
    bound = Bound(build_preset("two-layer", batch=1, num_losses=None))
    monkeypatch.setattr(bound, "forward", lambda: forwards.append(1) or bound.model(bound.data))
    assert forwards == []
    timing.first_calls(bound, Cold(source=SOURCE, threads=1, process=0), lambda _samples: None)
    assert len(forwards) == questions.COLD_CALLS


def test_the_start_of_threads_is_timed_against_the_same_operation_later():
    samples = Samples()
    timing.thread_start(3, samples.extend)
    assert samples.phase == ["cold", "warmup", "warm"]
    assert set(samples.way) == {"thread start"}


@pytest.mark.parametrize("question", ["slices", "growth"])
def test_other_questions_are_timed_the_same_way(question):
    torch.manual_seed(0)
    preset = "slices" if question == "slices" else "recurrent"
    bound = Bound(build_preset(preset, batch=2, num_losses=None))
    acts = questions.acts_of(question, None, None)
    job = Measure(source=SOURCE, threads=1, acts=acts, control=None, rounds={question: 1}, warmup=(1, 1), process=0)
    samples = Samples()
    timing.measure(bound, job, samples.extend)
    assert {samples.way[row] for row in rows(samples, phase="warm")} == {act.way for act in acts}
