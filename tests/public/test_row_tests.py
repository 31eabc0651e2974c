"""Rows of two forward passes are compared number by number, those that are not finite too."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor

from opacus_bc.public.row_tests import Rows, Run, alike, first_difference

ROWS = Rows(count=3)


def run(*outputs: Tensor) -> Run:
    return Run([(f"layer {place}", output) for place, output in enumerate(outputs)])


def rows(*values: float) -> Tensor:
    return torch.tensor([[value] for value in values])


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("tolerance", [0.0, 1e-5])
def test_a_number_that_is_not_finite_here_and_there_is_the_same(value: float, tolerance: float) -> None:
    assert alike(rows(value, 1.0), rows(value, 1.0), tolerance)


@pytest.mark.parametrize(
    ("left", "right"),
    [(nan, 0.0), (inf, -inf), (inf, torch.finfo().max), (-inf, torch.finfo().min), (nan, inf)],
)
@pytest.mark.parametrize("tolerance", [0.0, 1e-5, 10.0])
def test_a_number_that_is_not_finite_is_like_no_other(left: float, right: float, tolerance: float) -> None:
    assert not alike(rows(left, 1.0), rows(right, 1.0), tolerance)
    assert not alike(rows(right, 1.0), rows(left, 1.0), tolerance)


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_one_number_that_is_not_finite_hides_no_difference_elsewhere(value: float) -> None:
    """An infinity that counted as the largest entry would let every finite difference pass."""
    before, after = rows(value, 1.0, 5.0), rows(value, 2.0, 5.0)
    assert first_difference(run(before), run(after), ROWS, 2, tolerance=1e-5) == "layer 0"


def test_differences_within_the_tolerance_of_the_largest_finite_entry_pass() -> None:
    before, after = rows(100.0, 1.0, 5.0), rows(100.0, 1.0005, 9.0)
    assert first_difference(run(before), run(after), ROWS, 2, tolerance=1e-5) is None
    assert first_difference(run(before), run(after), ROWS, 2) == "layer 0"
    assert first_difference(run(before), run(after), ROWS, 2, tolerance=1e-6) == "layer 0"


def test_only_other_rows_count_and_whole_numbers_have_no_tolerance() -> None:
    same, moved = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert first_difference(run(same), run(moved), ROWS, 2) is None
    assert first_difference(run(same), run(moved), ROWS, 0, tolerance=0.5) == "layer 0"
    assert first_difference(run(same, same), run(same, moved), ROWS, 1) == "layer 1"
    assert first_difference(run(same > 2), run(moved > 3), ROWS, 0) is None


def test_runs_of_other_layers_or_shapes_are_not_compared() -> None:
    before = run(rows(1.0, 2.0, 3.0))
    assert first_difference(before, run(), ROWS, 0) is None
    assert first_difference(before, run(torch.zeros(3, 2)), ROWS, 0) is None
