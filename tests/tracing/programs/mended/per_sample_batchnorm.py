"""Diagonal Fisher information, sample by sample, of a net in evaluation mode: each sample has a forward of its own."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(83)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
parameters = list(net.parameters())
rows = torch.randn(16, 8)
labels = torch.randint(4, (16,))

net.train()
with torch.no_grad():
    net(rows)  # fills the running statistics
net.eval()
fisher = [torch.zeros_like(p) for p in parameters]
for row, label in zip(rows.split(1), labels.split(1), strict=True):
    gradients = torch.autograd.grad(F.cross_entropy(net(row), label), parameters)
    for total, gradient in zip(fisher, gradients, strict=True):
        total.add_(gradient.square() / 16)

print("fisher", repr(sum(f.double().sum() for f in fisher).item()))
