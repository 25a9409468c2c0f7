"""Five heads on one trunk, and one backward of the sum of their losses."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(31)
torch.set_num_threads(1)


class ManyHeads(nn.Module):
    """A trunk with five regressions on top."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.heads = nn.ModuleList(nn.Linear(64, 2) for _ in range(5))

    def forward(self, rows):
        shared = self.trunk(rows)
        return [head(shared) for head in self.heads]


def train(model, steps):
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = torch.randn(48, 16)
        wanted = [rows[:, k : k + 2].sin() for k in range(5)]
        optimiser.zero_grad()
        losses = [F.mse_loss(output, want) for output, want in zip(model(rows), wanted, strict=True)]

        sum(losses).backward()
        optimiser.step()


net = ManyHeads()
train(net, steps=8)
print("weights", repr(sum(p.double().sum() for p in net.parameters()).item()))
