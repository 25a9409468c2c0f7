"""Sharpness-aware minimisation as an optimiser of its own, whose step evaluates a closure twice."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(207)
torch.set_num_threads(1)


class SharpnessAware(torch.optim.Optimizer):
    """Wraps a base optimiser: climb, take the gradient there, come back, step."""

    def __init__(self, parameters, base, radius=0.05, **options):
        super().__init__(parameters, {"radius": radius, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in moved]))
        before = [p.clone() for p in moved]
        for p in moved:
            p.add_(p.grad, alpha=self.param_groups[0]["radius"] / float(length))
        closure()
        for p, value in zip(moved, before, strict=True):
            p.copy_(value)
        self.base.step()
        return loss


model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
optimiser = SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.1)

for _step in range(8):
    rows = torch.randn(32, 8)
    labels = rows[:, :3].argmax(1)

    def closure(rows=rows, labels=labels):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(rows), labels)
        loss.backward()
        return loss

    optimiser.step(closure)

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
