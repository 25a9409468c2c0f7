"""Large answers ask for huge pages, and are ordinary tensors."""

import subprocess
import sys

import pytest
import torch

import multiback as mb
from multiback.methods import pages
from multiback.planner import LARGE_BYTES

CPU = torch.device("cpu")
LARGE = (LARGE_BYTES // 4 + 1000,)


@pytest.fixture
def asked(monkeypatch):
    """Collects what the system is asked for."""
    found = []
    monkeypatch.setattr(pages, "_advise", lambda: lambda *arguments: found.append(arguments) or 0)
    return found


def test_large_tensors_ask_for_whole_pages_of_their_own(asked):
    made = pages.fresh(LARGE, torch.float32, CPU)
    ((start, length, advice),) = asked
    assert advice == 14
    assert start % 4096 == 0
    assert made.data_ptr() <= start
    assert start + length <= made.data_ptr() + made.nbytes
    assert length > made.nbytes - 2 * 4096


def test_small_tensors_ask_for_nothing(asked):
    assert pages.fresh((3, 4), torch.float64, CPU).shape == (3, 4)
    assert asked == []


def test_a_large_jacobian_is_written_into_such_a_tensor(asked):
    layer = torch.nn.Linear(512, 512)
    losses = layer(torch.rand(4, 512)).sum(1)
    found = mb.jac(losses, layer.weight, method="partition", retain_graph=True)
    assert len(asked) == 1
    assert torch.allclose(found, mb.jac(losses, layer.weight, method="loop"), rtol=1e-4)


def test_an_environment_variable_forbids_it():
    code = "from multiback.methods import pages; print(pages._advise())"
    environment = {"MULTIBACK_HUGE_PAGES": "0", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
