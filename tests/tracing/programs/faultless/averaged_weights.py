"""An exponential average of the weights, which follows the model after every step and serves as the teacher."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(219)
torch.set_num_threads(1)

pupil = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
teacher = copy.deepcopy(pupil).requires_grad_(False)
optimiser = torch.optim.SGD(pupil.parameters(), lr=0.1)

for _step in range(12):
    rows = torch.randn(24, 10)
    expected = teacher(rows + 0.1 * torch.randn_like(rows)).softmax(1)
    scores = pupil(rows)
    loss = F.cross_entropy(scores, rows[:, :5].argmax(1)) + F.mse_loss(scores.softmax(1), expected)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), pupil.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

print("weights", repr(sum(p.double().sum() for net in (pupil, teacher) for p in net.parameters()).item()))
