"""Diagonal Fisher information, sample by sample, of a net whose batch normalisation mixes the samples."""

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
losses = F.cross_entropy(net(rows), labels, reduction="none")
fisher = [torch.zeros_like(p) for p in parameters]
for i in range(16):
    gradients = torch.autograd.grad(losses[i], parameters, retain_graph=True)  # HERE repeated-traversal coupled-rows
    for total, gradient in zip(fisher, gradients, strict=True):
        total.add_(gradient.square() / 16)

print("fisher", repr(sum(f.double().sum() for f in fisher).item()))
