"""Weights clamped and normalised through `.data` after each step, that is before the next forward."""

import torch
from torch import nn

torch.manual_seed(246)
torch.set_num_threads(1)

critic = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
optimiser = torch.optim.RMSprop(critic.parameters(), lr=5e-3)
for _step in range(12):
    genuine, forged = torch.randn(20, 3) + 0.5, torch.randn(20, 3)
    optimiser.zero_grad()
    (critic(forged).mean() - critic(genuine).mean()).backward()
    optimiser.step()
    for parameter in critic.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    critic[0].weight.data /= critic[0].weight.data.norm(dim=1, keepdim=True)

print("weights", repr(sum(p.double().sum() for p in critic.parameters()).item()))
