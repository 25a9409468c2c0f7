"""A cut over two ranks gives what one process would over all rows; an error on one rank ends the call on both."""

import functools
import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

import multiback as mb
from multiback.errors import OptionError

COUNTS = (5, 7)
WORLD = "world"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def rows():
    torch.manual_seed(1)
    return torch.randn(sum(COUNTS), 4)


def own(rank):
    """This rank's rows of all."""
    start = sum(COUNTS[:rank])
    return range(start, start + COUNTS[rank])


def contrastive(embedded, mine):
    """The loss of some rows against all rows, summed."""
    normed = F.normalize(embedded, dim=1)
    labels = torch.arange(mine.start, mine.stop)
    return F.cross_entropy(normed[mine.start : mine.stop] @ normed.T / 0.2, labels, reduction="sum")


def whole():
    """What one process gives: gradients of parameters and data, of the sum of the ranks' losses."""
    model, data = net(), rows().requires_grad_()
    output = model(data)
    loss = sum(contrastive(output, own(rank)) for rank in range(len(COUNTS)))
    return torch.autograd.grad(loss, [*model.parameters(), data])


def work(check, rank, folder, results):
    """One rank: join the group, run the check, tell how it went."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(COUNTS))
    try:
        check(rank)
        results.put((rank, ""))
    except BaseException as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
        raise
    finally:
        distributed.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path):
    """Runs a check on every rank; what each said, by rank."""

    def run(check):
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        ranks = [
            context.Process(target=work, args=(check, rank, str(tmp_path), results)) for rank in range(len(COUNTS))
        ]
        for one in ranks:
            one.start()
        said = dict(results.get(timeout=120) for _ in ranks)
        for one in ranks:
            one.join(60)
        return [said[rank] for rank in range(len(COUNTS))]

    return run


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def trains_and_answers(rank):
    model, mine = net(), own(rank)
    data = rows()[mine.start : mine.stop]
    *parameters, of_data = whole()
    cut = mb.cut(model, data, batch_size=3, keep="recompute", group=distributed.group.WORLD)
    assert (cut.rows, cut.num_rows, cut.value.shape) == (mine, sum(COUNTS), (sum(COUNTS), 3))
    close([cut.value.detach()], [net()(rows()).detach()])

    found = cut.grad_of(contrastive(cut.value, mine))
    assert found.rows.tolist() == list(mine)
    assert found.num_rows == sum(COUNTS)
    close([found.values], [of_data[mine.start : mine.stop]])
    close(cut.grad_of(contrastive(cut.value, mine), wrt=model).values(), parameters)
    assert all(one.grad is None for one in model.parameters())

    for times in (1, 2):  # adds to what is there
        contrastive(cut.value, mine).backward()
        cut.backward()
        close([one.grad for one in model.parameters()], [times * one for one in parameters])

    with mb.cut(model, data, batch_size=3, group=distributed.group.WORLD) as cut:
        model.zero_grad()
        if rank == 0:  # the whole loss on one rank alone
            sum(contrastive(cut.value, own(one)) for one in range(len(COUNTS))).backward()
    close([one.grad for one in model.parameters()], parameters)


def uses_parameters_above_the_cut(rank):
    model, mine, head = net(), own(rank), nn.Linear(3, 1)
    with torch.no_grad():
        head.weight.fill_(0.5)
    cut = mb.cut(model, rows()[mine.start : mine.stop], group=distributed.group.WORLD)
    found = cut.grad_of(head(cut.value[mine.start : mine.stop]).square().sum(), wrt=[head.weight, model[0].weight])
    reference = net()
    expected = torch.autograd.grad(head(reference(rows())).square().sum(), [head.weight, reference[0].weight])
    close(found, expected)


def fails_on_one_rank(rank):
    model, mine = net(), own(rank)
    cut = mb.cut(model, rows()[mine.start : mine.stop], group=distributed.group.WORLD)
    contrastive(cut.value, mine).backward()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    if rank == 1:
        with torch.no_grad():
            model[0].bias.add_(1)
    with pytest.raises(mb.StaleForwardError if rank == 1 else mb.RequestError, match="has changed since inference"):
        cut.backward()
    assert model[0].weight.grad.eq(1).all()
    assert model[2].weight.grad is None
    with pytest.raises(mb.RequestError, match="must not follow one"):
        cut.backward()


def leaves_the_block_on_one_rank(rank):
    expected = ZeroDivisionError if rank == 0 else mb.RequestError
    mine = own(rank)

    def block():
        with mb.cut(net(), rows()[mine.start : mine.stop], group=distributed.group.WORLD) as cut:
            contrastive(cut.value / rank if rank else cut.value, mine).backward()
            assert 1 // rank == 1

    with pytest.raises(expected):
        block()


def has_no_loss(rank):
    mine = own(rank)
    cut = mb.cut(net(), rows()[mine.start : mine.stop], group=distributed.group.WORLD)
    with pytest.raises(mb.RequestError, match="must follow a loss on"):
        cut.backward()


def gives_other_shapes(rank):
    model = nn.Linear(4, 2 + rank)
    with pytest.raises(mb.RequestError, match="must give outputs of the same shapes"):
        mb.cut(model, torch.randn(3, 4), group=distributed.group.WORLD)


def meets_leaves_in_another_order(rank):
    torch.manual_seed(0)
    one, two = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    first, second = (one, two) if rank else (two, one)
    with pytest.raises(mb.RequestError, match="must run the same parameters on every rank"):
        mb.cut(lambda given: (given @ first).tanh() @ second, rows()[:6], group=distributed.group.WORLD)
    cut = mb.cut(lambda given: (given @ one).tanh() @ two, rows()[:6], group=distributed.group.WORLD)
    cut.value[6 * rank].sum().backward()
    cut.backward()
    expected = torch.autograd.grad(2 * ((rows()[:1] @ one).tanh() @ two).sum(), [one, two])
    close([one.grad, two.grad], expected)


def gives_data_with_a_graph(rank):
    data = rows()[list(own(rank))]
    if rank:
        data = nn.Linear(4, 4)(data)
    with pytest.raises(mb.RequestError, match="data: must have no graph of their own" if rank else "on every rank"):
        mb.cut(net(), data, group=distributed.group.WORLD)


@pytest.mark.parametrize(
    "check",
    [
        trains_and_answers,
        uses_parameters_above_the_cut,
        fails_on_one_rank,
        leaves_the_block_on_one_rank,
        has_no_loss,
        gives_other_shapes,
        meets_leaves_in_another_order,
        gives_data_with_a_graph,
    ],
    ids=lambda check: check.__name__,
)
def test_over_two_ranks(check, on_ranks):
    assert on_ranks(functools.partial(check)) == ["", ""]


def test_a_group_needs_torch_distributed():
    with pytest.raises(OptionError, match="which is not initialised here"):
        mb.cut(net(), rows(), group=WORLD)


def test_a_group_goes_with_a_model():
    with pytest.raises(OptionError, match="group: must go with a model and its data"):
        mb.cut(net()(rows()), group=WORLD)
