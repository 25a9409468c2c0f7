"""Training under bfloat16 autocast."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(210)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _step in range(10):
    rows = torch.randn(16, 12)
    optimiser.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(rows), rows[:, :4].argmax(1))
    loss.backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
