"""Saliency of each image's own loss: the rows are independent, so one backward of the sum gives every row."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(11)
torch.set_num_threads(1)

network = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(8, 8, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(8, 10),
)
inputs = torch.randn(32, 3, 12, 12, requires_grad=True)
labels = torch.randint(10, (32,))

F.cross_entropy(network(inputs), labels, reduction="sum").backward()
saliency = inputs.grad.abs().amax(1)

print("saliency", repr(saliency.double().sum().item()))
