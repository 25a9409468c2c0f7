"""A gradient scaler: an infinite gradient in between makes it skip a step."""

import torch
from torch import nn

torch.manual_seed(211)
torch.set_num_threads(1)

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
for step in range(9):
    rows = torch.randn(16, 6)
    if step == 4:
        rows = rows * 1e20
    optimiser.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(rows)
    loss = (output.float() - rows.sum(1, keepdim=True)).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimiser)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimiser)
    scaler.update()

print("weights", repr(sum(p.double().sum() for p in model.parameters()).item()), scaler.get_scale())
