"""A training loop that sums its losses as numbers."""

import torch
from torch import nn

torch.manual_seed(71)
torch.set_num_threads(1)


def epoch(model, optimiser, batches):
    total = 0.0
    for rows, wanted in batches:
        optimiser.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(rows), wanted)
        loss.backward()
        optimiser.step()
        total += loss.item()
    return total / len(batches)


model = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 3))
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
batches = [(rows, rows[:, :3] * rows[:, 3:6]) for rows in torch.randn(6, 32, 12)]
means = [epoch(model, optimiser, batches) for _ in range(4)]
print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()), means)
