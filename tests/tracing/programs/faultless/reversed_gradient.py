"""Domain adaptation: a function that turns the gradient round, so that one backward serves both opponents."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(245)
torch.set_num_threads(1)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, strength):
        ctx.strength = strength
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


features = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
kind, domain = nn.Linear(16, 3), nn.Linear(16, 2)
nets = nn.ModuleList([features, kind, domain])
optimiser = torch.optim.SGD(nets.parameters(), lr=0.1)

for step in range(10):
    source, target = torch.randn(12, 6), torch.randn(12, 6) + 0.5
    shared = features(torch.cat([source, target]))
    domains = torch.tensor([0] * 12 + [1] * 12)
    loss = F.cross_entropy(kind(shared[:12]), source[:, :3].argmax(1))
    loss = loss + F.cross_entropy(domain(Reverse.apply(shared, step / 10)), domains)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in nets.parameters()).item()))
