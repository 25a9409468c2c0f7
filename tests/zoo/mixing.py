"""Models in which rows of the batch touch each other, or are not where their losses are."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo.cases import BATCH, Net, Pen

PEN = Pen()


def mlp(function):
    """A function of what a layer gives for the whole batch, and a layer on top."""
    return lambda: Net(lambda net, x: net.b(function(net.a(x))), a=nn.Linear(5, 6), b=nn.Linear(6, 3))


def encoder():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def contrastive_losses(_, output):
    left, right = F.normalize(output, dim=1).chunk(2, 1)
    return F.cross_entropy(left @ right.t() / 0.5, torch.arange(BATCH), reduction="none")


def attention_over_batch():
    layer = nn.MultiheadAttention(4, 2)
    return Net(lambda net, x: net.layer(*[net.a(x)] * 3, need_weights=False)[0], a=nn.Linear(5, 4), layer=layer)


def shared_context():
    """Rows that share a mean which no gradient passes through."""

    def forward(net, x):
        return net.a(x - x.detach().mean(0)).tanh()

    return Net(forward, a=nn.Linear(5, 4))


PEN.add("softmax over the batch", (5,), mlp(lambda x: x.softmax(0)), "vanishing", independent=False)
PEN.add("batch mean subtracted", (5,), mlp(lambda x: (x - x.mean(0)).tanh()), "vanishing", independent=False)
PEN.add("rows summed up to here", (5,), mlp(lambda x: x.cumsum(0).tanh()), independent=False)
PEN.add("rows rolled and added", (5,), mlp(lambda x: x.sin() + x.roll(1, 0)), independent=False)
PEN.add("rows times their products", (5,), mlp(lambda x: (x @ x.t()).softmax(1) @ x), independent=False)
PEN.add("attention over the batch", (5,), attention_over_batch, "attention", independent=False)
PEN.add("contrastive loss", (5,), encoder, losses=contrastive_losses, independent=False)
PEN.add("permuted batch", (5,), mlp(lambda x: x[[2, 0, 3, 1]].tanh()), "permuted")
PEN.add("flipped batch", (5,), mlp(lambda x: x.flip(0).tanh()), "permuted")
PEN.add("batch mean subtracted, detached", (5,), shared_context)
