"""A picture is fitted so that a fixed net sees what it sees in another one: the weights never change."""

import torch
from torch import nn

torch.manual_seed(249)
torch.set_num_threads(1)

net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU()).requires_grad_(False)
seen = net(torch.rand(1, 1, 12, 12))
picture = torch.rand(1, 1, 12, 12, requires_grad=True)
optimiser = torch.optim.Adam([picture], lr=0.05)
for _step in range(15):
    optimiser.zero_grad()
    loss = (net(picture) - seen).square().sum() + 0.01 * picture.diff(dim=3).abs().sum()
    loss.backward()
    optimiser.step()

print("picture", repr(picture.double().sum().item()))
