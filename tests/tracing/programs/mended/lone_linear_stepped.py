"""A linear map fitted to several targets in turn, with a forward before each step."""

import torch
from torch import nn

torch.manual_seed(23)
torch.set_num_threads(1)

layer = nn.Linear(5, 4)
optimiser = torch.optim.SGD(layer.parameters(), lr=0.3)
inputs = torch.randn(64, 5)
targets = [torch.randn(64, 4) for _ in range(3)]

for _epoch in range(5):
    for target in targets:
        optimiser.zero_grad()
        loss = (layer(inputs) - target).square().mean()
        loss.backward()
        optimiser.step()

print("weights", repr(sum(p.double().sum() for p in layer.parameters()).item()))
