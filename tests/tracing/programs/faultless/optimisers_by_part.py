"""One loss, two optimisers: a sparse one for the embedding, an ordinary one for the rest."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(223)
torch.set_num_threads(1)

bag = nn.EmbeddingBag(50, 8, sparse=True)
rest = nn.Sequential(nn.ReLU(), nn.Linear(8, 4))
optimisers = [torch.optim.SparseAdam(bag.parameters(), lr=1e-2), torch.optim.Adam(rest.parameters(), lr=1e-3)]

for _step in range(10):
    words = torch.randint(50, (12, 6))
    labels = words.sum(1) % 4
    loss = F.cross_entropy(rest(bag(words)), labels)
    for optimiser in optimisers:
        optimiser.zero_grad()
    loss.backward()
    for optimiser in optimisers:
        optimiser.step()

print("weights", repr(sum(p.double().sum() for net in (bag, rest) for p in net.parameters()).item()))
