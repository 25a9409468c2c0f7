"""A training loop that keeps each graph past its only backward."""

import torch
from torch import nn

torch.manual_seed(103)
torch.set_num_threads(1)


class Trainer:
    """A model, its optimiser, and a step for them."""

    def __init__(self):
        self.model = nn.Sequential(nn.Conv1d(2, 8, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 20, 5))
        self.optimiser = torch.optim.RMSprop(self.model.parameters(), lr=1e-3)
        self.criterion = nn.CrossEntropyLoss()

    def step(self, signals, labels):
        self.optimiser.zero_grad()
        loss = self.criterion(self.model(signals), labels)
        loss.backward(retain_graph=True)  # HERE needless-retain
        self.optimiser.step()
        return loss.item()


trainer = Trainer()
history = [trainer.step(torch.randn(16, 2, 20), torch.randint(5, (16,))) for _ in range(12)]
checksum = sum(p.double().sum() for p in trainer.model.parameters()).item()
print("weights", repr(checksum), sum(history))
