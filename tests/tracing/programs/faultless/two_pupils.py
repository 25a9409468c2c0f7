"""Two models that never meet: both backwards first, then both steps."""

import torch
from torch import nn

torch.manual_seed(224)
torch.set_num_threads(1)

pupils = [nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 1)) for width in (8, 32)]
optimisers = [torch.optim.SGD(pupil.parameters(), lr=0.05) for pupil in pupils]

for _step in range(10):
    rows = torch.randn(16, 5)
    wanted = rows.max(1, keepdim=True).values
    first = (pupils[0](rows) - wanted).square().mean()
    second = (pupils[1](rows) - wanted).abs().mean()
    for optimiser in optimisers:
        optimiser.zero_grad()
    first.backward()
    second.backward()
    for optimiser in optimisers:
        optimiser.step()

print("weights", repr(sum(p.double().sum() for pupil in pupils for p in pupil.parameters()).item()))
