from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover.models import formatting
from crossover.models.formatting import GIB, NOT_MEASURED

EXPECTED: dict[str, list[tuple[Any, str]]] = {
    "seconds": [
        *((0.0834, "83 ms"), (2.0, "2.0 s"), (0.9999, "1.0 s"), (0.99, "990 ms")),
        *((0.00099, "990 µs"), (59.6, "60 s"), (180, "3.0 min"), (7300, "2.0 h")),
        *((math.inf, "never"), (0, "0 ms")),
    ],
    "significant": [
        *((0.0999, "0.10"), (0.824, "0.82"), (9.96, "10"), (1234.6, "1,235")),
        *(((12.34, 3), "12.3"), (0.000123, "0.00012"), (0.0, "0")),
    ],
    "requests": [
        *((0.0, "0 requests/s"), (2.4, "2.4 requests/s"), (0.57, "34 requests a minute")),
        *((0.0999, "6.0 requests a minute"), (0.044, "2.6 requests a minute")),
        *((1 / 60, "1.0 requests a minute"), (0.0002, "0.72 requests an hour")),
    ],
    "rate": [(2.4, "2.4/s"), (0.57, "34 a minute"), (0.0125, "45 an hour")],
    "load": [
        ((2.4, 7), "2.4/s"),
        ((None, 8), "8 users"),
        ((None, 1), "single stream"),
        (None, "single stream"),
    ],
    "rate_interval": [
        *(((1.71, 1.943), "1.7–2.0/s"), ((None, 0.05), "below 3.0 a minute")),
        *(((0.559, None), "above 33 a minute"), ((None, None), NOT_MEASURED)),
    ],
    "rate_with_interval": [
        *(((1.824, 1.71, 1.943), "1.8/s (1.7–2.0)"), ((1.8, 1.71, None), "above 1.7/s")),
        # In the unit of its rate.
        ((0.0044, 0.0029, 0.13), "16 an hour (10–470)"),
        *(((0.5, 0.4, 2.0), "30 a minute (24–120)"), ((None, None, None), NOT_MEASURED)),
        ((1.2, None, None, 0.5), "72 a minute"),
    ],
    "size": [
        *((0, "0 B"), (1536, "1.5 KiB"), (400 << 20, "400 MiB"), (1023 << 20, "1023 MiB")),
        *((999.9 * (1 << 20), "1000 MiB"), (1.2 * GIB, "1.2 GiB"), (3 << 39, "1.5 TiB")),
    ],
    "limit": [(0.025, "25 ms"), (0.45, "450 ms"), (2.0, "2 s"), (4.5, "4.5 s"), (30.0, "30 s")],
    "duration": [
        *((0, "0 s"), (0.4, "1 s"), (59, "59 s"), (60, "1 min"), (95, "1 min 35 s")),
        *((660, "11 min"), (7300, "2 h 1 min")),
    ],
    # Never rounded to all or none.
    "share": [
        *((1.0, "100 %"), (0.9999, ">99.9 %"), (0.99, "99 %"), (0.0, "0 %"), (0.00872, "0.87 %")),
    ],
    "parameters": [(134_515_008, "135M"), (1_235_814_400, "1.2B"), (70_553_706_496, "71B")],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_numbers_are_formatted(name: str) -> None:
    for given_, text in EXPECTED[name]:
        arguments = given_ if isinstance(given_, tuple) else (given_,)
        assert getattr(formatting, name)(*arguments) == text


def test_a_log_keeps_the_unit_of_its_first_rates() -> None:
    units = formatting.RateUnits()
    assert units.keep("cpu") is None and units.keep("cpu", [0.0, None]) is None
    assert formatting.rate(0.147, like=units.keep("cpu", [1.3, 1.2])) == "0.15/s"
    assert formatting.rate(1.3, like=units.keep("gpu", [0.147, 0.62])) == "78 a minute"
    assert formatting.rate(0.147, like=units.keep("cpu", [0.147])) == "0.15/s"
    later = formatting.RateUnits()
    later.devices_with_several.add("cpu")
    assert later.keep("cpu", [0.147], [None, 1.3, 0.2]) == 1.3  # as the log has them, whatever came
    several = formatting.RateUnits()
    several.devices_with_several.add("cpu")  # a larger model may follow
    assert formatting.rate(1.3, like=several.keep("cpu", [1.3])) == "78 a minute"
    several.devices_with_several.add("gpu")
    assert formatting.rate(120.0, like=several.keep("gpu", [120.0])) == "120/s"


def test_a_bound_is_rounded_to_its_own_side() -> None:
    for value, digits, down, up in (
        *((5.65, 2, "5.6", "5.7"), (637 / 60, 2, "10", "11"), (9.96, 2, "9.9", "10")),
        *((0.0999, 2, "0.099", "0.10"), (123.7, 2, "123", "124"), (5.6, 3, "5.60", "5.60")),
        *((0.07 * 60, 2, "4.2", "4.2"), (0.29 * 100, 2, "29", "29")),  # 28.999999999999996
    ):
        assert formatting.significant(value, digits, "down") == down
        assert formatting.significant(value, digits, "up") == up


@given(st.floats(min_value=1e-6, max_value=1e6), st.integers(2, 4))
def test_a_bound_stays_one_and_is_within_a_digit(value: float, digits: int) -> None:
    down, up = (
        float(formatting.significant(value, digits, rounded).replace(",", ""))
        for rounded in ("down", "up")
    )
    digit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits) if value < 10**digits else 1.0
    assert down <= value * (1 + 2e-9) and up >= value * (1 - 2e-9)
    assert up - down <= 1.0000001 * digit


def test_missing_values_are_marked_and_non_numbers_refused() -> None:
    for name in ("seconds", "rate", "size", "share", "count"):
        assert getattr(formatting, name)(None) == NOT_MEASURED
    with pytest.raises(ValueError, match="no measured number"):
        formatting.significant(math.inf)
