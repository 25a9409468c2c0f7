"""Layers in a row: perceptrons, activations, embeddings, and layers that lack something usual."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo.cases import BATCH, Net, Pen, tokens, weight

PEN = Pen()


def perceptron(activation=nn.Tanh, *, bias=True):
    return nn.Sequential(nn.Linear(5, 8, bias=bias), activation(), nn.Linear(8, 3, bias=bias))


def deep():
    layers = [layer for _ in range(10) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 2))


def partly_frozen():
    model = perceptron()
    model[0].requires_grad_(False)
    return model


def tied():
    def forward(net, x):
        return F.linear(net.hidden(net.embedding(x)).tanh(), net.embedding.weight)

    return Net(forward, embedding=nn.Embedding(11, 6), hidden=nn.Linear(6, 6))


def column_major():
    model = perceptron()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def looked_up(**options):
    return lambda: nn.Sequential(nn.Embedding(11, 6, **options), nn.Linear(6, 3), nn.Tanh())


def bag(mode, **options):
    return lambda: nn.Sequential(nn.EmbeddingBag(11, 6, mode=mode, **options), nn.Tanh(), nn.Linear(6, 3))


def with_padding():
    return torch.cat([torch.randint(1, 11, (BATCH, 4)), torch.zeros(BATCH, 1, dtype=torch.long)], 1)


def often_the_same():
    return torch.tensor([[1, 1, 2], [1, 3, 3], [4, 5, 6], [1, 2, 6]])


PEN.add("mlp", (5,), perceptron)
PEN.add("deep mlp", (6,), deep)
PEN.add("one linear layer", (5,), lambda: nn.Linear(5, 3))
PEN.add("linear without bias", (5,), lambda: perceptron(bias=False))
PEN.add("linear with one output", (5,), lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)))
PEN.add("output of shape [B]", (5,), lambda: Net(lambda net, x: net.a(x).sigmoid().squeeze(1), a=nn.Linear(5, 1)))
PEN.add("linear over a sequence", (4, 5), perceptron)
PEN.add("linear over two extra dimensions", (2, 3, 5), perceptron)
PEN.add("in-place relu", (5,), lambda: perceptron(lambda: nn.ReLU(inplace=True)))
for activation in (nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.LeakyReLU, nn.Hardswish, nn.Mish, nn.LogSigmoid):
    PEN.add(activation.__name__.lower(), (5,), lambda kind=activation: perceptron(kind))
PEN.add("in-place silu over a sequence", (3, 5), lambda: perceptron(lambda: nn.SiLU(inplace=True)))
PEN.add("prelu with one slope per channel", (5,), lambda: perceptron(lambda: nn.PReLU(8)))
PEN.add("gated linear unit", (5,), lambda: nn.Sequential(nn.Linear(5, 8), nn.GLU(), nn.Linear(4, 3)))
PEN.add("softmax over features", (5,), lambda: nn.Sequential(nn.Linear(5, 4), nn.Softmax(1), nn.Linear(4, 3)))
PEN.add("log-softmax", (5,), lambda: nn.Sequential(nn.Linear(5, 4), nn.LogSoftmax(1)))
PEN.add("frozen part", (5,), partly_frozen, "frozen")
PEN.add("column-major weight", (5,), column_major)
PEN.add("non-contiguous input", lambda: torch.randn(5, BATCH).t(), perceptron)
PEN.add("strided input", lambda: torch.randn(BATCH, 10)[:, ::2], perceptron)
PEN.add("embedding", tokens(4), looked_up(), "embedding")
PEN.add("embedding with padding", with_padding, looked_up(padding_idx=0), "embedding")
PEN.add("embedding scaled by frequency", often_the_same, looked_up(scale_grad_by_freq=True), "embedding", "frequency")
PEN.add("sparse embedding", tokens(4), looked_up(sparse=True), "embedding", "sparse")
PEN.add("embedding bag, mean", tokens(4), bag("mean"), "embedding")
PEN.add("embedding bag, sum", tokens(4), bag("sum"), "embedding")
PEN.add("embedding bag, max", tokens(4), bag("max"), "embedding")
PEN.add("sparse embedding bag", tokens(4), bag("sum", sparse=True), "embedding", "sparse")
PEN.add("tied weights", tokens(3), tied, "embedding", "tied")
PEN.add(
    "weight looked up by index", tokens(3), lambda: Net(lambda net, x: net.w[x].tanh(), w=weight(11, 4)), "embedding"
)
PEN.add(
    "one-hot times weight",
    tokens(3),
    lambda: Net(lambda net, x: F.one_hot(x, 11).to(net.w.dtype) @ net.w, w=weight(11, 4)),
)
