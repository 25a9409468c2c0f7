"""A linear map fitted to several targets in turn: nothing saves its weight, so a step in between raises nothing."""

import torch
from torch import nn

torch.manual_seed(23)
torch.set_num_threads(1)

layer = nn.Linear(5, 4)
optimiser = torch.optim.SGD(layer.parameters(), lr=0.3)
inputs = torch.randn(64, 5)
targets = [torch.randn(64, 4) for _ in range(3)]

for _epoch in range(5):
    outputs = layer(inputs)
    for target in targets:
        optimiser.zero_grad()
        loss = (outputs - target).square().mean()
        loss.backward(retain_graph=True)  # HERE stale-gradient
        optimiser.step()

print("weights", repr(sum(p.double().sum() for p in layer.parameters()).item()))
