"""Sharpness-aware steps whose second loss is made of the output from before the climb."""

import torch
from torch import nn

torch.manual_seed(53)
torch.set_num_threads(1)

RADIUS = 0.05
model = nn.Sequential(nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 1))
parameters = list(model.parameters())
optimiser = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
criterion = nn.MSELoss()


def climb():
    """Move the weights uphill by the radius and return how far each went."""
    length = torch.stack([p.grad.norm() for p in parameters]).norm()
    ways = [RADIUS * p.grad / length for p in parameters]
    with torch.no_grad():
        for parameter, way in zip(parameters, ways, strict=True):
            parameter.add_(way)
    return ways


def descend(ways):
    with torch.no_grad():
        for parameter, way in zip(parameters, ways, strict=True):
            parameter.sub_(way)


for step in range(5):
    x = torch.randn(30, 7)
    y = x.prod(1, keepdim=True)

    output = model(x)
    optimiser.zero_grad()
    criterion(output, y).backward()
    flat = [p.grad.clone() for p in parameters]
    ways = climb()
    optimiser.zero_grad()
    try:
        criterion(output, y).backward()  # HERE freed-graph
    except RuntimeError as error:
        print(f"step {step} is a plain one: {str(error)[:60]}")
        for parameter, gradient in zip(parameters, flat, strict=True):
            parameter.grad = gradient
    descend(ways)
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in parameters).item()))
