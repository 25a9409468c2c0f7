"""A hinge loss that most rows satisfy, above rectified units that are mostly off: zeros everywhere, and no fault."""

import torch
from torch import nn

torch.manual_seed(236)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
with torch.no_grad():
    model[0].bias.fill_(-2.5)
    model[2].bias.fill_(0.9)
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
for _step in range(10):
    rows = torch.randn(40, 6)
    signs = torch.where(rows[:, :1] > -1.5, 1.0, -1.0)
    loss = torch.relu(1 - 2 * signs * model(rows)).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
