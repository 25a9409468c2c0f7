"""A wide output layer worked off in chunks of rows on a detached hidden state; the trunk is traversed once."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(241)
torch.set_num_threads(1)

trunk = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
head = nn.Linear(32, 500)
optimiser = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)

for _step in range(4):
    rows = torch.randn(64, 16)
    labels = torch.randint(500, (64,))
    hidden = trunk(rows)
    leaf = hidden.detach().requires_grad_()
    optimiser.zero_grad()
    for part, wanted in zip(leaf.split(16), labels.split(16), strict=True):
        (F.cross_entropy(head(part), wanted, reduction="sum") / len(rows)).backward()
    hidden.backward(leaf.grad)
    optimiser.step()

print("weights", repr(sum(p.double().sum() for net in (trunk, head) for p in net.parameters()).item()))
