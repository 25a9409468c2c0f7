"""Two adversaries that step together, each by the gradient of its own loss alone."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(61)
torch.set_num_threads(1)

maker = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
judge = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
maker_optimiser = torch.optim.Adam(maker.parameters(), lr=2e-3)
judge_optimiser = torch.optim.Adam(judge.parameters(), lr=2e-3)
ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)


def loss_of(score, wanted):
    return F.binary_cross_entropy_with_logits(score, wanted)


for _step in range(8):
    genuine = torch.randn(32, 2) * 0.5 + 2
    forged = maker(torch.randn(32, 4))
    judge_loss = loss_of(judge(genuine), ones) + loss_of(judge(forged.detach()), zeros)
    maker_loss = loss_of(judge(forged), ones)
    for loss, net in ((judge_loss, judge), (maker_loss, maker)):
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient
    for optimiser in (judge_optimiser, maker_optimiser):
        optimiser.step()

print("weights", repr(sum(p.double().sum() for net in (maker, judge) for p in net.parameters()).item()))
