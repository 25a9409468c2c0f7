"""The graph reader counts what hand arithmetic counts, and runs nothing."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from multiback import graph

FLOAT = 4


def test_saved_bytes_of_a_small_net_equal_the_hand_count():
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    data = torch.rand(7, 3)
    facts = graph.read([net(data).sum()], parameters=list(net.parameters()), inputs=[data])
    # relu keeps its result [7, 5], which the second linear shares; the first linear keeps the data;
    # the second one's weight is needed for the gradient of its input
    assert facts.saved_bytes == 7 * 5 * FLOAT
    assert facts.input_bytes == 7 * 3 * FLOAT
    assert facts.parameter_bytes == 5 * 2 * FLOAT
    assert {leaf.shape for leaf in facts.leaves} == {p.shape for p in net.parameters()}
    assert facts.freed == ()


def test_a_chain_has_a_node_per_operation_and_one_per_leaf():
    leaf = torch.rand(3, requires_grad=True)
    assert graph.read([leaf.exp().sin().sum()]).nodes == 4


def test_a_storage_that_several_nodes_and_views_share_is_counted_once_and_whole():
    leaf = torch.rand(4, requires_grad=True)
    middle = leaf.exp()
    first, second = middle[:2], middle[2:]
    facts = graph.read([(first * second).sum()])
    assert facts.saved_bytes == 4 * FLOAT


def test_a_leaf_as_root_is_one_node():
    facts = graph.read([torch.rand(3, requires_grad=True)])
    assert (facts.nodes, facts.saved_bytes) == (1, 0)


def test_a_tensor_without_graph_has_no_nodes():
    assert graph.read([torch.rand(3)]).nodes == 0


def test_parameters_of_each_graph_are_found_once_even_when_reused():
    linear = nn.Linear(3, 3)
    assert len(graph.read([linear(linear(torch.rand(2, 3))).sum()]).leaves) == 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value.exp(), None)
        return value * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


LEAF = torch.rand(3, requires_grad=True)
FREED = {
    "a plain tensor": (lambda: LEAF.exp().sum(), "ExpBackward0"),
    "a list of tensors": (lambda: torch.stack([LEAF, LEAF]).prod(), "ProdBackward0"),
    "an index": (lambda: LEAF[torch.tensor([0, 1])].exp().sum(), "IndexBackward0"),
    "a custom function": (lambda: Doubled.apply(LEAF).sum(), "DoubledBackward"),
}


@pytest.mark.parametrize("case", FREED)
def test_freed_nodes_are_named_after_a_backward_and_not_before(case):
    build, name = FREED[case]
    loss = build()
    assert graph.read([loss]).freed == ()
    loss.backward()
    facts = graph.read([loss])
    assert name in facts.freed
    assert facts.saved_bytes == 0


def test_a_retained_graph_is_not_freed():
    loss = LEAF.exp().sum()
    before = graph.read([loss])
    loss.backward(retain_graph=True)
    assert graph.read([loss]) == before


def test_values_behind_saved_tensor_hooks_are_named_and_never_unpacked():
    calls = []

    def run(value):
        calls.append(1)
        return (value * value).exp()

    loss = checkpoint(run, LEAF, use_reentrant=False).sum()
    facts = graph.read([loss])
    assert set(facts.unreadable) == {"ExpBackward0", "MulBackward0"}
    assert len(calls) == 1


def test_values_saved_on_the_host_are_named_too():
    with torch.autograd.graph.save_on_cpu():
        loss = (LEAF * LEAF).sum()
    assert graph.read([loss]).unreadable == ("MulBackward0",)


def test_reading_runs_no_backward_and_leaves_the_graph_usable():
    leaf = torch.rand(3, requires_grad=True)
    loss = leaf.exp().sum()
    graph.read([loss])
    assert leaf.grad is None
    loss.backward()
    assert leaf.grad is not None
