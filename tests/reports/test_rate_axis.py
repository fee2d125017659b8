"""The ticks of an axis of rates: round in the unit that they are read in, and not too near."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import formatting
from reports.charts.parts import rate_ticks


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.3, 8.0, ["0.5/s", "1.0/s", "2.0/s", "5.0/s"]),
        (0.015, 0.3, ["1.0/min", "2.0/min", "0.10/s", "0.20/s"]),
        (0.0005, 0.012, ["2.0/h", "5.0/h", "10/h", "20/h"]),
    ],
)
def test_ticks_are_round_in_their_unit(low: float, high: float, texts: list[str]) -> None:
    ticks = [formatting.rate(tick) for tick in rate_ticks(low, high)]
    assert [text.replace("0.50", "0.5") for text in ticks] == texts


@given(st.floats(1e-4, 100.0), st.floats(1.5, 1e5))
def test_there_are_some_and_not_too_many(low: float, times: float) -> None:
    ticks = rate_ticks(low, low * times)
    assert ticks == sorted(ticks) and len(ticks) <= 12
    assert all(low <= tick <= low * times * (1 + 1e-9) for tick in ticks)
    assert len(ticks) >= (2 if times > 6 else 0)
    assert all(b / a > 1.05 for a, b in zip(ticks, ticks[1:], strict=False))
