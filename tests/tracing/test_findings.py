"""What small programs show: which findings, at which level, with which remedy, and where there is none."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import multiback as mb
from multiback import traces
from multiback.report import trace as report
from multiback.tracing import findings


@pytest.fixture
def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def rows(count=6):
    return torch.randn(count, 4)


def told(traced, *levels):
    return [one.code for one in traced.findings if one.level in (levels or ("finding", "likely"))]


def the(traced, code):
    (found,) = (one for one in traced.findings if one.code == code)
    return found


# ---- repeated traversals: to be added up, kept apart, detached, or asked about ----------------


def test_losses_that_add_to_one_grad_are_to_be_added_up(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    with mb.trace() as traced:
        for _ in range(3):
            optimizer.zero_grad()
            hidden = net(rows())
            for number, head in enumerate(heads):
                head(hidden).square().mean().backward(retain_graph=not number)
            optimizer.step()
    assert told(traced) == ["repeated-traversal"]
    assert the(traced, "repeated-traversal").remedy.startswith("All of them add to the same .grad")


def test_slices_whose_grads_are_kept_apart_are_for_jac_and_rows(net):
    output = net(rows())
    with mb.trace() as traced:
        for row in output:
            net.zero_grad()
            row.sum().backward(retain_graph=True)
    assert told(traced, "finding") == ["repeated-traversal", "zero-rows"]
    assert the(traced, "repeated-traversal").remedy.startswith("Gradients are kept apart here")


def weighting(net, output):
    """Two losses weighed by their gradients at the last layer, as adaptive weights are."""
    first, second = output.square().mean(), output.abs().mean()
    one, two = (torch.autograd.grad(loss, net[2].weight, retain_graph=True)[0].norm() for loss in (first, second))
    (first + one / two * second).backward()


def projecting(net, output):
    """Conflicting gradients are projected, for which each is needed by itself."""
    for loss in (output.square().mean(), output.abs().mean()):
        net.zero_grad()
        loss.backward(retain_graph=True)


def along_directions(net, output):
    """Vector-Jacobian products with cotangents of their own."""
    for _ in range(3):
        output.backward(torch.randn_like(output), retain_graph=True)


@pytest.mark.parametrize("use", [weighting, projecting, along_directions])
def test_gradients_that_are_needed_one_by_one_are_asked_about(net, use):
    with mb.trace() as traced:
        use(net, net(rows()))
    assert told(traced, "finding") == []
    assert told(traced, "likely") == ["repeated-traversal"]
    assert the(traced, "repeated-traversal").said.startswith("Are these gradients needed one by one?")


def test_a_loss_that_trains_past_another_step_is_to_be_detached():
    maker, judge = nn.Linear(4, 2), nn.Linear(2, 1)
    for_maker, for_judge = (torch.optim.SGD(one.parameters(), 0.1) for one in (maker, judge))
    with mb.trace() as traced:
        for _ in range(2):
            fake = maker(rows())
            for_judge.zero_grad()
            judge(fake).mean().backward(retain_graph=True)
            for_judge.step()
            for_maker.zero_grad()
            judge(fake).mean().neg().backward()
            for_maker.step()
    found = the(traced, "repeated-traversal")
    assert "`fake` should get fake.detach()" in found.remedy


def test_loops_of_torch_s_own_are_torch_s_affair():
    with mb.trace() as traced:
        torch.autograd.gradcheck(
            lambda one: (one @ one.T).sum(), (torch.rand(3, 3, dtype=torch.float64, requires_grad=True),)
        )
    assert told(traced) == []


# ---- zero rows ---------------------------------------------------------------------------------


def by_features(net):
    for part in net(rows()).chunk(3, dim=1):
        part.square().mean().backward(retain_graph=True)


def a_hinge_that_is_satisfied(net):
    output = net(rows())
    output[0].square().mean().backward(retain_graph=True)
    F.relu(output - 100).sum().backward(retain_graph=True)


def outputs_of_a_recurrent_net(_net):
    outputs, (last, _) = nn.LSTM(4, 3, batch_first=True)(torch.randn(5, 6, 4))
    outputs.square().mean().backward(retain_graph=True)
    last.square().mean().backward()


@pytest.mark.parametrize("use", [by_features, a_hinge_that_is_satisfied, outputs_of_a_recurrent_net])
def test_what_is_no_slice_of_rows_has_no_zero_rows(net, use):
    with mb.trace() as traced:
        use(net)
    assert "zero-rows" not in told(traced)


# ---- needless retain ---------------------------------------------------------------------------


def used_in_a_hook(net):
    hidden = net(rows()).sum()
    hidden.backward(retain_graph=True)
    other = torch.ones(1, requires_grad=True)
    other.register_hook(lambda _: hidden.backward(retain_graph=True))
    (other * 2).sum().backward()


def used_by_a_library(net):
    losses = net(rows()).sum(1)
    losses.sum().backward(retain_graph=True)
    mb.norms(losses, net)


def used_in_another_thread(net):
    loss = net(rows()).sum()
    loss.backward(retain_graph=True)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def failed(net):
    handle = net[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(rows()).sum().backward(retain_graph=True)
    handle.remove()


@pytest.mark.parametrize("use", [used_in_a_hook, used_by_a_library, used_in_another_thread, failed])
def test_a_graph_that_was_used_again_out_of_sight_was_not_kept_for_nothing(net, use):
    with mb.trace() as traced:
        use(net)
        net(rows()).sum().backward()
    assert "needless-retain" not in told(traced)


def test_an_error_before_the_second_use_leaves_it_open_whether_there_was_one(net):
    def between():
        loss = net(rows()).sum()
        loss.backward(retain_graph=True)
        raise ValueError

    with pytest.raises(ValueError), mb.trace() as traced:  # noqa: PT011 - raised above
        between()
    assert told(traced) == []


def test_a_place_whose_graphs_are_used_now_and_then_is_clean(net):
    with mb.trace() as traced:
        for step in range(4):
            loss = net(rows()).sum()
            loss.backward(retain_graph=True)
            if step % 2:
                loss.backward()
    assert "needless-retain" not in told(traced)


# ---- what came before: threads, edits, growth --------------------------------------------------


def test_a_graph_made_in_another_thread_is_not_older_than_a_step(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ThreadPoolExecutor(1) as pool, mb.trace() as traced:
        for _ in range(6):
            loss = pool.submit(lambda: net(rows()).sum()).result()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert told(traced) == []


def test_a_thread_that_begins_later_is_another_one(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def epoch():
        for _ in range(3):
            optimizer.zero_grad()
            net(rows()).sum().backward()
            optimizer.step()

    with mb.trace() as traced:
        for _ in range(3):
            thread = threading.Thread(target=epoch)
            thread.start()
            thread.join()
    assert told(traced) == []


def test_numbers_that_are_none_are_no_edit():
    missing = torch.tensor([1.0, float("nan")], requires_grad=True)
    loss = missing.square().sum()
    with mb.trace() as traced:
        loss.backward(retain_graph=True)
        loss.backward()
    assert "stale-gradient" not in told(traced)


def test_values_that_were_swapped_and_are_back_are_no_edit(net):
    loss = net(rows()).sum()
    with mb.trace() as traced:
        loss.backward(retain_graph=True)
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()
        loss.backward()
    assert "stale-gradient" not in told(traced)


def test_parts_below_the_inputs_of_a_call_are_not_traversed(net):
    """First-order adaptation: weights hang on earlier ones, whose graph the gradient never enters."""
    weights = list(net.parameters())
    with mb.trace() as traced:
        for _ in range(8):
            output = torch.tanh(rows() @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
            gradients = torch.autograd.grad(output.square().mean(), weights)
            weights = [one - 0.1 * gradient for one, gradient in zip(weights, gradients, strict=True)]
    assert told(traced) == []


def opened(state):
    """The tensor of a state, and what makes a state of another one."""
    if isinstance(state, dict):
        return state["h"], lambda hidden: {"h": hidden}
    if isinstance(state, torch.Tensor):
        return state, lambda hidden: hidden
    return state[0], lambda hidden: type(state)([hidden])


@pytest.mark.parametrize(
    ("made", "remedy"),
    [
        (lambda hidden: hidden, "state = state.detach()"),
        (lambda hidden: (hidden,), "state = tuple(one.detach() for one in state)"),
        (lambda hidden: [hidden], "state = [one.detach() for one in state]"),
        (lambda hidden: {"h": hidden}, "state = {key: one.detach() for key, one in state.items()}"),
    ],
)
@pytest.mark.parametrize("mended", [False, True])
def test_the_remedy_for_what_is_carried_over_can_be_pasted(made, remedy, mended):
    cell = nn.GRUCell(4, 5)

    def step(state):
        hidden, again = opened(state)
        return again(cell(rows(), hidden))

    def train():
        state = made(torch.zeros(6, 5))
        for _ in range(8):
            state = step(state)
            opened(state)[0].square().mean().backward(retain_graph=True)
            state = pasted(remedy, state) if mended else state

    with mb.trace() as traced:
        train()
    assert ("growing-graph" in told(traced)) != mended
    if not mended:
        assert f"({remedy}) between steps" in the(traced, "growing-graph").remedy


def pasted(remedy, state):
    scope = {"state": state}
    exec(remedy, scope)
    return scope["state"]


# ---- errors ------------------------------------------------------------------------------------


def test_a_recurrent_state_that_was_freed_is_to_be_detached():
    cell = nn.GRUCell(4, 5)

    def train():
        state = torch.zeros(6, 5)
        for _ in range(3):
            state = cell(rows(), state)
            state.square().mean().backward()

    with mb.trace() as traced, pytest.raises(RuntimeError, match="second time"):
        train()
    assert the(traced, "freed-graph").remedy.startswith("Detach what is carried over (state = state.detach())")


def test_a_sum_that_goes_on_is_to_be_started_anew(net):
    def train():
        total = torch.zeros(())
        for _ in range(2):
            total = total + net(rows()).sum()
            total.backward()

    with mb.trace() as traced, pytest.raises(RuntimeError, match="second time"):
        train()
    assert the(traced, "freed-graph").remedy.startswith("Start `total` anew")


def test_an_edit_in_place_is_looked_for_in_the_file(net, monkeypatch):
    def gated():
        gate = torch.sigmoid(net(rows()))
        gate.add_(1)
        return gate.sum()

    monkeypatch.setattr("multiback.tracing.wrong._FEW", 100)  # this file has some more
    with mb.trace() as traced, pytest.raises(RuntimeError, match="inplace"):
        gated().backward()
    found = the(traced, "changed-in-place")
    assert "gate.add_(1)" in found.said
    assert found.remedy.startswith("Write it out of place")


def test_a_parameter_that_is_updated_by_hand_is_named_with_the_lines_that_may_have_done_it(net):
    def by_hand():
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.9)

    loss = net(rows()).square().sum()
    by_hand()
    with mb.trace() as traced, pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    found = the(traced, "changed-in-place")
    assert found.said.startswith('parameter "')
    assert "parameter.mul_(0.9)" in found.said
    assert "run the forward again" in found.remedy


def test_a_second_grad_on_one_loss_is_to_be_asked_for_with_the_first(net):
    with mb.trace() as traced:
        loss = net(rows()).square().sum()
        torch.autograd.grad(loss, net[0].weight)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, net[2].weight)
    assert the(traced, "freed-graph").remedy.startswith("Ask for everything in one call, torch.autograd.grad")


def test_what_a_module_or_an_object_carries_over_is_named_with_an_edit_that_works(net):
    class Holder:
        state = None

    holder, layer = Holder(), nn.Linear(4, 4)
    holder.state = (torch.zeros(6, 4), torch.zeros(6, 4))
    with mb.trace() as traced:
        for _ in range(8):
            holder.state = (layer(holder.state[0] + rows()), holder.state[1])
            holder.state[0].square().mean().backward(retain_graph=True)
    remedy = the(traced, "growing-graph").remedy
    assert "holder.state = tuple(one.detach() for one in holder.state)" in remedy


def test_the_error_comes_first_and_what_explains_others_stands_alone():
    place = traces.Place("a.py", 1)
    with mb.trace() as traced:
        pass
    record = traced.record
    sums = {"traversals": 9.0, "seconds": 9.0, "repeated": 8.0}
    record.evidence += [
        traces.Evidence(code="repeated-traversal", place=place, sums=sums),
        traces.Evidence(code="stale-gradient", place=place, example={"how": "step", "by": "a.py:2", "leaves": 1}),
        traces.Evidence(code="changed-in-place", place=traces.Place("a.py", 3)),
    ]
    assert [one.code for one in findings.judge(record)] == ["changed-in-place", "stale-gradient"]


# ---- several processes, and how it is shown ----------------------------------------------------


def test_first_calls_of_several_processes_are_not_later_ones():
    place = traces.Place("a.py", 1)
    sites = []
    for _ in range(4):
        site = traces.Site(place=place, kind="backward")
        for seconds in (0.1, 0.001, 0.001):
            site.add(seconds, 0, 1)
        sites.append(site)
    for other in sites[1:]:
        sites[0].merge(other)
    assert sites[0].later_seconds == pytest.approx(0.001)
    assert sites[0].first_seconds == pytest.approx(0.1)


def test_ranks_that_agree_all_the_same_are_clean():
    place = traces.Place("a.py", 1)
    with mb.trace() as traced:
        pass
    evidence = traces.Evidence(
        code="unreduced-ranks", place=place, example={"backwards": 2, "forward": "a.py:1", "difference": 0.0}
    )
    traced.record.evidence.append(evidence)
    assert findings.judge(traced.record) == []


def test_files_of_one_name_are_told_apart_by_their_folders():
    with mb.trace() as traced:
        pass
    for file in ("/work/a/train.py", "/work/b/train.py", "/work/b/other.py"):
        site = traces.Site(place=traces.Place(file, 1), kind="backward")
        site.add(0.1, 0, 1)
        traced.record.sites.append(site)
    (section,) = (one for one in report.build(traced.record).sections if one.title == "Backward calls by site")
    assert [row[0] for row in section.table.rows] == ["a/train.py:1", "b/train.py:1", "other.py:1"]


# ---- no fault, though calls share a graph ------------------------------------------------------


def test_losses_on_layer_after_layer_are_no_carried_state():
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
    with mb.trace() as traced:
        for _ in range(2):
            hidden = rows()
            for number, layer in enumerate(layers):
                hidden = layer(hidden).tanh()
                hidden.square().mean().backward(retain_graph=number < 5)
    assert "growing-graph" not in told(traced)


def test_longer_and_longer_prefixes_are_no_carried_state():
    encoder, cell = nn.Linear(4, 5), nn.RNNCell(5, 5)
    with mb.trace() as traced:
        code = encoder(rows())
        for length in range(1, 8):
            state = torch.zeros(6, 5)
            for _ in range(length):
                state = cell(code, state)
            state.square().mean().backward(retain_graph=length < 7)
    assert "growing-graph" not in told(traced)


def of_other_leaves(net):
    output = net(rows()).square().mean()
    output.backward(inputs=[net[0].weight], retain_graph=True)
    output.backward(inputs=[net[2].weight])


def clipped_in_between(net):
    output = net(rows())
    output.square().mean().backward(retain_graph=True)
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    output.abs().mean().backward()


@pytest.mark.parametrize("use", [of_other_leaves, clipped_in_between])
def test_what_a_sum_would_not_give_is_asked_about(net, use):
    with mb.trace() as traced:
        use(net)
    assert told(traced, "finding") == []
    assert told(traced, "likely") == ["repeated-traversal"]


def test_a_kept_graph_that_is_used_once_in_a_while_was_not_kept_for_nothing(net, monkeypatch):
    monkeypatch.setattr("multiback.tracing.recorder.Recording._spares", lambda _: False)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with mb.trace() as traced:
        for step in range(200):
            optimizer.zero_grad()
            loss = net(rows()).square().mean()
            loss.backward(retain_graph=True)
            if step == 150:
                torch.autograd.grad(loss, net[0].weight)
            optimizer.step()
    assert "needless-retain" not in told(traced)
