"""The trace of the Hessian by `backward(create_graph=True)`, with every `.grad` set to None right after its use."""

import warnings

import torch
from torch import nn

torch.manual_seed(237)
torch.set_num_threads(1)
warnings.filterwarnings("ignore", message="Using backward.. with create_graph=True")

rows = torch.randn(30, 4)
wanted = rows.prod(1, keepdim=True)
traces = []
for width in (4, 8, 12, 16, 20):
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    parameters = list(model.parameters())
    (model(rows) - wanted).square().mean().backward(create_graph=True)
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    signs = [torch.randint(2, p.shape).float() * 2 - 1 for p in parameters]
    products = torch.autograd.grad(gradients, parameters, signs)
    traces.append(sum((product * sign).sum() for product, sign in zip(products, signs, strict=True)).item())
    del gradients, products

print("traces", repr(float(torch.tensor(traces).double().sum())), traces)
