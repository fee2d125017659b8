"""A capacity in words: "holds" is said of a confirmed rate only."""

from __future__ import annotations

from typing import Any

import pytest

from loadtests.analysis.capacity_text import (
    common_rate,
    held_words,
    in_words,
    limit,
    speed_words,
    state_words,
)
from loadtests.records.journal_events import Capacity
from models import formatting

LAW: dict[str, Any] = {"method": "law", "limit": 2.42, "low": 2.04, "high": 2.87}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "not measured"),
        (
            Capacity(state="holds", held=2.19, **LAW),
            "confirmed 2.1/s, estimated capacity 2.4/s (2.0–2.9)",
        ),
        (
            Capacity(state="no_rate_confirmed", **LAW),
            "no rate confirmed, estimated capacity 2.4/s (2.0–2.9)",
        ),
        (
            Capacity(state="holds", held=0.0459, method="law", limit=0.057, low=0.05, high=0.066),
            "confirmed 160 an hour, estimated capacity 210 an hour (180–240)",
        ),
        (
            Capacity(state="holds", held=2.0, low=2.0, limit=2.2, high=2.5),
            "confirmed 2.0/s, capacity 2.0–2.5/s",
        ),
        (Capacity(state="holds", held=2.0, low=2.0), "confirmed 2.0/s, capacity above 2.0/s"),
        (Capacity(state="no_rate_confirmed", high=2.5), "no rate confirmed, capacity below 2.5/s"),
        (Capacity(state="no_rate_confirmed"), "no rate confirmed, capacity not known"),
        # Not even requests one at a time are good, by the law.
        (
            Capacity(state="no_rate_confirmed", method="law"),
            "no rate confirmed, estimated capacity none",
        ),
        (Capacity(state="not_even_alone", starts=2), "misses the SLO unloaded"),
        (Capacity(state="not_even_alone", starts=1), "misses the SLO unloaded (on one start)"),
    ],
)
def test_a_capacity_in_words(found: Capacity | None, words: str) -> None:
    assert in_words(found) == words
    assert words.startswith(state_words(found))


def test_what_it_rests_on_and_what_is_wanting() -> None:
    held = Capacity(
        state="holds", held=2.1, held_seconds=90.0, held_requests=1214, held_share=0.984, starts=2
    )
    assert held_words(held) == "90 s, 1,214 requests, 98.4 % attainment, 2 starts"
    assert speed_words(held) == ""
    open_yet = Capacity(state="no_rate_confirmed", reason="why", confirm_seconds=130.0)
    assert held_words(open_yet) == "why"
    moved = Capacity(state="holds", speed_moved=0.34)
    assert speed_words(moved) == "this machine's speed changed by 34% during the measurement"
    assert limit(Capacity(state="not_even_alone")) == "–"


def test_capacities_side_by_side_are_read_in_one_unit() -> None:
    slow = Capacity(state="holds", held=0.41, method="law", limit=0.57, low=0.49, high=0.67)
    like = common_rate([Capacity(state="holds", held=2.19, **LAW), slow, None])
    assert in_words(slow, like) == "confirmed 24 a minute, estimated capacity 34 a minute (29–41)"
    words = in_words(Capacity(state="holds", held=2.19, **LAW), like)
    assert words == "confirmed 130 a minute, estimated capacity 150 a minute (120–180)"
    for rates, unit in (((43.0, 2.4), "43/s"), ((0.12, 0.011), "430 an hour"), ((), "34 a minute")):
        like = common_rate([Capacity(state="holds", held=one) for one in rates])
        assert formatting.rate(next(iter(rates), 0.57), like=like) == unit
