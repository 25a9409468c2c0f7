"""A step from two kinds of data: a forward and a backward for each, and one step for both."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(243)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

for _step in range(8):
    labelled, unlabelled = torch.randn(12, 10), torch.randn(36, 10)
    optimiser.zero_grad()
    F.cross_entropy(model(labelled), labelled[:, :4].argmax(1)).backward()
    chances = model(unlabelled).softmax(1)
    entropy = -(chances * chances.log()).sum(1).mean()
    (0.1 * entropy).backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
