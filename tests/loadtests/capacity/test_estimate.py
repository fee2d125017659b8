"""What levels say about the capacity."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.capacity.estimate import Level, estimate, level_of, pooled
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.slo import Slo

NINE = Slo("nine", 0.5, None, target=0.9)


SINGLE_STREAM = Level(rate=None, due=5, good=5, duration_seconds=2.55, mean_e2e_seconds=0.51)


def level(rate, good, due, seconds=100.0, **changes):
    return Level(rate=rate, good=good, due=due, duration_seconds=seconds, **changes)


def test_a_level_that_is_plainly_broken_bounds_the_capacity():
    found = estimate(
        [SINGLE_STREAM, level(4.0, 400, 400), level(8.0, 0, 800)], SearchConfig(), NINE
    )
    assert 3.0 < found.low and found.high < 8.01
    assert found.status == "unresolved"  # two levels so far apart do not say where between
    only_broken = estimate([level(8.0, 0, 800)], SearchConfig(), NINE)
    assert (
        only_broken.low == 0.0
        and only_broken.estimate is None
        and only_broken.holds_at_any_rate is None
    )


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10), st.integers(1, 100), st.floats(0, 1)), min_size=1, max_size=15
    )
)
@settings(max_examples=60, deadline=None)
def test_pooled_shares_never_rise_with_the_rate_and_lose_no_request(shape):
    levels = [level(rate, int(share * due), due) for rate, due, share in shape]
    found = pooled(levels)
    shares = [good / due for _, good, due in found]
    assert all(a >= b - 1e-12 for a, b in zip(shares, shares[1:], strict=False))
    assert [rate for rate, _, _ in found] == sorted({rate for rate, _, _ in shape})


def test_order_of_levels_does_not_matter():
    levels = [SINGLE_STREAM, level(4.0, 400, 400), level(6.0, 520, 600), level(8.0, 300, 800)]
    one, other = (
        estimate(levels, SearchConfig(), NINE),
        estimate(levels[::-1], SearchConfig(), NINE),
    )
    assert (one.low, one.estimate, one.high) == pytest.approx(
        (other.low, other.estimate, other.high), rel=1e-9
    )


def test_a_summary_becomes_a_level():
    from loadtests.metrics.level import summarise
    from loadtests.metrics.level_summary import Window
    from tests.tools.records import request

    summary = summarise(
        [request(i, 0.5 * i, ttft=0.3 + 0.001 * i) for i in range(100)],
        [],
        Window(0.0, 50.0),
        NINE,
        rate=2.0,
    )
    found = level_of(summary)
    assert (found.rate, found.due, found.good, found.duration_seconds, found.is_valid) == (
        2.0,
        100,
        summary.counts.good,
        50.0,
        True,
    )
    assert (
        found.runs == summary.counts.runs
        and found.correlated == summary.latencies.correlated
        and found.mean_e2e_seconds == summary.latencies.e2e.mean
    )
