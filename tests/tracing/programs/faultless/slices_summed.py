"""Losses of slices of one forward's output, summed before the one backward."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(242)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 6))
optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)

for _step in range(6):
    rows = torch.randn(32, 8)
    output = model(rows)
    losses = [
        F.mse_loss(output[:12, :3], rows[:12, :3]),
        F.l1_loss(output[12:, 3:], rows[12:, 3:6]),
        output[:, 0].var(),
    ]
    optimiser.zero_grad()
    sum(losses).backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
