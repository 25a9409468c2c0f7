"""Contrastive training in two passes: representations without a graph, then a forward and backward per part."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(250)
torch.set_num_threads(1)

encoder = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 6))
optimiser = torch.optim.SGD(encoder.parameters(), lr=0.2)

for _step in range(4):
    first = torch.randn(24, 8)
    both = torch.cat([first, first + 0.1 * torch.randn_like(first)])
    with torch.no_grad():
        codes = torch.cat([encoder(part) for part in both.split(12)])
    codes.requires_grad_()
    one, other = F.normalize(codes, dim=1).chunk(2)
    F.cross_entropy(one @ other.T / 0.2, torch.arange(24)).backward()
    optimiser.zero_grad()
    for part, gradient in zip(both.split(12), codes.grad.split(12), strict=True):
        encoder(part).backward(gradient)
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in encoder.parameters()).item()))
