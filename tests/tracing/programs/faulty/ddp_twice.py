"""Data-parallel training, one forward and two backwards a step: start with `torchrun --nproc-per-node 2`."""

import os

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)


def train(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(127 + rank)  # every rank has data of its own
    for _ in range(6):
        rows = torch.randn(20, 6)
        scores = model(rows)
        kind_loss = F.cross_entropy(scores, rows[:, :3].argmax(1))
        size_loss = 0.3 * scores.square().mean()
        optimiser.zero_grad()
        kind_loss.backward(retain_graph=True)
        size_loss.backward()  # HERE unreduced-ranks
        optimiser.step()
    return sum(p.detach().double().sum() for p in model.parameters())


def main():
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    checksum = train(distributed.get_rank())
    checksums = [torch.zeros_like(checksum) for _ in range(distributed.get_world_size())]
    distributed.all_gather(checksums, checksum)
    if distributed.get_rank() == 0:
        print("weights", *(repr(float(each)) for each in checksums))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
