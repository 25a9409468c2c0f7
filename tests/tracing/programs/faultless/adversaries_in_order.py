"""Two convolutional adversaries trained in turns: real batch, detached forged batch, step; then the other one."""

import torch
from torch import nn

torch.manual_seed(206)
torch.set_num_threads(1)

painter = nn.Sequential(
    nn.ConvTranspose2d(6, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 5), nn.Tanh()
)
critic = nn.Sequential(nn.Conv2d(1, 8, 5), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Flatten())
criterion = nn.BCEWithLogitsLoss()
for_painter = torch.optim.Adam(painter.parameters(), lr=1e-3, betas=(0.5, 0.999))
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))

for _step in range(6):
    critic.zero_grad()
    genuine = torch.rand(10, 1, 8, 8) * 2 - 1
    genuine_loss = criterion(critic(genuine), torch.full((10, 1), 0.9))
    genuine_loss.backward()
    forged = painter(torch.randn(10, 6, 1, 1))
    forged_loss = criterion(critic(forged.detach()), torch.zeros(10, 1))
    forged_loss.backward()
    for_critic.step()

    painter.zero_grad()
    painter_loss = criterion(critic(forged), torch.ones(10, 1))
    painter_loss.backward()
    for_painter.step()

print("weights", repr(sum(p.double().sum() for net in (painter, critic) for p in net.parameters()).item()))
