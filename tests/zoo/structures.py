"""Models whose quirk is how tensors are led through them: views, sharing, several inputs and outputs."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo.cases import BATCH, Net, Pen, weight

PEN = Pen()


def mlp(first, hidden, last):
    return nn.Sequential(nn.Linear(first, hidden), nn.GELU(), nn.Linear(hidden, last))


def views():
    def forward(net, x):
        x = net.a(x).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)
        return net.b(x.unflatten(1, (4, 2)).permute(0, 2, 1).flatten(1).unsqueeze(0).squeeze(0))

    return Net(forward, a=nn.Linear(5, 8), b=nn.Linear(8, 3))


def chunked_and_expanded():
    def forward(net, x):
        left, right = net.a(x).chunk(2, dim=1)
        return net.b((left * right.sigmoid())[:, None, :].expand(-1, 3, -1)) * torch.arange(1.0, 4.0)[:, None]

    return Net(forward, a=nn.Linear(5, 8), b=nn.Linear(4, 3))


def split_and_stacked():
    def forward(net, x):
        parts = net.a(x).split([2, 3, 3], dim=1)
        return net.b(torch.stack([parts[1].tanh(), parts[2], F.pad(parts[0], (1, 0))], 1)).flip(1).roll(1, 2)

    return Net(forward, a=nn.Linear(5, 8), b=nn.Linear(3, 3))


def used_twice():
    return Net(lambda net, x: net.a(net.a(x).tanh()), a=nn.Linear(5, 5))


def siamese():
    def forward(net, x):
        left, right = net.a(x[:, 0]).tanh(), net.a(x[:, 1]).tanh()
        return torch.cat([left, right, (left - right) ** 2], 1)

    return Net(forward, a=nn.Linear(5, 4))


def several_inputs():
    def of_three(net, x, factor, side):
        return net.b(torch.cat([net.a(x) * factor, net.side(side)], 1).tanh())

    inner = Net(of_three, a=nn.Linear(5, 4), side=nn.Linear(2, 4), b=nn.Linear(8, 3))
    return Net(lambda net, x: net.inner(x, 0.5, side=net.extra), inner=inner, extra=torch.randn(BATCH, 2))


def several_outputs():
    def forward(net, x):
        x = net.a(x).tanh()
        return net.b(x), net.c(x).exp(), x

    return Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3), c=nn.Linear(4, 2))


def dict_output():
    def forward(net, x):
        x = net.a(x).tanh()
        return {"class": net.b(x), "box": {"corner": net.c(x), "size": F.softplus(net.c(x))}}

    return Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3), c=nn.Linear(4, 2))


def residual():
    def forward(net, x):
        x = net.a(x)
        for block in net.blocks:
            x = x + block(x)
        return net.b(x)

    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), *mlp(6, 8, 6)) for _ in range(3))
    return Net(forward, a=nn.Linear(5, 6), blocks=blocks, b=nn.Linear(6, 2))


def accumulated_in_place():
    def forward(net, x):
        x = net.a(x)
        x += net.b(x.tanh())
        x[:, 0] *= 2
        return x.mul_(0.5).add_(net.c(x.detach().sin()))

    return Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))


def written_into_a_buffer():
    def forward(net, x):
        out = x.new_zeros(len(x), 6)
        out[:, :3] = net.a(x)
        out[:, 3:] = net.b(x).sin()
        return out

    return Net(forward, a=nn.Linear(5, 3), b=nn.Linear(5, 3))


def detached_branch():
    def forward(net, x):
        x = net.a(x).tanh()
        with torch.no_grad():
            gate = net.b(x).sigmoid()
        return x * gate + net.c(x.detach())

    return Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))


def experts():
    def forward(net, x):
        chance, best = net.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(net.experts):
            where = (best == number).nonzero().squeeze(1)
            out = out.index_add(0, where, expert(x[where]) * chance[where, None])
        return out

    return Net(forward, router=nn.Linear(5, 3), experts=nn.ModuleList(mlp(5, 6, 3) for _ in range(3)))


def ragged():
    def forward(net, x):
        row = torch.arange(BATCH).repeat_interleave(net.lengths)
        packed = x[torch.arange(x.shape[1]) < net.lengths[:, None]]
        return net.b(x.new_zeros(BATCH, 4).index_add(0, row, net.a(packed).tanh()) / net.lengths[:, None])

    return Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3), lengths=torch.tensor([3, 1, 4, 2]))


def gathered():
    def forward(net, x):
        x = net.a(x)
        order = x.detach().argsort(1)
        return net.b(x.gather(1, order) + x.sort(1).values.cumsum(1) + x.topk(2, 1).values.sum(1, keepdim=True))

    return Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 3))


def where_and_clamp():
    def forward(net, x):
        x = net.a(x)
        return net.b(torch.where(x > 0, x.sin(), x.exp()).clamp(-0.8, 0.8) * torch.maximum(x, x.roll(1, 1)))

    return Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 3))


def unused():
    return Net(lambda net, x: net.a(x).tanh(), a=nn.Linear(5, 4), spare=nn.Linear(5, 4))


def used_in_one_row():
    def forward(net, x):
        x = net.a(x).tanh()
        return torch.cat([net.b(x[:1]), x[1:]])

    return Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 4))


def row_by_row():
    return Net(
        lambda net, x: torch.stack([net.b(net.a(row).tanh()) for row in x]), a=nn.Linear(5, 4), b=nn.Linear(4, 3)
    )


def graph_network():
    def forward(net, x):
        for layer in (net.a, net.b):
            x = (net.adjacency @ layer(x)).tanh()
        return net.c(x.mean(1))

    adjacency = (torch.rand(4, 4) > 0.4).float()
    return Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 3), adjacency=adjacency)


def mixer():
    def forward(net, x):
        x = x + net.across(x.mT).mT
        return net.head((x + net.along(x)).mean(1))

    return Net(forward, across=mlp(4, 8, 4), along=mlp(5, 8, 5), head=nn.Linear(5, 3))


def autoencoder():
    def forward(net, x):
        mean, spread = net.encoder(x).chunk(2, 1)
        return net.decoder(mean + spread.exp() * torch.randn(mean.shape)), mean, spread

    return Net(forward, encoder=nn.Linear(5, 6), decoder=nn.Linear(3, 5))


PEN.add("views and reshapes", (5,), views)
PEN.add("chunked and expanded", (5,), chunked_and_expanded)
PEN.add("split, padded and stacked", (5,), split_and_stacked)
PEN.add("a linear used twice", (5,), used_twice, "reused")
PEN.add("siamese towers", (2, 5), siamese, "reused")
PEN.add("several inputs", (5,), several_inputs)
PEN.add("several outputs", (5,), several_outputs)
PEN.add("dict output", (5,), dict_output, "reused")
PEN.add("no parameters", (5,), lambda: Net(lambda _, x: x.sin() * x.sum(1, keepdim=True)), "no parameters")
PEN.add("residual net", (5,), residual)
PEN.add("accumulated in place", (5,), accumulated_in_place)
PEN.add("written into slices", (5,), written_into_a_buffer)
PEN.add("detached branch", (5,), detached_branch, "unused")
PEN.add("mixture of experts, top-1", (5,), experts, "routing")
PEN.add("ragged sequences", (4, 5), ragged, "ragged")
PEN.add("gathered and sorted", (5,), gathered)
PEN.add("where and clamp", (5,), where_and_clamp)
PEN.add("unused parameter", (5,), unused, "unused")
PEN.add("a layer for one row only", (5,), used_in_one_row, "routing")
PEN.add("row by row", (5,), row_by_row, "reused")
PEN.add("graph network", (4, 5), graph_network)
PEN.add("mixer", (4, 5), mixer)
PEN.add("variational autoencoder", (5,), autoencoder, "random")
PEN.add(
    "buffer in the forward", (5,), lambda: Net(lambda net, x: net.a(x) @ net.m, a=nn.Linear(5, 4), m=torch.randn(4, 3))
)
PEN.add("sine features", (2,), lambda: Net(lambda net, x: net.a((x @ net.f).sin()), a=nn.Linear(6, 3), f=weight(2, 6)))
