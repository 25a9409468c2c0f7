"""A graph net: one forward per epoch, but a step per batch of nodes, so the kept graph meets changed weights."""

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
optimiser = torch.optim.SGD(net.parameters(), lr=0.1)

for epoch in range(4):
    scores = net(features, neighbours)
    for batch in torch.randperm(NODES).split(BATCH):
        optimiser.zero_grad()
        loss = F.cross_entropy(scores[batch], labels[batch])
        try:
            loss.backward(retain_graph=True)  # HERE changed-in-place
        except RuntimeError as error:
            print(f"epoch {epoch} ends early: {str(error)[:80]}")
            break
        optimiser.step()

print("weights", repr(sum(p.double().sum() for p in net.parameters()).item()))
