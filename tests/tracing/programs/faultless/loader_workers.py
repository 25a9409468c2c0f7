"""Batches from a loader with two worker processes; the last batch of an epoch is smaller, and has its own step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 44

    def __getitem__(self, index):
        row = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return row, row.square().sum().unsqueeze(0)


def main():
    torch.manual_seed(234)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(Squares(), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
    for _epoch in range(3):
        for rows, wanted in loader:
            optimiser.zero_grad()
            nn.functional.mse_loss(model(rows), wanted).backward()
            optimiser.step()
    print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))


if __name__ == "__main__":
    main()
