"""Meta-learning: inner steps on a functional model by differentiable gradients, then one backward through them."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

torch.manual_seed(217)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
outer = torch.optim.Adam(model.parameters(), lr=1e-2)


def wave(count, height, shift):
    points = torch.rand(count, 1) * 6 - 3
    return points, height * torch.sin(points + shift)


for _step in range(5):
    total = torch.zeros(())
    for _task in range(3):
        height, shift = torch.rand(2) * 3
        adapted = dict(model.named_parameters())
        for _inner in range(2):
            points, values = wave(8, height, shift)
            loss = F.mse_loss(functional_call(model, adapted, (points,)), values)
            gradients = torch.autograd.grad(loss, list(adapted.values()), create_graph=True)
            adapted = {
                name: value - 0.05 * gradient
                for (name, value), gradient in zip(adapted.items(), gradients, strict=True)
            }
        points, values = wave(8, height, shift)
        total = total + F.mse_loss(functional_call(model, adapted, (points,)), values)
    outer.zero_grad()
    total.backward()
    outer.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
