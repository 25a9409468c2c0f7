"""Gradients are compared on the scale of their norms, and multiples are recognised."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multiback.measure.agreement import FLOAT64_FLOOR, difference_between, factor_between, gap_between, tolerance_of

ONES = [torch.ones(3), torch.ones(2)]


def test_equal_gradients_differ_by_nothing():
    assert difference_between(ONES, [tensor.clone() for tensor in ONES]) == 0.0


def test_the_difference_is_relative_to_the_norm_of_each_tensor():
    assert difference_between([torch.full((4,), 1.1)], [torch.ones(4)]) == pytest.approx(0.1, rel=1e-5)


def test_a_tensor_that_is_rounding_noise_counts_for_nothing_in_float64_and_a_small_real_one_does():
    large = torch.ones(100, dtype=torch.float64)
    noise, other = (torch.tensor([value], dtype=torch.float64) for value in (3e-16, -2e-16))
    assert gap_between([large, noise], [large, other], floor=FLOAT64_FLOOR).agrees
    small, half = (torch.tensor([value], dtype=torch.float64) for value in (1e-9, 0.5e-9))
    gap = gap_between([large, half], [large, small], floor=FLOAT64_FLOOR)
    assert not gap.agrees
    assert (gap.worst, gap.difference) == (1, pytest.approx(0.5))


def test_each_tensor_is_held_to_the_tolerance_of_its_own_dtype():
    coarse, fine = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
    assert gap_between([coarse * 1.02, fine], [coarse, fine]).agrees
    assert not gap_between([coarse, fine * 1.02], [coarse, fine]).agrees


def test_a_missing_gradient_is_a_difference_of_one():
    assert difference_between([torch.zeros(3)], [torch.ones(3)]) == pytest.approx(1.0)


def test_something_where_nothing_is_expected_is_infinitely_far():
    assert difference_between([torch.ones(3)], [torch.zeros(3)]) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_never_equal(bad):
    found = [torch.tensor([1.0, bad])]
    assert difference_between(found, [torch.ones(2)]) == math.inf
    assert difference_between(found, [torch.tensor([1.0, bad])]) in (0.0, math.inf)
    assert factor_between(found, [torch.ones(2)]) is None


@given(st.floats(0.01, 100.0), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_a_multiple_is_recognised_with_its_factor(factor, dtype):
    expected = [torch.linspace(0.1, 1, 7, dtype=dtype), torch.linspace(-1, 1, 5, dtype=dtype)]
    found = [(tensor.double() * factor).to(dtype) for tensor in expected]
    assert factor_between(found, expected) == pytest.approx(factor, rel=0.02)


def test_what_is_no_multiple_has_no_factor():
    assert factor_between([torch.tensor([1.0, 2.0])], [torch.tensor([2.0, 1.0])]) is None
    assert factor_between([torch.zeros(2)], [torch.ones(2)]) is None
    assert factor_between([torch.ones(2)], [torch.zeros(2)]) is None


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norms_beyond_the_range_of_squares_do_not_overflow_or_vanish(scale):
    expected = [torch.full((4,), scale)]
    found = [torch.full((4,), scale * 1.5)]
    assert difference_between(found, expected) == pytest.approx(0.5, rel=1e-4)


def test_complex_gradients_are_compared_too():
    expected = [torch.tensor([1 + 1j, 2 - 1j])]
    assert difference_between([tensor * 1j for tensor in expected], expected) == pytest.approx(math.sqrt(2), rel=1e-5)
    assert factor_between([tensor * 3 for tensor in expected], expected) == pytest.approx(3.0)


def test_tolerances_follow_the_dtype():
    known = [
        tolerance_of(torch.ones(1, dtype=d)) for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    ]
    assert known == sorted(known)
    assert tolerance_of(torch.ones(1, dtype=torch.complex64)) == 1e-4
