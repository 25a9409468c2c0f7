"""Token losses where most tokens are padding, which the loss ignores: their gradients are zero, rightly."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(235)
torch.set_num_threads(1)

IGNORED = -100
embed = nn.Embedding(20, 12)
body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 20))
parameters = [*embed.parameters(), *body.parameters()]
optimiser = torch.optim.SGD(parameters, lr=0.3)

for _step in range(8):
    text = torch.randint(20, (6, 16))
    following = text.roll(-1, 1)
    following[:, -1] = IGNORED
    following[torch.rand(6, 16) < 0.8] = IGNORED
    following[0, 0] = text[0, 1]
    loss = F.cross_entropy(body(embed(text)).flatten(0, 1), following.flatten(), ignore_index=IGNORED)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in parameters).item()))
