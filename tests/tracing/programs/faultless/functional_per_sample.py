"""Per-sample gradients by function transforms, clipped one by one before they are averaged."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(227)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(parameters, row, label):
    scores = functional_call(model, parameters, (row.unsqueeze(0),))
    return nn.functional.cross_entropy(scores, label.unsqueeze(0))


for _step in range(5):
    rows = torch.randn(12, 6)
    labels = (rows[:, 0] > 0).long()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, rows, labels)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    scales = (1.0 / norms).clamp(max=1.0)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.einsum("n,n...->...", scales, gradients[name]) / len(rows)
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
