"""The nets and losses that the scripts share: a perceptron, the tutorial's conv net and a small transformer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

OUTPUTS = 32


def perceptron() -> nn.Sequential:
    """256-512-512-32 with ReLU."""
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, OUTPUTS))


def conv_net() -> nn.Sequential:
    """The conv net of the CIFAR-10 tutorial, with 32 outputs."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, OUTPUTS),
    )  # fmt: skip


class Transformer(nn.Module):
    """An embedding, two pre-norm encoder layers of width 64, the mean over tokens, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, OUTPUTS)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class SplitAttention(nn.Module):
    """What an `nn.MultiheadAttention` computes of one sequence, by four linear layers of its weights."""

    batch_first = True

    def __init__(self, whole: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = whole.num_heads
        self.query, self.key, self.value, self.out_proj = (
            nn.Linear(whole.embed_dim, whole.embed_dim) for _ in range(4)
        )
        weights, biases = whole.in_proj_weight.chunk(3), whole.in_proj_bias.chunk(3)
        for linear, weight, bias in zip((self.query, self.key, self.value), weights, biases, strict=True):
            linear.load_state_dict({"weight": weight, "bias": bias})
        self.out_proj.load_state_dict(whole.out_proj.state_dict())

    @override
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_options: object) -> tuple[Tensor, None]:
        parts = (self.query(query), self.key(key), self.value(value))
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        return self.out_proj(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)), None


def split_attention(net: nn.Module) -> nn.Module:
    """The net with every attention taken apart."""
    for name, child in net.named_children():
        if isinstance(child, nn.MultiheadAttention):
            setattr(net, name, SplitAttention(child))
        else:
            split_attention(child)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {"perceptron": perceptron, "conv net": conv_net, "transformer": Transformer}


def data_of(name: str, batch: int) -> Tensor:
    """Random rows for a net of `NETS`: features, images, or sentences of 32 tokens."""
    if name == "perceptron":
        return torch.rand(batch, 256)
    if name == "conv net":
        return torch.rand(batch, 3, 32, 32)
    return torch.randint(100, (batch, 32))
