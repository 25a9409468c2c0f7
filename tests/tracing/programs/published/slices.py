"""All images are inferred; then the loss of one after the other is back-propagated, and its image's gradient read."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
)  # fmt: skip
criterion = nn.CrossEntropyLoss()
for _ in range(2):
    inputs, labels = torch.rand(4, 3, 32, 32, requires_grad=True), torch.randint(10, (4,))
    outputs = net(inputs)
    for j in range(4):
        loss = criterion(outputs[j : j + 1], labels[j : j + 1])
        loss.backward(retain_graph=True)  # HERE repeated-traversal zero-rows
        print(j, inputs.grad[j].norm().item())
