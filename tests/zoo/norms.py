"""Normalisations, and parametrisations of a weight that normalise it."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from zoo.cases import Net, Pen

PEN = Pen()


def around(norm):
    """A normalisation between two linear layers."""
    return lambda: nn.Sequential(nn.Linear(5, 6), random_affine(norm()), nn.Tanh(), nn.Linear(6, 3))


def image(norm):
    """A normalisation behind a convolution with four channels."""
    return lambda: nn.Sequential(nn.Conv2d(2, 4, 3), random_affine(norm()), nn.Tanh())


def random_affine(norm):
    """The same module with parameters and statistics that are not ones and zeros."""
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_().add_(1)
        for name, buffer in norm.named_buffers():
            if name.startswith("running"):
                buffer.uniform_(0.5, 1.5)
    return norm


def unit_length():
    def forward(net, x):
        x = net.a(x)
        return net.b(x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6))

    return Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 3))


def parametrised(wrap):
    return lambda: nn.Sequential(wrap(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))


PEN.add("batch norm in evaluation", (5,), lambda: around(lambda: nn.BatchNorm1d(6))().eval(), "norm")
PEN.add("batch norm in training", (5,), around(lambda: nn.BatchNorm1d(6)), "norm", "vanishing", independent=False)
PEN.add("batch norm 2d in evaluation", (2, 6, 6), lambda: image(lambda: nn.BatchNorm2d(4))().eval(), "norm", "conv")
PEN.add(
    "batch norm 2d in training",
    (2, 6, 6),
    image(lambda: nn.BatchNorm2d(4)),
    "norm",
    "vanishing",
    "conv",
    independent=False,
)
PEN.add(
    "batch norm without affine",
    (5,),
    around(lambda: nn.BatchNorm1d(6, affine=False)),
    "norm",
    "vanishing",
    independent=False,
)
PEN.add("layer norm", (5,), around(lambda: nn.LayerNorm(6)), "norm")
PEN.add("layer norm over a sequence", (4, 5), around(lambda: nn.LayerNorm(6)), "norm")
PEN.add("layer norm over two dimensions", (4, 5), around(lambda: nn.LayerNorm((4, 6))), "norm")
PEN.add("layer norm without bias", (4, 5), around(lambda: nn.LayerNorm(6, bias=False)), "norm")
PEN.add("layer norm without affine", (4, 5), around(lambda: nn.LayerNorm(6, elementwise_affine=False)), "norm")
PEN.add("group norm", (2, 6, 6), image(lambda: nn.GroupNorm(2, 4)), "norm", "conv")
PEN.add("group norm on 2-d", (5,), around(lambda: nn.GroupNorm(3, 6)), "norm")
PEN.add("instance norm", (2, 6, 6), image(lambda: nn.InstanceNorm2d(4, affine=True)), "norm", "vanishing", "conv")
PEN.add(
    "instance norm in evaluation",
    (2, 6, 6),
    lambda: image(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True))().eval(),
    "norm",
    "conv",
)
PEN.add("rms norm", (4, 5), around(lambda: nn.RMSNorm(6)), "norm")
PEN.add("local response norm", (2, 6, 6), image(lambda: nn.LocalResponseNorm(2)), "norm", "conv")
PEN.add("divided by its length", (5,), unit_length, "norm")
PEN.add("weight norm", (5,), parametrised(parametrizations.weight_norm), "parametrised")
PEN.add("spectral norm", (5,), parametrised(parametrizations.spectral_norm), "parametrised")
PEN.add(
    "spectral norm in evaluation", (5,), lambda: parametrised(parametrizations.spectral_norm)().eval(), "parametrised"
)
PEN.add(
    "weight norm of a conv",
    (2, 6, 6),
    lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), nn.Tanh()),
    "parametrised",
    "conv",
)
