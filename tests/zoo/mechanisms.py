"""What autograd itself is asked to do differently: own functions, checkpoints, hooks, other precisions."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from zoo.cases import BATCH, BFLOAT16, FLOAT64, Net, Pen, weight

PEN = Pen()


def mlp():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


class Cube(torch.autograd.Function):
    """The third power, with its own backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class OwnLinear(torch.autograd.Function):
    """A linear layer with its own backward, in the form with a separate context."""

    @staticmethod
    def forward(x, w, bias):
        return x @ w.t() + bias, x.sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, _ = inputs
        ctx.save_for_backward(x, w)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x, grad.sum(0)


class StraightThrough(torch.autograd.Function):
    """Rounding whose gradient is passed on as it is: no derivative of what the forward computes."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def checkpointed(**options):
    def forward(net, x):
        return net.head(checkpoint(net.segment, net.stem(x), **options).sin())

    return lambda: Net(forward, stem=nn.Linear(5, 5), segment=mlp(), head=nn.Linear(3, 2))


def offloaded():
    def forward(net, x):
        with save_on_cpu():
            return net.inner(x).sin()

    return Net(forward, inner=mlp())


def packed_away():
    def forward(net, x):
        def unpack(saved):
            return saved.double().to(saved.dtype)

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
            return net.inner(x).sin()

    return Net(forward, inner=mlp())


def watched(watch):
    """A model whose hidden output something is done to before it is used."""

    def forward(net, x):
        hidden = net.a(x).tanh()
        watch(hidden)
        return net.b(hidden)

    return lambda: Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3))


def hooked_parameter():
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad * 2)
    return model


def hooked_module():
    model = mlp()
    model[0].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    return model


def with_forward_hook():
    model = mlp()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2 + 1)
    return model


def hooked_node(hidden):
    hidden.grad_fn.register_hook(lambda inputs, outputs: tuple(grad * 2 for grad in inputs))


def spectrum():
    def forward(net, x):
        x = torch.fft.rfft(net.a(x), dim=1)
        return net.b(torch.cat([x.real, x.imag, x.abs()], 1))

    return Net(forward, a=nn.Linear(5, 6), b=nn.Linear(12, 3))


def complex_parameter():
    def forward(net, x):
        return torch.fft.irfft(torch.fft.rfft(net.a(x), dim=1) * net.filter, n=6, dim=1).tanh()

    return Net(forward, a=nn.Linear(5, 6), filter=nn.Parameter(torch.randn(4, dtype=torch.complex64)))


def autocast():
    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return net.norm(net.b(F.gelu(net.a(x)))).float()

    return Net(forward, a=nn.Linear(5, 8), b=nn.Linear(8, 4), norm=nn.LayerNorm(4))


def autocast_conv():
    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return net.b(net.a(x).tanh().flatten(1)).float()

    return Net(forward, a=nn.Conv2d(2, 3, 3), b=nn.Linear(48, 3))


def mixed_precision():
    def forward(net, x):
        return net.b(net.a(x).double().tanh()).float()

    return Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3).double())


def functional():
    def forward(net, x):
        halved = {name: p * 0.5 for name, p in net.inner.named_parameters()}
        return torch.func.functional_call(net.inner, halved, (x,))

    return Net(forward, inner=mlp())


def ensemble():
    def forward(net, x):
        return torch.func.vmap(lambda w, bias: (x @ w + bias).tanh(), out_dims=1)(net.w, net.bias)

    return Net(forward, w=weight(3, 5, 4), bias=weight(3, 4))


def gradient_inside():
    def forward(net, x):
        energy = net.inner(x).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    return Net(forward, inner=mlp())


def dropped():
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 3))


def rounded():
    return Net(lambda net, x: net.b(StraightThrough.apply(net.a(x) * 3)), a=nn.Linear(5, 4), b=nn.Linear(4, 3))


def own_linear():
    return Net(lambda net, x: OwnLinear.apply(x, net.w, net.bias)[0].tanh(), w=weight(4, 5), bias=weight(4))


def in_double():
    return torch.randn(BATCH, 5, dtype=torch.float64)


def in_bfloat16():
    return torch.randn(BATCH, 5).bfloat16()


REENTRANT = ("checkpoint", "backward only")

PEN.add("custom function", (5,), lambda: Net(lambda net, x: Cube.apply(net.inner(x)), inner=mlp()), "custom function")
PEN.add("custom linear", (5,), own_linear, "custom function")
PEN.add("straight-through rounding", (5,), rounded, "custom function")
PEN.add("checkpoint", (5,), checkpointed(use_reentrant=False), "checkpoint")
PEN.add("reentrant checkpoint", (5,), checkpointed(use_reentrant=True), *REENTRANT)
PEN.add("tensors saved on the cpu", (5,), offloaded, "saved-tensor hooks")
PEN.add("saved tensors packed", (5,), packed_away, "saved-tensor hooks")
PEN.add("hook on a hidden output", (5,), watched(lambda hidden: hidden.register_hook(lambda grad: grad * 2)), "hook")
PEN.add("hook on a node", (5,), watched(hooked_node), "hook")
PEN.add("hidden that retains its gradient", (5,), watched(lambda hidden: hidden.retain_grad()), "hook")
PEN.add("hook on a parameter", (5,), hooked_parameter, "hook")
PEN.add("backward hook on a module", (5,), hooked_module, "hook")
PEN.add("forward hook on a module", (5,), with_forward_hook)
PEN.add("complex intermediate", (5,), spectrum, "complex")
PEN.add("complex parameter", (5,), complex_parameter, "complex")
PEN.add("float64", in_double, lambda: mlp().double(), "float64", tolerance=FLOAT64)
PEN.add("bfloat16", in_bfloat16, lambda: mlp().bfloat16(), "bfloat16", tolerance=BFLOAT16)
PEN.add("autocast", (5,), autocast, "bfloat16", "autocast", tolerance=BFLOAT16)
PEN.add("autocast conv", (2, 6, 6), autocast_conv, "bfloat16", "autocast", "conv", tolerance=BFLOAT16)
PEN.add("float64 within float32", (5,), mixed_precision)
PEN.add("functional call", (5,), functional)
PEN.add("ensemble by vmap", (5,), ensemble)
PEN.add("gradient inside the forward", (5,), gradient_inside, "second order")
PEN.add("dropout", (5,), dropped, "random")
