"""Plain gradient descent written out: the updates under no_grad, and a search loop that never differentiates."""

import torch

torch.manual_seed(216)
torch.set_num_threads(1)

rows = torch.randn(60, 5)
wanted = rows @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]) + 0.7
slope = torch.zeros(5, requires_grad=True)
offset = torch.zeros((), requires_grad=True)

for _step in range(20):
    loss = (rows @ slope + offset - wanted).square().mean()
    loss.backward()
    with torch.no_grad():
        for value in (slope, offset):
            value.sub_(0.1 * value.grad)
            value.grad.zero_()

with torch.no_grad():
    best = min((float((rows @ (slope * scale) + offset - wanted).abs().sum()), scale) for scale in (0.9, 1.0, 1.1))

print("weights", repr((slope.double().sum() + offset.double()).item()), best)
