"""A graph net: updates through `.data`, each after the forward and backward of its own batch of nodes."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(5)
torch.set_num_threads(1)

NODES, FEATURES, CLASSES, BATCH = 40, 6, 3, 10


class GraphNet(nn.Module):
    """Two layers, each of which averages over neighbours first."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, 12)
        self.outer = nn.Linear(12, CLASSES)

    def forward(self, features, neighbours):
        hidden = torch.relu(self.inner(neighbours @ features))
        return self.outer(neighbours @ hidden)


edges = ((torch.rand(NODES, NODES) < 0.1) | torch.eye(NODES, dtype=torch.bool)).float()
neighbours = edges / edges.sum(1, keepdim=True)
features = torch.randn(NODES, FEATURES)
labels = torch.randint(CLASSES, (NODES,))
net = GraphNet()

for _epoch in range(4):
    for batch in torch.randperm(NODES).split(BATCH):
        net.zero_grad()
        loss = F.cross_entropy(net(features, neighbours)[batch], labels[batch])
        loss.backward()
        for parameter in net.parameters():
            parameter.data -= 1.0 * parameter.grad

print("weights", repr(sum(p.double().sum() for p in net.parameters()).item()))
