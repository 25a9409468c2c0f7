"""Candidates trained with a penalty on their gradient's norm; each keeps a `.grad` that holds its own graph."""

import torch
from torch import nn

torch.manual_seed(97)
torch.set_num_threads(1)

rows = torch.randn(24, 6)
wanted = rows.abs().sum(1, keepdim=True)
candidates = []
for width in (8, 12, 16, 20, 24, 28):
    model = nn.Sequential(nn.Linear(6, width), nn.Softplus(), nn.Linear(width, 1))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(rows), wanted)
        loss.backward(create_graph=True)  # HERE create-graph-cycle
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        (0.001 * penalty).backward()
        optimiser.step()
    candidates.append(loss.item())
    del model, optimiser, loss, penalty

print("losses", repr(torch.tensor(candidates).double().sum().item()), candidates)
