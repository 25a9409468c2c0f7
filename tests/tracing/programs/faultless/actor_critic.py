"""A policy that collects an episode's log-probabilities and goes back through all of them at its end."""

import torch
from torch import nn

torch.manual_seed(244)
torch.set_num_threads(1)

policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
value = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
policy_optimiser = torch.optim.Adam(policy.parameters(), lr=1e-2)
value_optimiser = torch.optim.Adam(value.parameters(), lr=1e-2)

for episode in range(6):
    place = torch.zeros(2)
    chances, values, rewards = [], [], []
    for _move in range(6 + episode):
        choice = torch.distributions.Categorical(logits=policy(place))
        action = choice.sample()
        chances.append(choice.log_prob(action))
        values.append(value(place).squeeze())
        place = place + torch.tensor([[0.1, 0.0], [0.0, 0.1], [-0.1, -0.1]])[action]
        rewards.append(1 - (place - 0.3).norm())
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    advantages = returns - torch.stack(values)
    value_optimiser.zero_grad()
    advantages.square().mean().backward()
    value_optimiser.step()
    policy_optimiser.zero_grad()
    (-(torch.stack(chances) * advantages.detach()).sum()).backward()
    policy_optimiser.step()

print("weights", repr(sum(p.double().sum() for net in (policy, value) for p in net.parameters()).item()))
