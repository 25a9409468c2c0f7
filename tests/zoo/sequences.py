"""Recurrent nets, attention, and the transformer layers of torch.nn."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo.cases import BATCH, Net, Pen, tokens, weight

PEN = Pen()


def recurrent(kind, **options):
    return lambda: Net(lambda net, x: net.layer(x)[0], layer=kind(4, 5, batch_first=True, **options))


def sequence_first(layer, function=lambda net, x: net.layer(x)):
    """A model of data with the sequence in its first dimension, given and giving batches in the first."""
    return lambda: Net(lambda net, x: function(net, x.transpose(0, 1)).transpose(0, 1), layer=layer())


def first_of_several(net, x):
    return net.layer(x)[0]


def cell_loop(cell):
    def forward(net, x):
        hidden, outputs = net.start.expand(len(x), -1), []
        state = (hidden, hidden) if cell is nn.LSTMCell else hidden
        for step in x.unbind(1):
            state = net.cell(step, state)
            outputs.append(state[0] if cell is nn.LSTMCell else state)
        return torch.stack(outputs, 1)

    return lambda: Net(forward, cell=cell(4, 5), start=weight(1, 5))


def by_hand():
    def forward(net, x):
        hidden = x.new_zeros(len(x), 5)
        for step in x.unbind(1):
            hidden = (net.a(step) + hidden @ net.w).tanh()
        return hidden

    return Net(forward, a=nn.Linear(4, 5), w=weight(5, 5))


def packed():
    def forward(net, x):
        short = nn.utils.rnn.pack_padded_sequence(x, net.lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(net.layer(short)[0], batch_first=True)[0]

    return Net(forward, layer=nn.LSTM(4, 5, batch_first=True), lengths=torch.tensor([2, 5, 1, 3]))


def attention(*, need_weights, **options):
    def forward(net, x):
        return net.layer(x, x, x, need_weights=need_weights)[: 1 + need_weights]

    return lambda: Net(forward, layer=nn.MultiheadAttention(8, 2, batch_first=True, **options))


def cross_attention():
    def forward(net, x):
        return net.layer(net.queries.expand(len(x), -1, -1), x, x, need_weights=False)[0]

    return Net(forward, layer=nn.MultiheadAttention(8, 2, batch_first=True, kdim=5, vdim=5), queries=weight(1, 3, 8))


def causal_attention():
    def forward(net, x):
        query, key, value = net.a(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return net.b(x.transpose(1, 2).flatten(2))

    return Net(forward, a=nn.Linear(8, 24, bias=False), b=nn.Linear(8, 8))


def masked_attention():
    def forward(net, x):
        return net.layer(x, x, x, key_padding_mask=net.mask, need_weights=False)[0]

    mask = torch.arange(4) >= torch.tensor([4, 2, 3, 1])[:, None]
    return Net(forward, layer=nn.MultiheadAttention(8, 2, batch_first=True), mask=mask)


def attention_by_hand():
    def forward(net, x):
        scores = net.query(x) @ net.key(x).mT / 3 + net.distance
        return scores.softmax(-1) @ net.value(x)

    layers = {name: nn.Linear(8, 8) for name in ("query", "key", "value")}
    return Net(forward, **layers, distance=weight(4, 4))


def linear_attention():
    def forward(net, x):
        query, key, value = (part(x) for part in (net.query, net.key, net.value))
        state = torch.einsum("btk,btv->btkv", F.elu(key) + 1, value).cumsum(1)
        return torch.einsum("btk,btkv->btv", F.elu(query) + 1, state)

    return Net(forward, query=nn.Linear(5, 3), key=nn.Linear(5, 3), value=nn.Linear(5, 4))


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, **options)


def decoder_layer():
    def forward(net, x):
        return net.layer(net.target.expand(len(x), -1, -1), x, tgt_mask=net.mask)

    layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return Net(forward, layer=layer, target=weight(1, 3, 8), mask=torch.triu(torch.full((3, 3), -torch.inf), 1))


def encoder_stack():
    encoder = nn.TransformerEncoder(encoder_layer(batch_first=True), 2, enable_nested_tensor=False)
    return Net(lambda net, x: net.head(net.layer(x)[:, 0]), layer=encoder, head=nn.Linear(8, 3))


def language_model():
    def forward(net, x):
        hidden = net.layer(net.embedding(x))[0]
        return F.linear(hidden, net.embedding.weight, net.bias)

    def losses(net, logits):
        return F.cross_entropy(logits.transpose(1, 2), net.targets, reduction="none").mean(1)

    def make():
        parts = {"embedding": nn.Embedding(11, 6), "layer": nn.GRU(6, 6, batch_first=True), "bias": weight(11)}
        return Net(forward, **parts, targets=torch.randint(11, (BATCH, 4)))

    PEN.add("recurrent language model", tokens(4), make, "recurrent", "embedding", "tied", losses=losses)


PEN.add("rnn", (4, 4), recurrent(nn.RNN), "recurrent")
PEN.add("rnn with relu", (4, 4), recurrent(nn.RNN, nonlinearity="relu"), "recurrent")
PEN.add("gru", (4, 4), recurrent(nn.GRU), "recurrent")
PEN.add("lstm", (4, 4), recurrent(nn.LSTM), "recurrent")
PEN.add("lstm of two layers without bias", (4, 4), recurrent(nn.LSTM, num_layers=2, bias=False), "recurrent")
PEN.add("bidirectional lstm", (4, 4), recurrent(nn.LSTM, bidirectional=True), "recurrent")
for kind in (nn.RNN, nn.GRU, nn.LSTM):
    PEN.add(
        f"{kind.__name__.lower()}, sequence first",
        (4, 4),
        sequence_first(lambda kind=kind: kind(4, 5), first_of_several),
        "recurrent",
        "sequence-first",
    )
    cell = getattr(nn, f"{kind.__name__}Cell")
    PEN.add(f"{kind.__name__.lower()} cell in a loop", (4, 4), cell_loop(cell), "recurrent", "reused")
PEN.add("recurrence by hand", (4, 4), by_hand, "recurrent", "reused")
PEN.add("packed lstm", (5, 4), packed, "recurrent", "ragged")
language_model()
PEN.add("attention without weights", (4, 8), attention(need_weights=False), "attention")
PEN.add("attention with weights", (4, 8), attention(need_weights=True), "attention")
PEN.add("attention with bias of keys", (4, 8), attention(need_weights=False, add_bias_kv=True), "attention")
PEN.add("attention over learned queries", (4, 5), cross_attention, "attention")
PEN.add("causal attention", (4, 8), causal_attention, "attention")
PEN.add("attention with padding", (4, 8), masked_attention, "attention", "ragged")
PEN.add("attention by hand", (4, 8), attention_by_hand, "attention", "vanishing")
PEN.add("linear attention", (4, 5), linear_attention, "attention")
PEN.add("encoder layer", (4, 8), lambda: encoder_layer(batch_first=True), "transformer")
PEN.add("encoder layer, norm first", (4, 8), lambda: encoder_layer(batch_first=True, norm_first=True), "transformer")
PEN.add("encoder layer, sequence first", (4, 8), sequence_first(encoder_layer), "transformer", "sequence-first")
PEN.add("decoder layer", (4, 8), decoder_layer, "transformer")
PEN.add("transformer encoder", (4, 8), encoder_stack, "transformer")
