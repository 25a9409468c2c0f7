"""A timed call reports its own figures, and garbage collection stays out of it."""

import gc

import torch

from multiback.measure import clock


def test_figures_of_a_call_are_of_that_call_alone():
    done = []
    figures = clock.time_call(lambda: done.append(torch.ones(1 << 24)))
    assert len(done) == 1
    assert figures.seconds > 0
    assert figures.cpu_seconds >= 0
    assert figures.minor_faults > 1000  # 64 MiB of fresh pages of 4 KiB, or some hundred huge ones are excluded
    assert figures.rss_bytes > 1 << 26


def test_the_collector_is_off_inside_and_back_afterwards():
    assert gc.isenabled()
    with clock.without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_only_the_closing_collect_frees_is_counted():
    with clock.without_gc() as freed:
        cycle = []
        cycle.append(cycle)
        del cycle
    assert freed[0] >= 1


def test_the_collector_comes_back_after_an_exception():
    class Stop(Exception):
        pass

    try:
        with clock.without_gc():
            raise Stop
    except Stop:
        assert gc.isenabled()


def test_accelerators_are_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append("cuda"))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    clock.time_call(lambda: waited.append("call"), "cuda:0")
    clock.time_call(lambda: waited.append("call"), "mps")
    assert waited == ["cuda", "call", "cuda", "mps", "call", "mps"]
