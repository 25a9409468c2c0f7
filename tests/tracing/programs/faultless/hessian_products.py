"""Conjugate-gradient steps on Hessian-vector products, each by a double backward on a graph of its own."""

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.manual_seed(238)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1))
parameters = list(model.parameters())
rows = torch.randn(40, 3)
wanted = rows.norm(dim=1, keepdim=True)


def slope(create_graph=False):
    loss = (model(rows) - wanted).square().mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=create_graph)])


def curve(direction):
    return torch.cat([g.flatten() for g in torch.autograd.grad(slope(True) @ direction, parameters)])


for _outer in range(2):
    residual = -slope()
    direction, step = residual.clone(), torch.zeros_like(residual)
    for _inner in range(4):
        curved = curve(direction) + 0.5 * direction
        length = residual @ residual / (direction @ curved)
        step += length * direction
        fresh = residual - length * curved
        direction = fresh + (fresh @ fresh) / (residual @ residual) * direction
        residual = fresh
    vector_to_parameters(parameters_to_vector(parameters).detach() + 0.3 * step, parameters)

print("weights", repr(sum(p.double().sum() for p in parameters).item()))
