"""A language model whose output layer is its embedding: one weight, used twice in each graph."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(220)
torch.set_num_threads(1)

embed = nn.Embedding(17, 12)
mixer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
out = nn.Linear(12, 17)
out.weight = embed.weight
parameters = {id(p): p for module in (embed, mixer, out) for p in module.parameters()}.values()
optimiser = torch.optim.AdamW(parameters, lr=2e-3)
mask = nn.Transformer.generate_square_subsequent_mask(9)

for _step in range(6):
    text = torch.randint(17, (5, 10))
    scores = out(mixer(embed(text[:, :-1]), src_mask=mask))
    loss = F.cross_entropy(scores.reshape(-1, 17), text[:, 1:].reshape(-1))
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in parameters).item()))
