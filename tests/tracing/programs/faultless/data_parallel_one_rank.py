"""Data-parallel training with a single rank in this very process, some steps of it accumulated without a reduction."""

import tempfile
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(209)
torch.set_num_threads(1)

with tempfile.TemporaryDirectory() as folder:
    store = distributed.FileStore(str(Path(folder) / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _step in range(6):
        optimiser.zero_grad()
        rows = torch.randn(24, 4)
        with model.no_sync():
            (model(rows[:12]) - rows[:12, :2]).square().mean().backward()
        (model(rows[12:]) - rows[12:, :2]).square().mean().backward()
        optimiser.step()
    distributed.destroy_process_group()
    print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()))
