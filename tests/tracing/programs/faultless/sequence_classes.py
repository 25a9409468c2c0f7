"""Classification of padded sequences of different lengths by the last state of a recurrent net."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

torch.manual_seed(213)
torch.set_num_threads(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 12, batch_first=True, bidirectional=True)
        self.out = nn.Linear(24, 3)

    def forward(self, sequences):
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        packed = pack_padded_sequence(
            pad_sequence(sequences, batch_first=True), lengths, batch_first=True, enforce_sorted=False
        )
        _, last = self.gru(packed)
        return self.out(torch.cat([last[0], last[1]], 1))


model = Classifier()
optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
for _step in range(8):
    sequences = [torch.randn(int(length), 4) for length in torch.randint(3, 12, (10,))]
    labels = torch.tensor([int(sequence.sum(0)[:3].argmax()) for sequence in sequences])
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(sequences), labels).backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
