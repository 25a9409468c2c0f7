"""Accumulation over micro-batches of unequal length, where each mean loss counts by its share of the rows."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(202)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
rows = torch.randn(50, 6)
wanted = rows.cos().sum(1, keepdim=True)

for _epoch in range(6):
    optimiser.zero_grad()
    for part, target in zip(rows.split(16), wanted.split(16), strict=True):
        share = len(part) / len(rows)
        (F.mse_loss(model(part), target) * share).backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
