"""A recording runs no code of the program, is not heard by its modes, and keeps nothing of it."""

import gc
import json
import signal
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import multiback as mb
from multiback.tracing import recorder


def leaf():
    return torch.ones(3, requires_grad=True)


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class CountedFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def two_losses():
    hidden = leaf() * leaf()
    hidden.sum().backward(retain_graph=True)
    (hidden**2).sum().backward()


@pytest.mark.parametrize("mode", [Counted, CountedFunctions])
def test_modes_of_the_program_hear_its_own_operations_alone(mode):
    with mode() as plain:
        two_losses()
    with mb.trace() as traced, mode() as watched:
        two_losses()
    assert watched.count == plain.count > 0
    assert [one.code for one in traced.findings if one.level == "finding"] == ["repeated-traversal"]
    assert {site.place.function for site in traced.sites} == {"two_losses"}


def with_locals():
    config = locals()
    width = 3
    leaf().exp().sum().backward()
    return json.dumps(config), width


def test_a_dict_that_locals_gave_stays_as_it_was():
    with mb.trace():
        assert with_locals() == ("{}", 3)


class Lazy:
    """Says what it is only when asked, and remembers that it was."""

    asked = False

    @property
    def __class__(self):
        Lazy.asked = True
        return torch.Tensor

    def __len__(self):
        Lazy.asked = True
        return 0


def test_objects_of_the_program_are_not_asked_what_they_are():
    lazy, items = Lazy(), [Lazy(), {"key": Lazy()}]
    with mb.trace() as traced:
        leaf().exp().sum().backward()
    assert not Lazy.asked
    assert traced.record.faults == []
    del lazy, items


def test_a_name_whose_maker_cannot_be_told_is_passed_by():
    hidden = leaf() * 1
    rows = hidden.unbind()
    with torch.no_grad():
        hidden.add_(1)
    with mb.trace() as traced:
        leaf().exp().sum().backward()
    assert traced.record.faults == []
    assert len(traced.sites) == 1
    del rows


def test_checkpointed_parts_run_as_often_as_without_a_recording():
    runs = []

    def part(hidden):
        runs.append(1)
        return F.cross_entropy(hidden, torch.zeros(2, dtype=torch.long))

    for traced in (False, True):
        with mb.trace() if traced else torch.enable_grad():
            checkpoint(part, torch.rand(2, 3, requires_grad=True), use_reentrant=False).backward()
    assert len(runs) == 4


class Late(Exception):
    pass


def test_what_a_signal_handler_raises_reaches_the_program(monkeypatch):
    def late(_number, _frame):
        raise Late

    before = signal.signal(signal.SIGUSR1, late)
    monkeypatch.setattr("multiback.tracing.observer.walk", lambda *_: signal.raise_signal(signal.SIGUSR1))
    try:
        with mb.trace() as traced, pytest.raises(Late):
            leaf().exp().sum().backward()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert traced.record.faults == []


def test_a_fault_of_the_recorder_is_noted_once_with_its_count(monkeypatch):
    def broken(*_):
        raise ValueError("broken\nin two lines")

    monkeypatch.setattr("multiback.tracing.observer.walk", broken)
    parameter = leaf()
    with mb.trace() as traced:
        for _ in range(3):
            parameter.exp().sum().backward()
    (fault,) = traced.record.faults
    assert fault.startswith("before a call (test_hiding.py:")
    assert fault.endswith("ValueError: broken (3 times)")
    assert parameter.grad.tolist() == pytest.approx([3 * 2.7182817] * 3)


def test_recordings_that_overlap_leave_nothing_patched():
    engine, forward = torch.autograd._engine_run_backward, nn.parallel.DistributedDataParallel.forward
    first = recorder.start()
    second = recorder.start()
    first.finish("block left")
    leaf().exp().sum().backward()
    third = recorder.start()
    second.finish("block left")
    leaf().exp().sum().backward()
    assert sum(site.calls for site in third.finish("block left").sites) == 1
    assert sum(site.calls for site in second.finish("block left").sites) == 1
    assert torch.autograd._engine_run_backward is engine
    assert nn.parallel.DistributedDataParallel.forward is forward


def test_a_recording_that_ends_within_a_step_leaves_torch_s_hooks_alone():
    parameter, other = leaf(), []
    optimizer = torch.optim.SGD([parameter], 0.1)
    parameter.grad = torch.ones(3)
    recording = recorder.start(max_steps=1)
    handle = optimizers.register_optimizer_step_post_hook(lambda *_: other.append(1))
    try:
        optimizer.step()
        optimizer.step()
    finally:
        handle.remove()
    assert other == [1, 1]
    assert recording.finish("block left").steps == 1
    leaf().exp().sum().backward()  # by now the hooks are gone
    assert not optimizers._global_optimizer_post_hooks


def test_a_lock_that_cannot_be_had_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(recorder, "_PATIENCE", 0.01)
    with mb.trace() as traced:
        taken, done = threading.Event(), threading.Event()

        def hold():
            with traced._recording._lock:
                taken.set()
                done.wait()

        holding = threading.Thread(target=hold)
        holding.start()
        taken.wait()
        leaf().exp().sum().backward()
        done.set()
        holding.join()
    (fault,) = traced.record.faults
    assert "another thread's call took too long" in fault


def test_a_failing_call_keeps_no_parameter_alive():
    freed = []

    class Weight(nn.Parameter):
        def __del__(self):
            freed.append(1)

    with mb.trace():
        weight = Weight(torch.ones(3))
        hidden = weight * 1
        loss = hidden.exp().sum()
        loss.backward()
        with pytest.raises(RuntimeError):
            loss.backward()
        del weight, hidden, loss
        gc.collect()
        assert freed == [1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiler_does_not_look_into_a_recording():
    graphs = []

    def backend(module, _inputs):
        graphs.append(1)
        return module

    def counted(*, traced):
        net = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        @torch.compile(backend=backend)
        def step(rows):
            optimizer.zero_grad()
            net(rows).sum().backward()
            optimizer.step()

        graphs.clear()
        torch._dynamo.reset()
        with mb.trace() if traced else torch.enable_grad():
            for _ in range(3):
                step(torch.ones(2, 3))
        return len(graphs)

    assert counted(traced=False) == counted(traced=True) > 0


def test_what_has_been_seen_is_handed_over_on_the_way(monkeypatch):
    monkeypatch.setattr(recorder, "_KEPT_FIRST", 0.0)
    monkeypatch.setattr(recorder, "_KEPT_EVERY", 0.0)
    monkeypatch.setattr(recorder, "_SHARE", float("inf"))
    kept = []
    recording = recorder.start(keep=lambda one: kept.append((one.ended, sum(site.calls for site in one.sites))))
    for _ in range(3):
        leaf().exp().sum().backward()
    recording.finish("block left")
    leaf().exp().sum().backward()
    assert kept == [("still running", 1), ("still running", 2), ("still running", 3)]
