"""Loss weights from the norm of each loss's gradient on a detached representation; the trunk is traversed once."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(41)
torch.set_num_threads(1)

trunk = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
heads = nn.ModuleList(nn.Linear(32, 1) for _ in range(4))
optimiser = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.05)
weights = [1.0] * len(heads)

for _step in range(8):
    rows = torch.randn(40, 10)
    representation = trunk(rows)
    leaf = representation.detach().requires_grad_()
    optimiser.zero_grad()
    norms = []
    for k, head in enumerate(heads):
        target = rows[:, k : k + 1] * 10.0**-k
        loss = weights[k] * F.mse_loss(head(leaf), target)
        at_leaf, *at_head = torch.autograd.grad(loss, [leaf, *head.parameters()])
        norms.append(float(at_leaf.norm()))
        leaf.grad = at_leaf if leaf.grad is None else leaf.grad + at_leaf
        for parameter, gradient in zip(head.parameters(), at_head, strict=True):
            parameter.grad = gradient
    representation.backward(leaf.grad)
    optimiser.step()
    mean = sum(norms) / len(norms)
    weights = [0.5 * weight + 0.5 * mean / norm for weight, norm in zip(weights, norms, strict=True)]

parameters = [*trunk.parameters(), *heads.parameters()]
print("weights", repr(sum(p.double().sum() for p in parameters).item()), weights)
