"""Which rate is next where no law tells the limit."""

from __future__ import annotations

import pytest

from loadtests.campaign.cell_runner import NARROW, next_rate


@pytest.mark.parametrize("limit", [0.11, 0.9, 1.0, 3.7, 40.0])
def test_it_ends_with_both_sides_of_the_limit_within_a_quarter(limit: float) -> None:
    tried: list[tuple[float, bool]] = []
    while (rate := next_rate(tried, 1.0)) is not None and (rate, True) not in tried:
        tried.append((rate, rate <= limit))
    high = min(at for at, is_up in tried if not is_up)
    assert rate is not None and rate <= limit < high <= rate * NARROW * 1.001
    assert len(tried) <= 9


def test_nothing_is_tried_where_requests_hardly_meet() -> None:
    tried: list[tuple[float, bool]] = []
    while (rate := next_rate(tried, 1.0)) is not None:
        tried.append((rate, False))
    assert min(rate for rate, _ in tried) == pytest.approx(1 / 32)


def test_a_level_that_held_above_one_that_failed_is_luck() -> None:
    assert next_rate([(1.8, True), (2.0, False), (2.5, True)], 1.0) == 1.8
