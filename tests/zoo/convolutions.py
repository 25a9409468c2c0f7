"""Convolutions of every dimension and option, pooling, and small nets of them."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo.cases import BATCH, Net, Pen, weight

PEN = Pen()


def conv(layer, *after):
    """A convolution with something smooth behind it."""
    return lambda: nn.Sequential(layer(), nn.Tanh(), *(make() for make in after))


def add_conv(name, shape, layer, *traits):
    PEN.add(name, shape, conv(layer), "conv", *traits)


def channels_last():
    return torch.randn(BATCH, 3, 6, 6).contiguous(memory_format=torch.channels_last)


def classifier(pool):
    """A pooling layer between a convolution and a linear layer."""
    return lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), pool(), nn.Flatten(), nn.LazyLinear(3))


def with_pooling(pool):
    def make():
        model = classifier(pool)()
        model(torch.zeros(1, 2, 8, 8))
        return model

    return make


def separable():
    return nn.Sequential(nn.Conv2d(3, 3, 3, groups=3, bias=False), nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 2))


def squeeze_excite():
    def forward(net, x):
        x = net.a(x).tanh()
        gate = net.up(F.relu(net.down(x.mean((2, 3), keepdim=True)))).sigmoid()
        return net.b((x * gate).mean((2, 3)))

    return Net(forward, a=nn.Conv2d(2, 6, 3), down=nn.Conv2d(6, 4, 1), up=nn.Conv2d(4, 6, 1), b=nn.Linear(6, 3))


def unet():
    def forward(net, x):
        first = net.a(x).tanh()
        low = net.b(F.avg_pool2d(first, 2)).tanh()
        return net.c(torch.cat([first, F.interpolate(low, scale_factor=2, mode="bilinear")], 1))

    return Net(
        forward, a=nn.Conv2d(2, 3, 3, padding=1), b=nn.Conv2d(3, 4, 3, padding=1), c=nn.Conv2d(7, 2, 3, padding=1)
    )


def causal():
    def forward(net, x):
        for dilation, layer in zip((1, 2), (net.a, net.b), strict=True):
            x = x + layer(F.pad(x, (dilation, 0))).tanh()
        return x

    return Net(forward, a=nn.Conv1d(3, 3, 2), b=nn.Conv1d(3, 3, 2, dilation=2))


def patches():
    def forward(net, x):
        x = F.unfold(x, 4, stride=4).mT
        return F.fold(net.a(x).tanh().mT, (8, 8), 4, stride=4)

    return Net(forward, a=nn.Linear(32, 16))


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def own_kernel():
    def forward(net, x):
        kernel = net.kernel / net.kernel.norm(dim=(2, 3), keepdim=True)
        return F.conv2d(x, kernel, stride=2).tanh() + F.conv2d(x.flip(1), kernel, stride=2)

    return Net(forward, kernel=weight(3, 2, 2, 2))


add_conv("conv1d", (3, 6), lambda: nn.Conv1d(3, 4, 3))
add_conv("conv1d, stride, padding, dilation, groups", (4, 8), lambda: nn.Conv1d(4, 6, 3, 2, 2, 2, 2))
add_conv("conv2d", (3, 6, 6), lambda: nn.Conv2d(3, 4, 3))
add_conv("conv2d with stride", (3, 7, 7), lambda: nn.Conv2d(3, 4, 3, stride=2))
add_conv("conv2d with a stride that leaves a rest", (2, 6, 7), lambda: nn.Conv2d(2, 3, 3, stride=(2, 3)))
add_conv("conv2d with padding", (3, 5, 5), lambda: nn.Conv2d(3, 4, 3, padding=1))
add_conv("conv2d, padding 'same'", (3, 5, 5), lambda: nn.Conv2d(3, 4, (3, 5), padding="same"))
add_conv("conv2d, circular padding", (3, 5, 5), lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"))
add_conv("conv2d with dilation", (3, 7, 7), lambda: nn.Conv2d(3, 4, 3, dilation=2))
add_conv("conv2d with groups", (4, 6, 6), lambda: nn.Conv2d(4, 6, 3, groups=2))
add_conv("conv2d without bias", (3, 6, 6), lambda: nn.Conv2d(3, 4, 3, bias=False))
add_conv("conv2d, kernel not square", (3, 6, 6), lambda: nn.Conv2d(3, 4, (1, 3), padding=(0, 1)))
add_conv("depthwise conv", (4, 6, 6), lambda: nn.Conv2d(4, 4, 3, groups=4))
add_conv("depthwise conv with a multiplier", (3, 6, 6), lambda: nn.Conv2d(3, 6, 3, groups=3))
add_conv("pointwise conv", (3, 4, 4), lambda: nn.Conv2d(3, 5, 1))
add_conv("conv3d", (2, 4, 4, 4), lambda: nn.Conv3d(2, 3, 3, padding=1, stride=2))
add_conv("transposed conv1d", (3, 4), lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1))
add_conv("transposed conv2d", (3, 4, 4), lambda: nn.ConvTranspose2d(3, 4, 3, bias=False))
add_conv(
    "transposed conv2d, output padding, groups",
    (4, 3, 3),
    lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
)
add_conv("channels-last input", channels_last, lambda: nn.Conv2d(3, 4, 3))
add_conv("channels-last weight", channels_last, lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
PEN.add("max pooling", (2, 8, 8), with_pooling(lambda: nn.MaxPool2d(2)), "conv")
PEN.add("average pooling", (2, 8, 8), with_pooling(lambda: nn.AvgPool2d(3, 2, 1)), "conv")
PEN.add("adaptive pooling", (2, 8, 8), with_pooling(lambda: nn.AdaptiveAvgPool2d((2, 1))), "conv")
PEN.add("adaptive max pooling", (2, 8, 8), with_pooling(lambda: nn.AdaptiveMaxPool2d(2)), "conv")
PEN.add("pixel shuffle", (2, 4, 4), lambda: nn.Sequential(nn.Conv2d(2, 8, 1), nn.PixelShuffle(2), nn.Tanh()), "conv")
PEN.add("separable conv", (3, 5, 5), separable, "conv")
PEN.add("squeeze-excite", (2, 6, 6), squeeze_excite, "conv")
PEN.add("u-net", (2, 6, 6), unet, "conv")
PEN.add("causal conv", (3, 6), causal, "conv")
PEN.add("patches by unfold and fold", (2, 8, 8), patches)
PEN.add("convnet", (1, 8, 8), convnet, "conv")
PEN.add("kernel normalised and used twice", (2, 4, 4), own_kernel, "conv", "reused")
