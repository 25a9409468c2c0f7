"""Peak and held bytes equal hand counts to the byte."""

import gc

import numpy as np
import pytest
import torch
from torch import nn

from multiback.measure import memory

MIB = 1 << 20


def test_a_one_mebibyte_tensor_reads_as_one_mebibyte():
    assert memory.self_test() == ""


def test_the_self_test_says_what_it_read_where_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(memory, "live_bytes", lambda _call: memory.Bytes(peak=3, held=1))
    assert memory.self_test() == "a tensor of 1048576 bytes read as peak 3, held 1"


def test_the_peak_is_the_largest_sum_of_what_lives_at_once():
    def call():
        first = torch.empty(MIB, dtype=torch.uint8)
        del first
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        third = torch.empty(MIB, dtype=torch.uint8)
        del second, third

    assert memory.live_bytes(call) == memory.Bytes(peak=3 * MIB, held=0)


def test_what_stays_alive_counts_as_held():
    kept = []
    result = memory.live_bytes(lambda: kept.append(torch.empty(MIB, dtype=torch.uint8)))
    assert result == memory.Bytes(peak=MIB, held=MIB)


def test_garbage_in_cycles_is_not_held():
    def call():
        cycle = [torch.empty(MIB, dtype=torch.uint8)]
        cycle.append(cycle)

    gc.collect()
    assert memory.live_bytes(call) == memory.Bytes(peak=MIB, held=0)


def test_the_backward_of_a_linear_layer_peaks_where_arithmetic_says():
    linear = nn.Linear(64, 32)
    data = torch.rand(16, 64)
    output_bytes, weight_bytes, bias_bytes = 16 * 32 * 4, 64 * 32 * 4, 32 * 4

    def call():
        linear.zero_grad()
        linear(data).backward(torch.ones(16, 32))

    result = memory.live_bytes(call)
    assert result.held == weight_bytes + bias_bytes
    # at the peak: both gradients, and the cotangent beside the output or alone
    assert result.held + output_bytes <= result.peak <= result.held + 2 * output_bytes
    linear.zero_grad()
    assert memory.live_bytes(call) == result


@pytest.mark.skipif(memory.high_water_bytes(lambda: None) is None, reason="needs a writable /proc/self/clear_refs")
def test_the_high_water_mark_sees_numpy_which_allocation_events_do_not():
    def call():
        np.ones(32 * MIB, dtype=np.uint8)

    assert memory.live_bytes(call).peak == 0
    with memory.pinned_allocator():
        seen = memory.high_water_bytes(call)
    assert seen == pytest.approx(32 * MIB, rel=0.1)


def test_the_high_water_mark_is_none_where_the_system_cannot_tell(monkeypatch):
    def missing(_name):
        raise KeyError

    monkeypatch.setattr(memory, "_status_bytes", missing)
    assert memory.high_water_bytes(lambda: None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_cuda_bytes_come_from_its_own_allocator():
    result = memory.live_bytes(lambda: torch.empty(MIB, dtype=torch.uint8, device="cuda"), "cuda")
    assert result == memory.Bytes(peak=MIB, held=0)
