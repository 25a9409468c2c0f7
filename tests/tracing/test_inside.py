"""Recording in process: what it sees, that it leaves nothing behind, and that its faults stay its own."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

import multiback as mb
from multiback import showing, traces
from multiback.errors import RecordError
from multiback.report import trace as report
from multiback.tracing import findings, observer, recorder
from zoo import one_thread


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def codes(traced):
    return [finding.code for finding in traced.findings if finding.level == "finding"]


def patched():
    return (
        torch.autograd._engine_run_backward,
        nn.parallel.DistributedDataParallel.forward,
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
    )


def test_a_site_has_calls_seconds_and_the_index_on_its_graph(net):
    output = net(torch.randn(6, 4))
    with mb.trace() as traced:
        for row in output:
            row.sum().backward(retain_graph=True)
    (site,) = traced.sites
    assert (site.calls, site.kind, site.retaining_calls) == (6, "backward", 6)
    assert [one.calls for one in site.by_index] == [1, 1, 1, 1, 1, 1, 0, 0]
    assert site.place.file == __file__
    assert sum(site.histogram) == 6
    assert site.accumulating_calls == 5
    assert codes(traced) == ["repeated-traversal", "zero-rows"]


def test_nothing_stays_patched_and_traces_nest(net):
    before = patched()
    with mb.trace() as outer:
        net(torch.randn(6, 4)).sum().backward()
        with mb.trace() as inner:
            net(torch.randn(6, 4)).sum().backward()
        net(torch.randn(6, 4)).sum().backward()
    assert patched() == before
    assert sum(site.calls for site in outer.sites) == 3
    assert sum(site.calls for site in inner.sites) == 1


def test_traces_that_end_in_another_order_leave_the_engine_working(net):
    first, second = recorder.start(), recorder.start()
    first.finish("early")
    net(torch.randn(6, 4)).sum().backward()
    assert sum(site.calls for site in second.finish("late").sites) == 1
    net.zero_grad()
    net(torch.randn(6, 4)).sum().backward()
    assert net[0].weight.grad is not None


def test_no_graph_is_kept_alive(net):
    gc.disable()
    try:
        with mb.trace():
            hidden = net[0](torch.randn(6, 4))
            seen = weakref.ref(hidden)
            net[2](net[1](hidden)).sum().backward(retain_graph=True)
            del hidden
            assert seen() is None
    finally:
        gc.enable()


def test_a_fault_of_the_recorder_s_own_is_told_and_breaks_nothing(net, monkeypatch):
    def fail(*_arguments):
        raise ZeroDivisionError("of ours")

    for name in ("before", "after", "before_step"):
        monkeypatch.setattr(observer.Observer, name, fail)
        net.zero_grad()
        with mb.trace() as traced:
            net(torch.randn(6, 4)).sum().backward()
            torch.optim.SGD(net.parameters(), 0.1).step()
        assert net[0].weight.grad is not None
        assert any("ZeroDivisionError: of ours" in fault for fault in traced.record.faults)
        assert "The recorder failed here" in str(traced)
        monkeypatch.undo()


def test_errors_of_the_program_come_through_unchanged(net):
    class Mine(Exception):
        pass

    def fail(_gradient):
        raise Mine

    output = net(torch.randn(6, 4))
    output.register_hook(fail)
    with pytest.raises(Mine), mb.trace() as traced:
        output.sum().backward()
    assert traced.sites[0].errors == 1


def test_memory_is_bounded_however_many_calls_there_are():
    weight = torch.ones(2, requires_grad=True)
    with mb.trace() as traced:
        for _ in range(3000):
            weight.grad = None
            (weight * 2).sum().backward()
    record = traces.encode(traced.record)
    assert len(record) < 20_000
    assert traced.sites[0].calls == 3000


def test_threads_are_recorded_side_by_side():
    def work():
        own = nn.Linear(3, 2)
        for _ in range(20):
            own(torch.ones(4, 3)).sum().backward()

    with mb.trace() as traced:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(site.calls for site in traced.sites) == 80
    assert traced.record.faults == []
    assert codes(traced) == []


def test_multiback_s_own_calls_are_no_fault_of_the_program_s(net):
    x = torch.randn(6, 4)
    with mb.trace() as traced:
        mb.jac(net(x).square().sum(1), net, method="loop")
        mb.rows(net(x).square().sum(1), net)
        cut = mb.cut(net, x, batch_size=3)
        cut.grads_of([cut.value[0].sum(), cut.value[0:2].sum()], wrt=net)
    assert codes(traced) == []


def test_recording_stops_after_max_steps_and_the_program_goes_on(net):
    recording = recorder.start(max_steps=2)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(5):
        net(torch.randn(6, 4)).sum().backward()
        optimiser.step()
    record = recording.finish("later")
    assert (record.ended, record.steps, record.sites[0].calls) == ("stopped recording", 2, 2)


def test_autograd_s_errors_are_explained_and_stay_runtime_errors(net):
    output = net(torch.randn(6, 4))
    output.sum().backward()
    with pytest.raises(mb.ExplainedError, match=r"second time.* `output`") as caught, mb.explained():
        output.sum().backward()
    assert isinstance(caught.value, RuntimeError)
    assert "second time" in str(caught.value.__cause__)


def test_a_change_in_place_is_explained_by_the_step_that_made_it(net):
    optimiser = torch.optim.SGD(net.parameters(), 0.1)

    @mb.explained()
    def wrong():
        output = net(torch.randn(6, 4))
        output.sum().backward(retain_graph=True)
        optimiser.step()
        output.sum().backward()

    with pytest.raises(mb.ExplainedError, match=r'parameter "2\.weight" of Sequential.*step at test_inside\.py:\d+'):
        wrong()


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="mine") as caught, mb.explained():
        raise RuntimeError("mine")
    assert type(caught.value) is RuntimeError


def test_the_report_and_show_tell_the_same(net, tmp_path):
    with mb.trace() as traced:
        net(torch.randn(6, 4)).sum().backward(retain_graph=True)
    path = tmp_path / "record.json"
    path.write_bytes(traces.encode(traced.record))
    shown = showing.read(path)
    assert shown.document == report.build(traced.record)
    assert "needless-retain at test_inside.py" in str(traced)
    assert traces.decode(shown.json.encode(), "here") == traced.record
    empty = report.build_errors(traced.record)
    assert empty.advice.startswith("nothing")


def test_a_record_that_is_damaged_or_of_another_version_is_refused(tmp_path):
    path = tmp_path / "record.json"
    path.write_text('{"schema": "multiback.trace/1"}')
    with pytest.raises(RecordError, match=r"the record is damaged.*Trace the program again"):
        showing.read(path)
    with mb.trace() as traced:
        pass
    path.write_bytes(traces.encode(traced.record).replace(b"trace/1", b"trace/9"))
    with pytest.raises(RecordError, match=r"schema must be 'multiback\.trace/1'; got 'multiback\.trace/9'"):
        showing.read(path)
    with pytest.raises(RecordError, match="cannot be read"):
        traces.load(tmp_path / "none.json")


def test_records_of_several_processes_are_one_and_ranks_are_compared(net):
    records = []
    for value in (1.0, 3.0):
        with mb.trace() as traced:
            net(torch.randn(6, 4)).sum().backward(retain_graph=True)
        place = traced.sites[0].place
        traced.record.evidence.append(
            traces.Evidence(code="unreduced-ranks", place=place, example={"backwards": 2, "forward": "a.py:1"})
        )
        traced.record.checksums[str(place)] = value
        records.append(traced.record)
    merged = traces.merged(records)
    merged.findings = findings.judge(merged)
    assert merged.processes == 2
    assert merged.sites[0].calls == 2
    (said,) = (one.said for one in merged.findings if one.code == "unreduced-ranks")
    assert "They differed by 67% here" in said


def test_kept_graphs_are_followed_for_whole_steps_and_the_saving_is_of_all(net, monkeypatch):
    monkeypatch.setattr(recorder.Recording, "_spares", lambda _: False)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with mb.trace() as traced:
        for _ in range(100):
            optimizer.zero_grad()
            hidden = net(torch.randn(6, 4))
            for power in (1, 2, 3):
                (hidden**power).sum().backward(retain_graph=power < 3)
            optimizer.step()
    (site,) = traced.sites
    assert site.calls == 300
    assert site.walked_calls == 66  # the first 64, and those that finish their graph
    assert site.accumulating_calls == 200
    (found,) = (one for one in traced.findings if one.code == "repeated-traversal")
    assert found.count == 100
    assert "300 calls traversed 100 kept graphs" in found.said
    assert found.seconds < site.seconds
    assert codes(traced) == ["repeated-traversal"]


@pytest.mark.parametrize(
    ("seconds", "cold"),
    [
        ([0.1579] + [0.12] * 99, True),  # slower than all of many
        ([0.1579] + [0.12] * 98 + [0.1793], False),
        ([0.1579] + [0.12] * 4, False),
        ([0.02] + [0.005] * 2, True),
        ([0.002] + [0.001] * 99, False),
    ],
)
def test_a_cold_start_is_a_first_call_that_stands_out(seconds, cold):
    first, other = (traces.Site(place=traces.Place("a.py", line), kind="backward") for line in (1, 2))
    for one in seconds:
        first.add(0.001, 0, 1)
        other.add(one, 0, 1)
    with mb.trace() as traced:
        pass
    traced.record.sites += [first, other]
    found = {one.place.line: one for one in findings.judge(traced.record) if one.code == "cold-start"}
    assert (2 in found) == cold
    assert found[1].remedy == "No cold start shows here."


def test_notes_need_more_than_one_call_and_a_cause():
    place = traces.Place("a.py", 1)
    site = traces.Site(place=place, kind="backward")
    for seconds, faults in ((0.1, 50_000), (0.01, 10_000), (0.01, 10_000)):
        site.add(seconds, faults, 1)
    with mb.trace() as traced:
        pass
    traced.record.sites.append(site)
    assert [one.code for one in findings.judge(traced.record)] == ["cold-start", "page-fault-bound"]
