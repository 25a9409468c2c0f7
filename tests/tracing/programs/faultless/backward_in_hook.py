"""A hook on a hidden layer's gradient that runs a backward of its own, for a probe that learns beside the model."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(231)
torch.set_num_threads(1)

lower, upper = nn.Linear(6, 12), nn.Linear(12, 2)
probe = nn.Linear(12, 2)
optimiser = torch.optim.SGD([*lower.parameters(), *upper.parameters()], lr=0.1)
probe_optimiser = torch.optim.SGD(probe.parameters(), lr=0.1)

for _step in range(8):
    rows = torch.randn(20, 6)
    labels = (rows.sum(1) > 0).long()
    hidden = lower(rows).relu()
    shown = hidden.detach()

    def learn(gradient, shown=shown, labels=labels):
        with torch.enable_grad():
            F.cross_entropy(probe(shown), labels).backward()
        return gradient

    hidden.register_hook(learn)
    optimiser.zero_grad()
    probe_optimiser.zero_grad()
    F.cross_entropy(upper(hidden), labels).backward()
    optimiser.step()
    probe_optimiser.step()

print("weights", repr(sum(p.double().sum() for net in (lower, upper, probe) for p in net.parameters()).item()))
