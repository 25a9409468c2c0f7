"""A recurrent net read chunk by chunk: the hidden state drags every earlier chunk along."""

import torch
from torch import nn

torch.manual_seed(101)
torch.set_num_threads(1)


class Forecaster(nn.Module):
    """Predicts the next value of a series, and hands on its hidden state."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(1, 16, batch_first=True)
        self.readout = nn.Linear(16, 1)

    def forward(self, values, hidden):
        states, hidden = self.recurrent(values, hidden)
        return self.readout(states), hidden


net = Forecaster()
optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
moments = torch.linspace(0, 12, 49)

for _series in range(4):
    series = torch.sin(moments + torch.rand(8, 1) * 6).unsqueeze(-1)
    hidden = torch.zeros(1, 8, 16)
    optimiser.zero_grad()
    for begin in range(0, 48, 6):
        predicted, hidden = net(series[:, begin : begin + 6], hidden)
        loss = nn.functional.mse_loss(predicted, series[:, begin + 1 : begin + 7])
        loss.backward(retain_graph=True)  # HERE growing-graph
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in net.parameters()).item()))
