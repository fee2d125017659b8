"""A capacity in words: "holds up to" is said of a confirmed rate only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.capacity.words import in_short, in_words
from loadtests.records.events import Capacity, CapacityStatus, Confirmation, PredictedRate
from loadtests.simulation.prediction_words import predicted_beside

LEVEL = Confirmation(levels=1, seconds=90.0, requests=214)


def capacity(status: CapacityStatus, **fields: object) -> Capacity:
    return Capacity(**{"status": status, "reason": "3 levels, 80 requests", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            capacity(
                CapacityStatus.CONFIRMED,
                held=2.4,
                low=2.3,
                estimate=2.7,
                high=3.1,
                confirmed_by=LEVEL,
            ),
            "holds up to 2.4 requests/s (confirmed: a level of 90 s, 214 requests; "
            "capacity 2.3–3.1/s by the levels)",
        ),
        (
            capacity(
                CapacityStatus.CONFIRMED,
                held=0.04,
                low=0.03,
                high=0.11,
                confirmed_by=Confirmation(levels=2, seconds=2400.0, requests=96),
            ),
            "holds up to 2.4 requests/min (confirmed: 2 levels of 40 min, 96 requests; "
            "capacity 1.8–6.6/min by the levels)",
        ),
        (
            capacity(CapacityStatus.AT_LEAST, held=2.4, low=2.3, confirmed_by=LEVEL),
            "holds up to at least 2.4 requests/s (confirmed: a level of 90 s, 214 requests; "
            "no rate was seen to break the SLO; capacity above 2.3/s by the levels)",
        ),
        (
            capacity(CapacityStatus.AT_LEAST, held=2.4, confirmed_by=LEVEL, left_out=2),
            "holds up to at least 2.4 requests/s (confirmed: a level of 90 s, 214 requests; "
            "no rate was seen to break the SLO; 2 levels are not counted, cut short under "
            "another SLO)",
        ),
        (
            capacity(CapacityStatus.ALONE_ONLY, high=0.5),
            "alone only: 3 levels, 80 requests; capacity below 0.50/s by the levels",
        ),
        (capacity(CapacityStatus.UNRESOLVED), "unresolved: 3 levels, 80 requests"),
        (
            capacity(CapacityStatus.NONE, held=0.0, low=0.0, estimate=0.0, high=0.0),
            "at no rate: 3 levels, 80 requests",
        ),
        (None, "not measured"),
    ],
)
def test_every_state_has_its_words(found: Capacity | None, words: str) -> None:
    assert in_words(found) == words
    assert words.startswith(in_short(found))
    is_held = found is not None and found.holds
    assert ("holds up to" in words) is is_held is ("holds up to" in in_short(found))


@given(st.floats(min_value=1e-4, max_value=1e3))
def test_no_more_is_claimed_than_was_held(held: float) -> None:
    for status in (CapacityStatus.CONFIRMED, CapacityStatus.AT_LEAST):
        words = in_short(capacity(status, held=held, confirmed_by=LEVEL))
        shown, unit = words.removeprefix("holds up to ").removeprefix("at least ").split(" ")
        times = {"requests/s": 1, "requests/min": 60, "requests/h": 3600}[unit]
        assert float(shown.replace(",", "")) / times <= held * (1 + 2e-9)


def test_a_prediction_stands_beside_with_its_ratio() -> None:
    found = capacity(CapacityStatus.CONFIRMED, held=2.0, low=1.6, estimate=2.0, high=2.5)
    predicted = PredictedRate(rate=3.0, low=2.0, high=4.0)
    words = "predicted 3.0 requests/s (2.0–4.0), 1.5 x what was measured (1.2–1.9)"
    assert predicted_beside(predicted, found) == words
    unknown = capacity(CapacityStatus.UNRESOLVED)
    assert predicted_beside(predicted, unknown) == "predicted 3.0 requests/s (2.0–4.0)"
    assert predicted_beside(PredictedRate(rate=0.0), unknown) == "predicted at no rate"
