"""A backward that raises for a reason of its own, which the program expects, and goes on."""

import torch
from torch import nn

torch.manual_seed(248)
torch.set_num_threads(1)


class Finite(torch.autograd.Function):
    """The identity; its backward refuses gradients that are not finite."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        if not gradient.isfinite().all():
            raise RuntimeError("the gradient is not finite")
        return gradient


model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
skipped = 0
for step in range(9):
    rows = torch.randn(10, 4)
    output = Finite.apply(model(rows))
    loss = (output - rows.sum(1, keepdim=True)).square().mean()
    if step % 4 == 3:
        loss = loss * float("inf")
    optimiser.zero_grad()
    try:
        loss.backward()
    except RuntimeError:
        skipped += 1
        continue
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()), skipped)
