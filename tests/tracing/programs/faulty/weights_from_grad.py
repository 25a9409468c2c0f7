"""Loss weights from the norm of each loss's gradient, read from `.grad`, where the earlier ones still lie."""

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
    optimiser.zero_grad()
    norms = []
    for k, head in enumerate(heads):
        target = rows[:, k : k + 1] * 10.0**-k
        loss = weights[k] * F.mse_loss(head(representation), target)
        loss.backward(retain_graph=k + 1 < len(heads))  # HERE repeated-traversal
        norms.append(float(trunk[2].weight.grad.norm()))
    optimiser.step()
    mean = sum(norms) / len(norms)
    weights = [0.5 * weight + 0.5 * mean / norm for weight, norm in zip(weights, norms, strict=True)]

parameters = [*trunk.parameters(), *heads.parameters()]
print("weights", repr(sum(p.double().sum() for p in parameters).item()), weights)
