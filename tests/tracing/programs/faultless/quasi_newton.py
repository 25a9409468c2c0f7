"""LBFGS: its step evaluates a closure, and with it a backward, many times, and moves the weights in between."""

import torch
from torch import nn

torch.manual_seed(214)
torch.set_num_threads(1)

points = torch.linspace(-2, 2, 40).unsqueeze(1)
values = torch.sin(3 * points) * torch.exp(-points.square())
model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
optimiser = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=8, line_search_fn="strong_wolfe")


def closure():
    optimiser.zero_grad()
    loss = (model(points) - values).square().mean()
    loss.backward()
    return loss


for _round in range(4):
    optimiser.step(closure)

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
