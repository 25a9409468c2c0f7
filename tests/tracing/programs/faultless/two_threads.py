"""Two threads, each of which trains a model of its own."""

import threading

import torch
from torch import nn

torch.manual_seed(233)
torch.set_num_threads(1)


def train(model, seed):
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(15):
        rows = torch.randn(16, 4, generator=generator)
        optimiser.zero_grad()
        loss = (model(rows) - rows.square().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimiser.step()


train(nn.Linear(4, 1), 9)  # what torch sets up at its first step is set up by one thread
models = [nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(2)]
threads = [threading.Thread(target=train, args=(model, seed)) for seed, model in enumerate(models)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

print("weights", repr(sum(p.double().sum() for model in models for p in model.parameters()).item()))
