"""SLOs that cannot be, bounds of a share of good requests, and percentiles."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.levels.percentiles import distribution
from crossover.loadtests.levels.slo_attainment import design_effect, wilson
from crossover.loadtests.records.journal_events import LevelStarted
from crossover.loadtests.records.level_plan import LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.capacity.slo import SLO_PRESETS, Slo, parse_slo, requests_to_hold

CHAT = SLO_PRESETS["chat"]


def test_wilson_equals_the_published_interval() -> None:
    # Newcombe (1998), table I, 81 of 263: 0.2553 to 0.3662 at 95 % two-sided, which is 97.5 % on
    # each side.
    assert wilson(81, 263, 0.975) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20, 0.975) == pytest.approx((0.0, 0.1611), abs=5e-5)
    # By hand, one of one: z^2 = 2.7055, bounds 1 / (1 + z^2) and 1.
    assert wilson(1, 1) == pytest.approx((1 / 3.7055, 1.0), rel=1e-4)
    assert wilson(0, 0) == (0.0, 1.0), "nothing measured is nothing known"


def test_bounds_are_wrong_no_more_often_than_stated() -> None:
    """At a true share of exactly 90 %, each bound is on the wrong side 5 % of the time."""
    counts = np.random.default_rng(0).binomial(400, 0.9, 4000).tolist()
    bounds = [wilson(good, 400) for good in counts]
    assert 0.02 < sum(low >= 0.9 for low, _ in bounds) / 4000 < 0.065
    assert 0.02 < sum(high < 0.9 for _, high in bounds) / 4000 < 0.065


def test_independent_requests_count_as_one_each_and_neighbours_do_not() -> None:
    rng = np.random.default_rng(1)
    independent = [design_effect(rng.random(400) < 0.9) for _ in range(200)]
    assert 1.3 <= np.median(independent) < 2.0
    clumps = [design_effect(np.repeat(rng.random(40) < 0.9, 10)) for _ in range(200)]
    assert 6.0 < np.median(clumps) < 15.0, "ten in a row are bad together"
    assert design_effect(np.ones(100, bool)) == design_effect(np.ones(0, bool)) == 1.3
    assert design_effect(np.array([True, False] * 5)) == 1.3, "too few to tell"


@pytest.mark.parametrize(
    ("slo", "fewest"),
    [
        (CHAT, 52),
        (Slo("p99", ttft_seconds=1.0, target=0.99), 268),
        (Slo("p90", ttft_seconds=1.0, target=0.9), 25),
        (Slo("p50", ttft_seconds=1.0, target=0.5), 3),
    ],
)
def test_the_fewest_requests_that_can_meet_the_target(slo: Slo, fewest: int) -> None:
    assert requests_to_hold(slo) == fewest
    assert wilson(fewest, fewest)[0] >= slo.target > wilson(fewest - 1, fewest - 1)[0]


@pytest.mark.parametrize("field", ["ttft_seconds", "tpot_seconds", "target", "confidence"])
def test_an_slo_that_cannot_be_is_refused_with_its_key(field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({"name": "x", "ttft_seconds": 1, "tpot_seconds": None, field: 0.0}, Slo)


def test_percentiles_need_three_observations_beyond_them() -> None:
    assert distribution(np.ones(299)).p99 is None
    assert distribution(np.ones(300)).p99 == 1.0
    five = distribution(np.arange(5.0))
    assert five.p50 is None and five.median_or_mean == five.mean == 2.0
    nothing = distribution(np.empty(0))
    assert (nothing.mean, nothing.median_or_mean) == (None, None)


def test_percentiles_are_order_statistics() -> None:
    found = distribution(np.arange(1000.0, 0.0, -1.0))
    assert (found.p50, found.p90, found.p95, found.p99) == (500.0, 900.0, 950.0, 990.0)
    assert found.mean == 500.5 and found.median_or_mean == 500.0


def test_failures_are_infinitely_late_and_never_dropped() -> None:
    found = distribution(np.array([1.0] * 94 + [np.inf] * 6 + [np.nan] * 50))
    assert (found.mean, found.p90, found.p95) == (1.0, 1.0, np.inf)


def test_limits_of_ones_own_are_joined_by_and():
    slo = parse_slo("ttft=2, tpot=0.1,ttfa=10,e2e=60,target=0.9")
    assert (slo.ttft_seconds, slo.tpot_seconds, slo.target) == (2.0, 0.1, 0.9)
    assert (slo.ttfa_seconds, slo.e2e_seconds) == (10.0, 60.0)
    assert parse_slo("chat") is SLO_PRESETS["chat"] and slo.tighter(2).ttfa_seconds == 5.0
    started = LevelStarted(cell="c", level="l", plan=LevelPlan(rate=1.0, window_seconds=9.0))
    times = [(1, 2, 5), (1, 4, 5), (1, 2, 8), (3, 3, 5), (1, None, 5)]  # first, answer, last
    records = [
        RequestRecord(
            cell="c", level="l", index=index, scheduled_seconds=0.0, first_content_seconds=first,
            first_answer_seconds=answer, last_content_seconds=last, ended_seconds=last,
            content_seconds=[first, last], status=200,
        )
        for index, (first, answer, last) in enumerate(times)
    ]  # fmt: skip
    level = Level.of(records, started)
    for text, good in {
        "ttft=2": [1, 1, 1, 0, 1],
        "ttfa=3": [1, 0, 1, 1, 0],
        "e2e=6": [1, 1, 0, 1, 1],
        "ttft=2,ttfa=3,e2e=6": [1, 0, 0, 0, 0],
    }.items():
        assert parse_slo(text).met_by(level).astype(int).tolist() == good, text


@pytest.mark.parametrize("text", ["fast", "ttft=", "ttft=x", "ttft=-1", "speed=2", "target=2"])
def test_an_slo_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=f"{text!r}"):
        parse_slo(text)
