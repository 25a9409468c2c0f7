"""Four functions timed in a loop, with the process's memory: two losses, each with its forward, summed or not."""

import time

import psutil
import torch
from torch import nn

torch.manual_seed(0)
process = psutil.Process()
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))


def first_loss(x):
    return (net(x) * (0.5 - x.clamp(0, 1))).sum()


def second_loss(x):
    return (net(x) * (1 - x.clamp(0, 1))).sum()


def func1(x):
    first_loss(x).backward()  # ADDS
    second_loss(x).backward()  # ADDS


def func2(x):
    (first_loss(x) + second_loss(x)).backward()  # ADDS


def func3(x):
    first_loss(x).backward(retain_graph=True)  # ADDS
    second_loss(x).backward(retain_graph=True)  # ADDS


def func4(x):
    (first_loss(x) + second_loss(x)).backward(retain_graph=True)  # ADDS


for function in (func1, func2, func3, func4):
    seconds, memory = [], []
    for _ in range(30):
        x = torch.rand(1, 64, requires_grad=True)
        began = time.perf_counter()
        function(x)
        seconds.append(time.perf_counter() - began)
        memory.append(process.memory_info().rss)
    print(function.__name__, sum(seconds) / 30, min(seconds), max(seconds), sum(memory) / 30)
