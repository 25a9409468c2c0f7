"""A deep narrow net with clipped gradients, where steps of too large a norm are left out."""

import torch
from torch import nn

torch.manual_seed(222)
torch.set_num_threads(1)

model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
skipped = 0
for _step in range(15):
    rows = torch.randn(10, 6)
    loss = (model(rows) - rows.sum(1, keepdim=True)).square().sum()
    optimiser.zero_grad(set_to_none=False)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if norm > 20:
        skipped += 1
        continue
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()), skipped)
