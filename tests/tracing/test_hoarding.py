"""Graphs that grow where no backward goes: what names hold, looked at by those who ask for it."""

import collections
import os
import signal
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import multiback as mb
from multiback import traces
from multiback.tracing import hoarding, looks, observer
from zoo import one_thread

STEPS = 24
EARLIER: list[torch.Tensor] = []


@pytest.fixture(scope="module", autouse=True)
def _single_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _every_call_is_looked_at_and_little_is_worth_a_word(monkeypatch):
    monkeypatch.setattr(hoarding, "_LEAST_BYTES", 2**14)
    monkeypatch.setattr(observer, "_LOOKING_FREELY", float("inf"))  # however slow the machine
    monkeypatch.setattr(observer, "_LOOKED_AT_CALLS", 10 * STEPS)
    EARLIER.clear()


@pytest.fixture
def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class Meter:
    def __init__(self):
        self.sum, self.values = 0.0, []

    def update(self, value):
        self.sum = self.sum + value  # HERE meter


class Centred(nn.Module):
    def __init__(self, detach):
        super().__init__()
        self.inner, self._detach = nn.Linear(6, 6), detach
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, rows):
        out = self.inner(rows)
        now = out.detach() if self._detach else out
        self.mean = 0.9 * self.mean + 0.1 * now.mean(0)  # HERE buffer
        return out


def losses_of(net):
    for _ in range(STEPS):
        loss = net(torch.randn(4, 6)).square().mean()
        loss.backward()
        yield loss


def summed(net, kept):
    total = 0
    for loss in losses_of(net):
        total += kept(loss)  # HERE summed


def summed_anew(net, kept):
    total = torch.zeros(())
    for loss in losses_of(net):
        total = kept(loss) + total  # HERE summed_anew


def listed(net, kept):
    values = []
    for loss in losses_of(net):
        values.append(kept(loss))  # HERE listed


def listed_with_others(net, kept):
    rows = []
    for number, loss in enumerate(losses_of(net)):
        rows.append((number, {"loss": kept(loss)}))  # HERE listed_with_others


def by_step(net, kept):
    values = {}
    for number, loss in enumerate(losses_of(net)):
        values[number] = kept(loss)  # HERE by_step


def in_a_dict_of_lists(net, kept):
    values = {"loss": [], "step": []}
    for number, loss in enumerate(losses_of(net)):
        values["step"].append(number)
        values["loss"].append(kept(loss))  # HERE in_a_dict_of_lists


def written_into(net, kept):
    values = torch.zeros(STEPS)
    for number, loss in enumerate(losses_of(net)):
        values[number] = kept(loss)  # HERE written_into


def in_a_meter(net, kept):
    meter = Meter()
    for loss in losses_of(net):
        meter.update(kept(loss))
    assert meter.sum > 0


def in_a_global(net, kept):
    for loss in losses_of(net):
        EARLIER.append(kept(loss))  # HERE in_a_global


def in_a_closure(net, kept):
    values = []

    def note(loss):
        values.append(kept(loss))  # HERE in_a_closure

    for _ in range(STEPS):
        loss = net(torch.randn(4, 6)).square().mean()
        loss.backward()
        note(loss)
    return values


def in_sums_by_name(net, kept):
    sums = collections.defaultdict(float)
    for loss in losses_of(net):
        sums["loss"] += kept(loss)  # HERE in_sums_by_name


def in_a_namespace(net, kept):
    state = SimpleNamespace(total=0.0)
    for loss in losses_of(net):
        state.total += kept(loss)  # HERE in_a_namespace


def by_places_in_a_table(net, kept):
    table = collections.OrderedDict()
    for number, loss in enumerate(losses_of(net)):
        table[0, number] = kept(loss)  # HERE by_places_in_a_table


def beside_others_of_the_name(net, kept):
    losses, meter, other = [], Meter(), ValueMeter()

    def unlike():
        losses = []
        losses.append(net(torch.ones(4, 6)).sum().item())
        return losses

    for loss in losses_of(net):
        losses.append(kept(loss))  # HERE beside_others_of_the_name
        other.update(loss)
    unlike()
    meter.sum += 1


def while_in_eval_mode(net, kept):
    total = 0
    net.eval()
    for loss in losses_of(net):
        total += kept(loss)  # HERE while_in_eval_mode
    net.train()


class ValueMeter:
    def __init__(self):
        self.sum = 0.0

    def update(self, value):
        self.sum += value.item()


HOARDS = {
    in_sums_by_name: ("in_sums_by_name", "sums['loss']"), in_a_namespace: ("in_a_namespace", "state.total"),
    by_places_in_a_table: ("by_places_in_a_table", "table"), while_in_eval_mode: ("while_in_eval_mode", "total"),
    beside_others_of_the_name: ("beside_others_of_the_name", "losses"),
    summed: ("summed", "total"), summed_anew: ("summed_anew", "total"), listed: ("listed", "values"),
    listed_with_others: ("listed_with_others", "rows"), by_step: ("by_step", "values"),
    in_a_dict_of_lists: ("in_a_dict_of_lists", "values['loss']"), written_into: ("written_into", "values"),
    in_a_meter: ("meter", "meter.sum"), in_a_global: ("in_a_global", "EARLIER"),
    in_a_closure: ("in_a_closure", "values"),
}  # fmt: skip


def growing(traced):
    assert traced.record.faults == []
    return [one for one in traced.findings if one.code == "growing-graph"]


def line_of(mark):
    with open(__file__) as stream:
        (found,) = (number for number, line in enumerate(stream, 1) if line.endswith(f"# HERE {mark}\n"))
    return found


@pytest.mark.parametrize(
    ("hoard", "mark", "name"), [(one, *there) for one, there in HOARDS.items()], ids=[one.__name__ for one in HOARDS]
)
def test_what_holds_graphs_that_were_freed_is_named_with_the_line_that_adds_to_it(net, hoard, mark, name):
    with mb.trace(sample_locals=True) as traced:
        hoard(net, lambda loss: loss)
    (found,) = growing(traced)
    assert (found.level, found.place.line) == ("finding", line_of(mark))
    assert f"`{name}` held more at each of" in found.said
    assert "freed" in found.said
    assert found.bytes >= 2**14
    assert "no_grad" not in found.remedy


@pytest.mark.parametrize("hoard", HOARDS, ids=lambda hoard: hoard.__name__)
def test_values_alone_are_no_hoard_and_nothing_is_looked_at_unasked(net, hoard):
    with mb.trace(sample_locals=True) as traced:
        hoard(net, torch.Tensor.detach)
    assert growing(traced) == []
    with mb.trace() as traced:
        hoard(net, lambda loss: loss)
    assert growing(traced) == []


@pytest.mark.parametrize("detach", [False, True])
def test_a_buffer_made_of_outputs_is_a_hoard_until_they_are_detached(detach):
    model = Centred(detach)
    outer = SimpleNamespace(model=nn.ModuleDict({"part": nn.Sequential(model)}))  # however deep
    trained = outer.model
    with mb.trace(sample_locals=True) as traced:
        for _ in range(STEPS):
            trained["part"](torch.randn(4, 6)).square().mean().backward()
    found = growing(traced)
    assert [one.place.line for one in found] == ([] if detach else [line_of("buffer")])
    if found:
        assert ".mean` held more" in found[0].said


def test_what_a_backward_never_goes_through_is_told_at_the_end_where_an_end_was_reached(net):
    def collect():
        kept = torch.zeros(())
        for loss in losses_of(net):
            kept = kept + net(torch.randn(4, 6)).mean()  # HERE collect
            del loss
        return kept

    with mb.trace(sample_locals=True) as traced:
        collect()
    (found,) = growing(traced)
    assert found.place.line == line_of("collect")
    assert "no backward has been through" in found.said
    assert "torch.no_grad()" in found.remedy

    def collect_in_vain():
        raise KeyError(collect())

    with pytest.raises(KeyError), mb.trace(sample_locals=True) as traced:  # it might have been gone through yet
        collect_in_vain()
    assert growing(traced) == []
    with mb.trace(sample_locals=True) as traced:
        collect().backward()
    assert growing(traced) == []


def policy(net):
    """Log probabilities of an episode, gone through at its end; another loss is trained on meanwhile."""
    for _ in range(3):
        episode = []
        for loss in losses_of(net):
            episode.append(net(torch.randn(1, 6)).mean())
            del loss
        torch.stack(episode).mean().backward()


def meta(net):
    """Losses of inner steps, whose gradients keep a graph; the sum is gone through once."""
    inner = []
    for _ in range(STEPS):
        loss = net(torch.randn(4, 6)).square().mean()
        inner.append(
            loss + sum(g.square().sum() for g in torch.autograd.grad(loss, net.parameters(), create_graph=True))
        )
    sum(inner).backward()


def windowed(net):
    """The last few losses, for a mean."""
    last, ring = collections.deque(maxlen=5), []
    for loss in losses_of(net):
        last.append(loss)
        ring = [*ring[-4:], loss]


def windowed_by_step(net):
    """Some of the last in a dict, of which the oldest goes."""
    last = {}
    for number, loss in enumerate(losses_of(net)):
        last[number] = loss
        last.pop(number - 6, None)


def written_out(net):
    """Losses that are written out and begun anew now and then, and averaged by step."""
    pending, step = [], []
    for number, loss in enumerate(losses_of(net)):
        pending.append(loss)
        step = [loss] if number % 6 == 0 else [*step, loss]
        if len(pending) == 9:
            pending.clear()


def popped(net):
    """The last twelve, by append and pop."""
    last = []
    for loss in losses_of(net):
        last.append(loss)
        if len(last) > 12:
            last.pop(0)


def freed_below(net):
    """Losses of a head on a trunk that its own loss has been through, gone through later for the head."""
    head, auxiliary = nn.Linear(1, 1), []
    for _ in range(STEPS):
        output = net(torch.randn(4, 6))
        auxiliary.append(head(output).square().mean())
        output.square().mean().backward()
    torch.autograd.grad(sum(auxiliary), head.parameters())


def in_a_learner(net):
    """An episode that another thread goes through."""
    episode = []
    for loss in losses_of(net):
        episode.append(net(torch.randn(1, 6)).mean())
        del loss
    thread = threading.Thread(target=lambda: torch.stack(episode).mean().backward())
    thread.start()
    thread.join()


def added_at_the_common_line(net):
    """Auxiliary losses that wait long, and then go into a loss of the common line."""
    waiting = torch.zeros(())
    for number in range(3 * STEPS):
        waiting = waiting + net(torch.randn(1, 6)).mean()
        loss = net(torch.randn(4, 6)).square().mean()
        if number == 3 * STEPS - 1:
            loss = loss + waiting
        loss.backward()


def by_the_engine_itself(net):
    """A sum that the engine is asked to go through by another name."""
    waiting = torch.zeros(())
    for loss in losses_of(net):
        waiting = waiting + net(torch.randn(1, 6)).mean()
        del loss
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((waiting,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def carried(net):
    """A state that is detached at every step, and a graph that all steps share."""
    state, shared = torch.zeros(4, 1), net(torch.randn(4, 6))
    for _ in range(STEPS):
        state = net(torch.randn(4, 6)) + 0.5 * state.detach() + 0 * shared.detach()
        state.square().mean().backward()
    shared.sum().backward()


def accumulated(net):
    """Losses of micro-batches, added up and gone through together."""
    for _ in range(4):
        total = torch.zeros(())
        for _ in range(STEPS):
            total = total + net(torch.randn(2, 6)).square().mean()
        total.backward()


def gone_elsewhere(net):
    """A list that is handed on, cleared, and gone through from where it went."""
    episode, taken = [], []
    for loss in losses_of(net):
        episode.append(net(torch.randn(1, 6)).mean())
        del loss
    taken += episode
    episode.clear()
    for loss in losses_of(net):
        del loss
    sum(taken).backward()


@pytest.mark.parametrize(
    "program",
    [
        policy,
        meta,
        windowed,
        windowed_by_step,
        written_out,
        popped,
        freed_below,
        in_a_learner,
        added_at_the_common_line,
        by_the_engine_itself,
        carried,
        accumulated,
        gone_elsewhere,
    ],
    ids=lambda p: p.__name__,
)
def test_what_is_gone_through_or_does_not_grow_is_no_hoard(net, program):
    with mb.trace(sample_locals=True) as traced:
        program(net)
    assert growing(traced) == []


def test_little_is_not_worth_a_word(net, monkeypatch):
    monkeypatch.undo()
    with mb.trace(sample_locals=True) as traced:
        summed(net, lambda loss: loss)
    assert growing(traced) == []


def test_a_loop_in_another_thread_is_looked_at_at_its_calls(net):
    def run():
        with mb.trace(sample_locals=True) as traced:
            summed(net, lambda loss: loss)
        told.append(traced)

    told = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (traced,) = told
    assert [one.place.line for one in growing(traced)] == [line_of("summed")]
    assert any("did not begin in the main thread" in text for text in traced.record.unobserved)


# ---- looks between calls -----------------------------------------------------------------------


def test_looks_end_with_the_recording_and_nothing_of_them_stays():
    handlers = [signal.getsignal(number) for number in range(1, signal.NSIG)]
    threads = threading.active_count()
    with mb.trace(sample_locals=True), mb.trace(sample_locals=True):
        assert [signal.getsignal(number) for number in range(1, signal.NSIG)] != handlers
        assert threading.active_count() == threads
    assert [signal.getsignal(number) for number in range(1, signal.NSIG)] == handlers


def wait_for(happened):
    import time

    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_another_handler_raises_during_a_look_reaches_the_program():
    class Raised(Exception):
        pass

    def raise_it(_number, _frame):
        raise Raised

    seen = []

    def look(frame):
        seen.append(frame)
        os.kill(os.getpid(), signal.SIGUSR1)
        return 0.0

    before = signal.signal(signal.SIGUSR1, raise_it)
    watching = looks.Looks(look)
    assert watching.start()
    try:
        with pytest.raises(Raised):
            wait_for(lambda: False)
        with pytest.raises(Raised):  # and there are further looks
            wait_for(lambda: False)
    finally:
        watching.stop()
        signal.signal(signal.SIGUSR1, before)
    assert all(frame is not None for frame in seen)


def test_without_an_unused_signal_there_are_no_looks_between_calls(net, monkeypatch):
    monkeypatch.setattr(looks.signal, "getsignal", lambda number: print)
    with mb.trace(sample_locals=True) as traced:
        summed(net, lambda loss: loss)
    assert len(growing(traced)) == 1
    assert any("between calls" in text for text in traced.record.unobserved)


VALIDATION = """
import time
import torch
from torch import nn

torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

def validate():
    total, until = torch.zeros(()), time.monotonic() + 4
    while time.monotonic() < until:
        with torch.set_grad_enabled({grad}):
            total = total + net(torch.rand(64, 64)).square().mean()  # HERE
        time.sleep(0.005)
    return total.item() > 0

print(validate())
"""


@pytest.mark.parametrize("grad", [True, False])
def test_a_validation_that_keeps_every_graph_is_seen_without_any_backward(tmp_path, grad):
    program = tmp_path / "validate.py"
    program.write_text(textwrap.dedent(VALIDATION).format(grad=grad))
    command = [sys.executable, "-c", "from multiback.cli import main; main()", "trace", "--sample-locals"]
    record = tmp_path / "record.json"
    done = subprocess.run(
        [*command, "--output", str(record), str(program)], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "True\n")
    found = traces.load(record)
    assert found.faults == []
    line = next(number for number, text in enumerate(program.read_text().splitlines(), 1) if "# HERE" in text)
    assert [(one.code, one.place.line) for one in found.findings] == ([("growing-graph", line)] if grad else [])
    assert ("What to do: nothing" in done.stderr) != grad


# ---- that looks change nothing -----------------------------------------------------------------


def looked_at(seconds=0.6, busy=None):
    """Looks at this function's caller for a while; how many there were, and what the caller's names held after it."""
    import time

    begun, count = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        count += 1
        if busy is not None:
            busy()
    return count


@pytest.mark.parametrize("how", ["settrace", "setprofile"])
def test_names_of_a_function_that_is_traced_or_profiled_stay(how, net):
    import time

    def spend(_frame, _event, _given):
        time.sleep(0.002)

    def program():
        total, until = 0, time.monotonic() + 0.8
        while time.monotonic() < until:
            total += len(str(total))
        return total > 0 and until > 0

    before = sys.gettrace() if how == "settrace" else sys.getprofile()
    with mb.trace(sample_locals=True) as traced:
        getattr(sys, how)(spend)
        try:
            done = program()
        finally:
            getattr(sys, how)(before)
    assert done
    assert traced.record.faults == []


def test_a_time_limit_that_takes_its_handler_away_is_not_lost_in_a_look():
    big = {number: number for number in range(1000)}

    def on_alarm(_number, _frame):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        raise TimeoutError

    def look(frame):
        os.kill(os.getpid(), signal.SIGALRM)
        return 0.0 * len(big) if frame else 0.0

    with mb.trace(sample_locals=True) as traced:
        recording = traced._recording
        observer, recording._observer.look = recording._observer, look
        signal.signal(signal.SIGALRM, on_alarm)
        with pytest.raises(TimeoutError):
            looked_at(5)
        del observer.look
    assert traced.record.faults == []


def test_a_look_close_to_the_limit_of_recursion_is_given_up():
    def deep():
        try:
            return deep()
        except RecursionError:
            return looked_at(0.5)

    with mb.trace(sample_locals=True):
        assert deep() > 0


def test_a_view_whose_base_was_written_to_is_not_asked_for_its_node():
    from multiback.tracing.places import maker_of

    base = torch.ones(3, requires_grad=True) * 2
    view, apart = base[:], base * 1
    assert maker_of(view) is view.grad_fn
    base.mul_(3)
    assert maker_of(view) is None
    assert maker_of(apart) is apart.grad_fn


def test_code_that_shows_locals_is_left_alone_and_a_method_of_that_name_is_not():
    from multiback.tracing.places import LOCALS_APART, may_look

    def shows():
        return locals()

    def shows_frames():
        return sys._getframe().f_locals

    def evaluates(model):
        return model.eval()

    assert may_look(evaluates.__code__)
    assert may_look(shows.__code__) == may_look(shows_frames.__code__) == LOCALS_APART


def test_looking_runs_no_code_of_the_program(net):
    ran = []

    class Meta(type):
        def __eq__(cls, other):
            ran.append("metaclass eq")
            return type.__eq__(cls, other)

        def __hash__(cls):
            ran.append("metaclass hash")
            return type.__hash__(cls)

    class Odd(metaclass=Meta):
        @property
        def __dict__(self):
            ran.append("dict")
            return {}

        def __getattribute__(self, name):
            ran.append(name)
            return object.__getattribute__(self, name)

    class Key:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            ran.append("key eq")
            return self is other

    class Own(torch.Tensor):
        @property
        def grad_fn(self):
            ran.append("grad_fn")
            return None

    held = [Odd(), {Key(): Odd(), 1: Odd()}, torch.ones(2).as_subclass(Own), (Odd(),)]
    ran.clear()
    with mb.trace(sample_locals=True) as traced:
        summed(net, torch.Tensor.detach)
    assert ran == []
    assert traced.record.faults == []
    assert len(held) == 4


def test_a_class_that_was_looked_at_can_go(net):
    import gc
    import weakref

    def program():
        class Local:
            def __init__(self):
                self.total = 0.0

        one = Local()
        for loss in losses_of(net):
            one.total += loss
        return weakref.ref(Local), weakref.ref(one)

    with mb.trace(sample_locals=True) as traced:
        refs = program()
    del traced
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_names_that_have_gone_make_room(net, monkeypatch):
    monkeypatch.setattr(hoarding, "_MOST_NAMES", 64)
    with mb.trace(sample_locals=True) as traced:
        for number in range(20):
            table = {f"request {number} {part}": torch.ones(2, requires_grad=True) * 2 for part in range(20)}
            net(torch.randn(2, 6)).sum().backward()
        del table
        summed(net, lambda loss: loss)
    assert [one.place.line for one in growing(traced)] == [line_of("summed")]


def test_every_call_that_adds_to_a_grad_counts_however_many_heads_there_are(net):
    heads = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    optimizer = torch.optim.SGD([*net.parameters(), *heads.parameters()], 1e-3)
    with mb.trace() as traced:
        for _ in range(50):
            optimizer.zero_grad()
            output = net(torch.randn(4, 6))
            for head in heads:
                head(output).square().mean().backward(retain_graph=True)
            optimizer.step()
    (site,) = traced.sites
    assert (site.calls, site.accumulating_calls) == (200, 150)
