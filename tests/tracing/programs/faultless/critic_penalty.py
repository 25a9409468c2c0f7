"""Wasserstein adversaries with a penalty on the critic's gradient at points in between."""

import torch
from torch import nn

torch.manual_seed(212)
torch.set_num_threads(1)

generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 1))
generator_step = torch.optim.Adam(generator.parameters(), lr=1e-3)
critic_step = torch.optim.Adam(critic.parameters(), lr=1e-3)


def penalty(genuine, forged):
    share = torch.rand(len(genuine), 1)
    between = (share * genuine + (1 - share) * forged).requires_grad_()
    scores = critic(between)
    (slopes,) = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
    return (slopes.norm(dim=1) - 1).square().mean()


for step in range(9):
    genuine = torch.randn(20, 2) + 1
    forged = generator(torch.randn(20, 3)).detach()
    critic_step.zero_grad()
    loss = critic(forged).mean() - critic(genuine).mean() + 10 * penalty(genuine, forged)
    loss.backward()
    critic_step.step()
    if step % 3 == 2:
        generator_step.zero_grad()
        (-critic(generator(torch.randn(20, 3))).mean()).backward()
        generator_step.step()

print("weights", repr(sum(p.double().sum() for net in (generator, critic) for p in net.parameters()).item()))
