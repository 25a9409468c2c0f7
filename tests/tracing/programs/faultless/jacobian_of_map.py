"""Newton's method on a small system of equations, with the library's own Jacobian."""

import torch
from torch.autograd.functional import jacobian

torch.manual_seed(228)
torch.set_num_threads(1)

mix = torch.randn(6, 6) / 6


def system(values):
    return values + torch.tanh(mix @ values) - 1


solution = torch.zeros(6)
for _iteration in range(6):
    solution = solution - torch.linalg.solve(jacobian(system, solution), system(solution))

print("solution", repr(solution.double().sum().item()), bool(system(solution).abs().max() < 1e-5))
