"""Gradients of equal micro-batches gathered in `.grad` before each step."""

import torch
from torch import nn

torch.manual_seed(201)
torch.set_num_threads(1)

MICRO = 4
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()

optimiser.zero_grad()
for count in range(1, 25):
    rows = torch.randn(8, 10)
    loss = criterion(model(rows), rows[:, :4].argmax(1)) / MICRO
    loss.backward()
    if count % MICRO == 0:
        optimiser.step()
        optimiser.zero_grad()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
