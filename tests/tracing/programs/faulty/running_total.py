"""A training loop that sums its losses as tensors, and keeps every graph so that nothing complains."""

import torch
from torch import nn

torch.manual_seed(71)
torch.set_num_threads(1)


def epoch(model, optimiser, batches):
    total = torch.zeros(())
    for rows, wanted in batches:
        optimiser.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(rows), wanted)
        loss.backward(retain_graph=True)  # HERE needless-retain
        optimiser.step()
        total = total + loss
    return (total / len(batches)).item()


model = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 3))
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
batches = [(rows, rows[:, :3] * rows[:, 3:6]) for rows in torch.randn(6, 32, 12)]
means = [epoch(model, optimiser, batches) for _ in range(4)]
print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()), means)
