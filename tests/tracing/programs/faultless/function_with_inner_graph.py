"""A custom function that builds a graph of its own inside its backward, and differentiates it there."""

import torch
from torch import nn

torch.manual_seed(230)
torch.set_num_threads(1)


class Recomputed(torch.autograd.Function):
    """Keeps only its inputs; the backward computes the function once more and differentiates that."""

    @staticmethod
    def forward(ctx, values, weight):
        ctx.save_for_backward(values, weight)
        return torch.sin(values @ weight).square()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            values, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
            again = torch.sin(values @ weight).square()
            return torch.autograd.grad(again, (values, weight), gradient)


below = nn.Linear(5, 8)
weight = nn.Parameter(torch.randn(8, 3) / 3)
optimiser = torch.optim.SGD([*below.parameters(), weight], lr=0.1)
for _step in range(10):
    rows = torch.randn(15, 5)
    loss = (Recomputed.apply(below(rows), weight) - rows[:, :3].abs()).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in (*below.parameters(), weight)).item()))
