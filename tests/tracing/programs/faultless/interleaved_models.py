"""Two models whose forwards come first: one steps before the other's backward, which has nothing to do with it."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(225)
torch.set_num_threads(1)

words = nn.Linear(7, 4)
sounds = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 4))
word_optimiser = torch.optim.SGD(words.parameters(), lr=0.2)
sound_optimiser = torch.optim.SGD(sounds.parameters(), lr=0.2)

for _step in range(10):
    labels = torch.randint(4, (14,))
    word_loss = F.cross_entropy(words(torch.randn(14, 7)), labels)
    sound_loss = F.cross_entropy(sounds(torch.randn(14, 3)), labels)
    word_optimiser.zero_grad()
    word_loss.backward()
    word_optimiser.step()
    sound_optimiser.zero_grad()
    sound_loss.backward()
    sound_optimiser.step()

print("weights", repr(sum(p.double().sum() for net in (words, sounds) for p in net.parameters()).item()))
