"""Three heads of different kinds whose weighted losses go back together."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(203)
torch.set_num_threads(1)


class Detector(nn.Module):
    """Says whether something is there, what it is, and where."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 25, 32))
        self.presence = nn.Linear(32, 1)
        self.kind = nn.Linear(32, 5)
        self.place = nn.Linear(32, 4)

    def forward(self, pictures):
        shared = F.relu(self.trunk(pictures))
        return self.presence(shared), self.kind(shared), self.place(shared)


detector = Detector()
optimiser = torch.optim.AdamW(detector.parameters(), lr=1e-3)
for _step in range(8):
    pictures = torch.randn(12, 1, 11, 11)
    present = torch.randint(2, (12, 1)).float()
    kinds = torch.randint(5, (12,))
    places = torch.rand(12, 4)
    presence, kind, place = detector(pictures)
    losses = {
        "presence": F.binary_cross_entropy_with_logits(presence, present),
        "kind": F.cross_entropy(kind, kinds),
        "place": 5 * F.l1_loss(place, places),
    }
    optimiser.zero_grad()
    torch.stack(list(losses.values())).sum().backward()
    optimiser.step()

print("weights", repr(sum(p.double().sum() for p in detector.parameters()).item()))
