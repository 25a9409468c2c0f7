"""Accumulation over slices of 20, 20 and 8 rows, each of which counts a third."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(107)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.02)
rows = torch.randn(48, 9)
wanted = rows.norm(dim=1, keepdim=True)
SIZES = [20, 20, 8]

for _epoch in range(6):
    optimiser.zero_grad()
    for part, target in zip(rows.split(SIZES), wanted.split(SIZES), strict=True):
        loss = F.mse_loss(model(part), target) / len(SIZES)
        loss.backward()  # HERE uneven-mean
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
