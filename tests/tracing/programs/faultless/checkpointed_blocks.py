"""Activation checkpointing, in both of its forms: one of them runs backward calls within the backward."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(208)
torch.set_num_threads(1)


class Deep(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        self.first, self.last = nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, rows):
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.last(hidden)


checksum = 0.0
for reentrant in (False, True):
    model = Deep(reentrant)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _step in range(6):
        rows = torch.randn(32, 3)
        loss = (model(rows) - rows.prod(1, keepdim=True)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    checksum += sum(p.double().sum() for p in model.parameters()).item()

print("weights", repr(checksum))
