"""Two losses on one trunk, given to one backward call as a list."""

import torch
from torch import nn

torch.manual_seed(204)
torch.set_num_threads(1)

trunk, left, right = nn.Linear(5, 16), nn.Linear(16, 1), nn.Linear(16, 1)
parameters = [*trunk.parameters(), *left.parameters(), *right.parameters()]
optimiser = torch.optim.SGD(parameters, lr=0.05)
for _step in range(10):
    rows = torch.randn(20, 5)
    shared = trunk(rows).tanh()
    optimiser.zero_grad()
    torch.autograd.backward([left(shared).square().mean(), (right(shared) - 1).abs().mean()])
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in parameters).item()))
