"""An evaluation after every epoch, in inference mode; the best weights are put back at the end."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(215)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 2))
optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 5)
rows = torch.randn(96, 8)
labels = (rows[:, 0] * rows[:, 1] > 0).long()
best, kept = float("inf"), None

for _epoch in range(5):
    model.train()
    for part, wanted in zip(rows[:64].split(16), labels[:64].split(16), strict=True):
        optimiser.zero_grad()
        F.cross_entropy(model(part), wanted).backward()
        optimiser.step()
    scheduler.step()
    model.eval()
    with torch.inference_mode():
        loss = float(F.cross_entropy(model(rows[64:]), labels[64:]))
    if loss < best:
        best, kept = loss, copy.deepcopy(model.state_dict())
model.load_state_dict(kept)

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()), best)
