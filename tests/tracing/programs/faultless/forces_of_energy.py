"""Energies and forces learnt together: the forces are the energy's gradient, and the loss goes back through them."""

import torch
from torch import nn

torch.manual_seed(239)
torch.set_num_threads(1)

energy_net = nn.Sequential(nn.Linear(3, 24), nn.SiLU(), nn.Linear(24, 1))
optimiser = torch.optim.Adam(energy_net.parameters(), lr=5e-3)

for _step in range(8):
    places = torch.randn(6, 5, 3, requires_grad=True)
    energies = energy_net(places).sum((1, 2))
    (slopes,) = torch.autograd.grad(energies.sum(), places, create_graph=True)
    true_energies = places.detach().square().sum((1, 2)) / 2
    loss = (energies - true_energies).square().mean() + 10 * (-slopes + places.detach()).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in energy_net.parameters()).item()))
