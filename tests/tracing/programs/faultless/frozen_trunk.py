"""Fine-tuning: a frozen trunk, a new head, and later the last layer of the trunk as well."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(221)
torch.set_num_threads(1)

trunk = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()).requires_grad_(False)
head = nn.Linear(24, 3)
optimiser = torch.optim.SGD(head.parameters(), lr=0.1)
for step in range(12):
    if step == 6:
        trunk[2].requires_grad_(True)
        optimiser.add_param_group({"params": trunk[2].parameters(), "lr": 0.01})
    rows = torch.randn(16, 9)
    loss = F.cross_entropy(head(trunk(rows)), rows[:, :3].argmax(1))
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for net in (trunk, head) for p in net.parameters()).item()))
