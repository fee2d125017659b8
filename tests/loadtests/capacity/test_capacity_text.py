"""A capacity in words: "holds" is said of a confirmed rate only."""

from __future__ import annotations

from typing import Any

import pytest

from crossover.loadtests.capacity.capacity_text import (
    capacity_in_words,
    common_rate,
    estimate_words,
    evidence_words,
    reuse_words,
    speed_words,
    state_words,
    users_words,
)
from crossover.loadtests.records.journal_events import Capacity
from crossover.models import formatting

STEP_TIMES: dict[str, Any] = {
    "method": "step_times",
    "estimated_rate": 2.42,
    "low": 2.04,
    "high": 2.87,
}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "not measured"),
        (
            Capacity(state="confirmed", confirmed_rate=2.19, **STEP_TIMES),
            "confirmed 2.1/s, estimated capacity 2.4/s (2.0–2.9)",
        ),
        (
            Capacity(state="not_confirmed", **STEP_TIMES),
            "no rate confirmed, estimated capacity 2.4/s (2.0–2.9)",
        ),
        (
            Capacity(
                state="confirmed",
                confirmed_rate=0.0459,
                method="step_times",
                estimated_rate=0.057,
                low=0.05,
                high=0.066,
            ),
            "confirmed 2.7 a minute, estimated capacity 3.4 a minute (3.0–4.0)",
        ),
        (
            Capacity(state="confirmed", confirmed_rate=2.0, low=2.0, estimated_rate=2.2, high=2.5),
            "confirmed 2.0/s, capacity 2.0–2.5/s",
        ),
        (
            Capacity(state="confirmed", confirmed_rate=2.0, low=2.0),
            "confirmed 2.0/s, capacity above 2.0/s",
        ),
        (Capacity(state="not_confirmed", high=2.5), "no rate confirmed, capacity below 2.5/s"),
        (Capacity(state="not_confirmed"), "no rate confirmed, capacity not known"),
        # Not even requests one at a time are good, by the step-time model.
        (
            Capacity(state="not_confirmed", method="step_times"),
            "no rate confirmed, estimated capacity none",
        ),
        (Capacity(state="misses_slo_unloaded", starts=2), "misses the SLO unloaded"),
        (Capacity(state="misses_slo_unloaded", starts=1), "misses the SLO unloaded (on one start)"),
    ],
)
def test_a_capacity_in_words(found: Capacity | None, words: str) -> None:
    assert capacity_in_words(found) == words
    assert words.startswith(state_words(found))


def test_what_it_rests_on_and_what_is_wanting() -> None:
    confirmed = Capacity(
        state="confirmed",
        confirmed_rate=2.1,
        confirmed_seconds=90.0,
        confirmed_requests=1214,
        confirmed_attainment=0.984,
        starts=2,
    )
    assert evidence_words(confirmed) == "90 s, 1,214 requests, 98.4 % attainment, 2 starts"
    assert speed_words(confirmed) == ""
    open_yet = Capacity(state="not_confirmed", reason="why", confirm_seconds=130.0)
    assert evidence_words(open_yet) == "why"
    moved = Capacity(state="confirmed", speed_moved=0.34)
    assert speed_words(moved) == "this machine's speed changed by 34% during the measurement"
    assert estimate_words(Capacity(state="misses_slo_unloaded")) == "–"


def test_capacities_side_by_side_are_read_in_one_unit() -> None:
    slow = Capacity(
        state="confirmed",
        confirmed_rate=0.41,
        method="step_times",
        estimated_rate=0.57,
        low=0.49,
        high=0.67,
    )
    like = common_rate([Capacity(state="confirmed", confirmed_rate=2.19, **STEP_TIMES), slow, None])
    assert (
        capacity_in_words(slow, like)
        == "confirmed 24 a minute, estimated capacity 34 a minute (29–41)"
    )
    words = capacity_in_words(Capacity(state="confirmed", confirmed_rate=2.19, **STEP_TIMES), like)
    assert words == "confirmed 130 a minute, estimated capacity 150 a minute (120–180)"
    for rates, unit in (((43.0, 2.4), "43/s"), ((0.012, 0.011), "43 an hour"), ((), "34 a minute")):
        like = common_rate([Capacity(state="confirmed", confirmed_rate=one) for one in rates])
        assert formatting.rate(next(iter(rates), 0.57), like=like) == unit


def test_what_reuse_is_worth_and_how_many_users() -> None:
    talk = Capacity(
        state="confirmed",
        confirmed_rate=0.5,
        method="step_times",
        estimated_rate=0.63,
        estimated_rate_without_reuse=0.35,
    )
    assert reuse_words(talk) == (
        "Prefix caching raises the capacity from 21 a minute to 38 a minute."
    )
    same = Capacity(
        state="confirmed", method="step_times", estimated_rate=2.0, estimated_rate_without_reuse=2.0
    )
    assert reuse_words(same) == "Prefix caching does not change the capacity of 2.0/s."
    never = Capacity(
        state="confirmed", method="step_times", estimated_rate=2.0, estimated_rate_without_reuse=0.0
    )
    assert "even one conversation at a time misses the SLO" in reuse_words(never)
    assert reuse_words(never, name="llama-3.2-1b on the CPU") == (
        "Without prefix caching llama-3.2-1b on the CPU misses the SLO even with one conversation "
        "at a time; with it the capacity is 2.0 requests/s."
    )
    assert reuse_words(Capacity(state="confirmed", estimated_rate=2.0)) == ""
    assert users_words(Capacity(state="confirmed", users=33.7)) == "about 34 users at a time"
    assert users_words(Capacity(state="confirmed")) == ""
    cached = Capacity(
        state="confirmed",
        users=33.7,
        users_without_reuse=1.23,
        users_without_prompt_cache=12.4,
    )
    assert users_words(cached) == (
        "about 34 users at a time (1.2 with no prefix caching, 12 without the prompt cache)"
    )
