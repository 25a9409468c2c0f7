"""Ways to write a product with a weight or a sum with a bias, other than nn.Linear."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo.cases import BATCH, Net, Pen, weight

PEN = Pen()


def added(*shape):
    """A bias of some shape, added between two layers."""
    return lambda: Net(
        lambda net, x: net.b((net.a(x) + net.bias).tanh()),
        a=nn.Linear(5, 6, bias=False),
        bias=weight(*shape),
        b=nn.Linear(6, 3),
    )


def scaled(*shape):
    """A scale of some shape, multiplied on between two layers."""
    return lambda: Net(
        lambda net, x: net.b((net.a(x) * net.scale).tanh()),
        a=nn.Linear(5, 6),
        scale=weight(*shape),
        b=nn.Linear(6, 3),
    )


def product(function, *shape):
    """A function of the input, a weight and a bias, between nothing and a tanh layer."""
    return lambda: Net(
        lambda net, x: net.b(function(x, net.w, net.bias).tanh()), w=weight(*shape), bias=weight(6), b=nn.Linear(6, 3)
    )


def class_token():
    def forward(net, x):
        x = torch.cat([net.token.expand(len(x), -1, -1), net.a(x)], 1) + net.position
        return net.b(x.softmax(1)[:, 0])

    return Net(forward, token=weight(1, 1, 6), a=nn.Linear(5, 6), position=weight(1, 5, 6), b=nn.Linear(6, 3))


def looked_up_position():
    def forward(net, x):
        return net.a(x + net.position(torch.arange(x.shape[1]))).tanh()

    return Net(forward, position=nn.Embedding(4, 5), a=nn.Linear(5, 3))


def low_rank():
    def forward(net, x):
        return net.frozen(x).tanh() + (x @ net.down) @ net.up * 0.5

    return Net(forward, frozen=nn.Linear(5, 6).requires_grad_(False), down=weight(5, 2), up=weight(2, 6))


def hypernetwork():
    def forward(net, x):
        w = net.a(x).view(-1, 3, 5)
        return torch.bmm(w, x.unsqueeze(2)).squeeze(2)

    return Net(forward, a=nn.Linear(5, 15))


def weight_of_weights():
    return Net(
        lambda net, x: F.linear(x, net.left @ net.right, net.bias.cumsum(0)).tanh(),
        left=weight(4, 2),
        right=weight(2, 5),
        bias=weight(4),
    )


def regularised():
    return Net(lambda net, x: net.b(net.a(x).tanh()), a=nn.Linear(5, 4), b=nn.Linear(4, 3))


def regularised_losses(net, output):
    return output.square().mean(1) + 0.1 * net.a.weight.square().sum() + 0.1 * net.b.weight.abs().sum()


def heads_by_baddbmm():
    def forward(net, x):
        heads = x.unflatten(2, (2, 3)).permute(2, 0, 1, 3).flatten(1, 2)
        out = torch.baddbmm(net.bias, heads, net.w, beta=0.5, alpha=2)
        return out.unflatten(1, (BATCH, -1)).transpose(0, 1).tanh()

    return Net(forward, w=weight(2, 3, 4), bias=weight(2, 1, 4))


PEN.add("addmm", (5,), product(lambda x, w, bias: torch.addmm(bias, x, w), 5, 6))
PEN.add("addmm of a transposed weight", (5,), product(lambda x, w, bias: torch.addmm(bias, x, w.t()), 6, 5))
PEN.add("addmm with alpha and beta", (5,), product(lambda x, w, b: torch.addmm(b, x, w, alpha=0.5, beta=2), 5, 6))
PEN.add("mm", (5,), product(lambda x, w, bias: torch.mm(x, w) + bias, 5, 6))
PEN.add("x @ w", (5,), product(lambda x, w, bias: x @ w + bias, 5, 6))
PEN.add("w @ x.t()", (5,), product(lambda x, w, bias: (w @ x.t()).t() + bias, 6, 5))
PEN.add("matmul on 3-d", (4, 5), product(lambda x, w, bias: torch.matmul(x, w) + bias, 5, 6))
PEN.add("matmul on 4-d", (2, 3, 5), product(lambda x, w, bias: x @ w + bias, 5, 6))
PEN.add("matmul with a stack of weights", (2, 3, 5), product(lambda x, w, bias: x @ w + bias, 2, 5, 6))
PEN.add("matmul with a vector", (6, 5), product(lambda x, w, bias: x @ w + bias, 5))
PEN.add("w @ x on 3-d", (5, 6), product(lambda x, w, bias: w @ x + bias, 3, 5))
PEN.add("einsum", (5,), product(lambda x, w, bias: torch.einsum("bi,io->bo", x, w) + bias, 5, 6))
PEN.add("einsum over a sequence", (4, 5), product(lambda x, w, bias: torch.einsum("bti,oi->bto", x, w) + bias, 6, 5))
PEN.add("einsum over heads", (2, 5), product(lambda x, w, bias: torch.einsum("bhi,hio->bho", x, w) + bias, 2, 5, 6))
PEN.add("tensordot", (2, 5), product(lambda x, w, bias: torch.tensordot(x, w, dims=2) + bias, 2, 5, 6))
PEN.add("product and sum by hand", (5,), product(lambda x, w, bias: (x[:, :, None] * w).sum(1) + bias, 5, 6))
PEN.add("slices of one weight", (5,), product(lambda x, w, bias: x @ w[:5] + x.sin() @ w[5:] + bias, 10, 6))
PEN.add("one weight used both ways", (6,), product(lambda x, w, bias: (x @ w).tanh() @ w.t() + bias, 6, 6), "reused")
PEN.add("baddbmm over heads", (4, 6), heads_by_baddbmm)
PEN.add("bmm with weights of the row", (5,), hypernetwork)
PEN.add(
    "bilinear",
    (5,),
    lambda: Net(lambda net, x: net.b(net.a(x), x).tanh(), a=nn.Linear(5, 4), b=nn.Bilinear(4, 5, 3)),
)
PEN.add("distances to centres", (5,), lambda: Net(lambda net, x: torch.cdist(x, net.centres), centres=weight(4, 5)))
PEN.add("weight made of weights", (5,), weight_of_weights)
PEN.add("low-rank adapter", (5,), low_rank, "frozen")
PEN.add("regulariser in the loss", (5,), regularised, "regulariser", losses=regularised_losses)
PEN.add("bias of shape [D]", (4, 5), added(6))
PEN.add("bias of shape [1, D]", (5,), added(1, 6))
PEN.add("bias of shape [1]", (5,), added(1))
PEN.add("bias of shape [T, 1]", (4, 5), added(4, 1))
PEN.add("scalar bias", (5,), added())
PEN.add("bias of the full output shape", (5,), added(BATCH, 6), "row parameter")
PEN.add("position added", (4, 5), added(4, 6))
PEN.add("position looked up", (4, 5), looked_up_position, "embedding")
PEN.add("class token", (4, 5), class_token)
PEN.add("scale of shape [D]", (4, 5), scaled(6))
PEN.add("scale of shape [1, D]", (5,), scaled(1, 6))
PEN.add("scale of shape [1]", (5,), scaled(1))
PEN.add("scalar parameter", (5,), scaled())
