"""Truncated back-propagation through time: an LSTM reads a long text in chunks, with a step after each of them."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(205)
torch.set_num_threads(1)


class LanguageModel(nn.Module):
    def __init__(self, symbols=11, width=24):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, symbols)

    def forward(self, text, state=None):
        states, state = self.lstm(self.embed(text), state)
        return self.out(states), state


model = LanguageModel()
optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
text = torch.randint(11, (4, 81))
state = None
for begin in range(0, 80, 8):
    if state is not None:
        state = tuple(part.detach() for part in state)
    scores, state = model(text[:, begin : begin + 8], state)
    loss = F.cross_entropy(scores.flatten(0, 1), text[:, begin + 1 : begin + 9].flatten())
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
