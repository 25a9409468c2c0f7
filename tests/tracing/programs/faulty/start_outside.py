"""A fit from a start value that is computed before the loop, so that only the first backward can pass through it."""

import torch

torch.manual_seed(109)
torch.set_num_threads(1)

start = torch.ones(3, requires_grad=True).exp()
matrix = torch.randn(3, 3).requires_grad_()
goal = torch.tensor([0.2, -0.4, 0.9])
optimiser = torch.optim.SGD([matrix], lr=0.01)
failures = 0

for _iteration in range(6):
    optimiser.zero_grad()
    loss = (torch.tanh(matrix @ start) - goal).square().sum()
    try:
        loss.backward()  # HERE freed-graph
    except RuntimeError as error:
        failures += 1
        message = str(error)[:60]
        continue
    optimiser.step()

print(f"{failures} iterations failed: {message}")
print("matrix", repr(matrix.double().sum().item()))
