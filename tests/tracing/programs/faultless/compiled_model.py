"""Training of a compiled model, its graph captured and its backward made ahead of time."""

import torch
from torch import nn

torch.manual_seed(218)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2))
compiled = torch.compile(model, backend="aot_eager")
optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
for _step in range(6):
    rows = torch.randn(20, 6)
    optimiser.zero_grad()
    loss = nn.functional.mse_loss(compiled(rows), rows[:, :2])
    loss.backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
