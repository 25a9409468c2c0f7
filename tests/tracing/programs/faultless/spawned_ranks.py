"""Two spawned processes that train data-parallel, with one backward for each forward."""

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def train(rank, path):
    torch.set_num_threads(1)
    store = distributed.FileStore(path, RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(251)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    for _ in range(5):
        rows = torch.randn(10, 4)
        optimiser.zero_grad()
        (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
        optimiser.step()
    if rank == 0:
        print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, args=(str(Path(folder) / "store"),), nprocs=RANKS)
