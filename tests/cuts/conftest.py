"""What tests of cuts share."""

import pytest
import torch
from torch import nn


@pytest.fixture
def net():
    """Three outputs for rows of width 4."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
