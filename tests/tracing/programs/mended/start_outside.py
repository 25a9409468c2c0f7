"""A fit from a start value that is computed in every iteration, from a leaf outside the loop."""

import torch

torch.manual_seed(109)
torch.set_num_threads(1)

exponent = torch.ones(3, requires_grad=True)
matrix = torch.randn(3, 3).requires_grad_()
goal = torch.tensor([0.2, -0.4, 0.9])
optimiser = torch.optim.SGD([matrix], lr=0.01)

for _iteration in range(6):
    optimiser.zero_grad()
    start = exponent.exp()
    loss = (torch.tanh(matrix @ start) - goal).square().sum()
    loss.backward()
    optimiser.step()

print("matrix", repr(matrix.double().sum().item()))
