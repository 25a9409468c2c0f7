"""Saliency of each image's own loss: one forward of all images, then a backward per image through all of them."""

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

scores = network(inputs)
saliency = []
for j in range(len(inputs)):
    loss = F.cross_entropy(scores[j], labels[j])
    loss.backward(retain_graph=True)  # HERE repeated-traversal zero-rows
    saliency.append(inputs.grad[j].abs().amax(0).clone())

print("saliency", repr(torch.stack(saliency).double().sum().item()))
