"""Each parameter's own optimiser steps as soon as its gradient is there, in the midst of the backward."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(232)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
optimisers = {p: torch.optim.Adam([p], lr=1e-2, foreach=False) for p in model.parameters()}


def step_and_forget(parameter):
    optimisers[parameter].step()
    optimisers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_and_forget)

for _step in range(8):
    rows = torch.randn(16, 8)
    F.cross_entropy(model(rows), rows[:, :3].argmax(1)).backward()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
