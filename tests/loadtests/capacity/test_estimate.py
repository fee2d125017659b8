"""What levels say about the capacity."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.capacity.estimate import estimate
from loadtests.capacity.levels import Level, hidden_overload, level_of, pooled
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.slo import Slo
from loadtests.records.events import CapacityStatus

NINE = Slo("nine", 0.5, None, target=0.9)


SINGLE_STREAM = Level(rate=None, due=5, good=5, duration_seconds=2.55, mean_e2e_seconds=0.51)


def level(rate, good, due, seconds=100.0, **changes):
    return Level(rate=rate, good=good, due=due, duration_seconds=seconds, **changes)


def test_a_level_that_is_plainly_broken_bounds_the_capacity():
    found = estimate(
        [SINGLE_STREAM, level(4.0, 400, 400), level(8.0, 0, 800)], SearchConfig(), NINE
    )
    assert 3.0 < found.low and found.high < 9.0
    assert not found.is_narrow  # two levels so far apart do not say where between
    only_broken = estimate([level(8.0, 0, 800)], SearchConfig(), NINE)
    assert (only_broken.low, only_broken.estimate, only_broken.held) == (None, None, None)
    assert only_broken.status is CapacityStatus.UNRESOLVED and only_broken.high is not None


def test_a_handful_of_bad_requests_is_no_bound():
    """Six in a row are one stall; below the capacity too."""
    found = estimate([SINGLE_STREAM, level(0.9, 0, 6, 7.0)], SearchConfig(), NINE)
    assert found.high is None
    assert estimate([SINGLE_STREAM, level(0.9, 0, 24, 27.0)], SearchConfig(), NINE).high == 0.9


def test_one_good_request_is_evidence_of_nothing():
    """It once gave "holds up to at least 0.29": the edge of the grid."""
    strict = Slo("strict", 0.5, None, target=0.99)
    found = estimate([level(1.0, 1, 1, 20.0)], SearchConfig(), strict)
    assert (found.status, found.held, found.low) == (CapacityStatus.UNRESOLVED, None, None)


def test_what_is_good_alone_and_was_not_run_under_load_is_alone_only():
    alone = Level(rate=None, due=27, good=27, duration_seconds=14.0, mean_e2e_seconds=0.5)
    assert estimate([alone], SearchConfig(), NINE).status is CapacityStatus.ALONE_ONLY
    few = Level(rate=None, due=20, good=20, duration_seconds=10.0, mean_e2e_seconds=0.5)
    assert estimate([few], SearchConfig(), NINE).status is CapacityStatus.UNRESOLVED
    # A short level that is all good confirms no rate, and shows that load does no harm.
    loaded = [few, level(0.5, 25, 25, 50.0)]
    assert estimate(loaded, SearchConfig(), NINE).status is CapacityStatus.ALONE_ONLY


def test_a_rate_that_ran_long_enough_and_held_is_confirmed():
    levels = [SINGLE_STREAM, level(4.0, 395, 400, is_steady=True), level(8.0, 80, 800)]
    found = estimate(levels, SearchConfig(), NINE)
    assert (found.status, found.held) == (CapacityStatus.CONFIRMED, 4.0)
    assert found.high is not None and 4.0 <= found.high < 9.0
    unbroken = estimate(levels[:2], SearchConfig(), NINE)
    assert (unbroken.status, unbroken.held, unbroken.high) == (CapacityStatus.AT_LEAST, 4.0, None)
    growing = [msgspec.structs.replace(one, is_steady=False) for one in levels]
    assert estimate(growing, SearchConfig(), NINE).held is None


def test_a_level_confirms_no_more_than_the_requests_that_came():
    """Arrivals are drawn: 340 in a minute are no 6 requests/s."""
    few = level(6.0, 340, 340, 60.0, is_steady=True)
    found = estimate([SINGLE_STREAM, few], SearchConfig(), NINE)
    assert (found.held, found.confirmed_by.asked_rate) == (340 / 60, 6.0)
    many = level(6.0, 380, 380, 60.0, is_steady=True)
    assert estimate([SINGLE_STREAM, many], SearchConfig(), NINE).held == 6.0
    # Levels at one rate count together; the interval reaches up to what is confirmed.
    broken = level(6.5, 200, 400, is_steady=True)
    found = estimate([SINGLE_STREAM, few, many, few, broken], SearchConfig(), NINE)
    assert found.held == 1060 / 180 and found.held <= found.high


def test_a_lower_rate_to_which_more_requests_came_confirms_more():
    few = level(6.0, 330, 330, 60.0, is_steady=True)
    more = level(5.8, 355, 355, 60.0, is_steady=True)
    fewer = level(5.4, 300, 300, 60.0, is_steady=True)
    found = estimate([SINGLE_STREAM, fewer, few, more], SearchConfig(), NINE)
    assert (found.held, found.confirmed_by.asked_rate) == (5.8, 5.8)
    assert estimate([SINGLE_STREAM, fewer, few], SearchConfig(), NINE).held == 5.5
    # What is too short to confirm does not, however many came.
    short = level(5.8, 296, 296, 50.0, is_steady=True)
    assert estimate([SINGLE_STREAM, fewer, few, short], SearchConfig(), NINE).held == 5.5


def test_a_level_above_the_middle_of_what_all_say_held_by_chance():
    lucky = level(3.5, 352, 360, is_steady=True)
    below = level(2.0, 80, 80, 40.0, is_steady=True)
    broken = [level(3.55, 20, 420, is_steady=False), level(3.6, 50, 360)]
    found = estimate([SINGLE_STREAM, below, lucky, *broken], SearchConfig(), NINE)
    assert found.estimate < 3.5 < found.high
    assert (found.status, found.held) == (CapacityStatus.ALONE_ONLY, None)
    assert estimate([SINGLE_STREAM, below, lucky], SearchConfig(), NINE).held == 3.5


def test_a_level_hides_an_overload_until_ttft_is_at_the_limit():
    patient = Slo("patient", 30.0, None, target=0.9)
    long = level(4.0, 400, 400, 100.0, warmup_seconds=20.0)
    assert hidden_overload(long, patient) == 0.25
    steady = msgspec.structs.replace(long, is_steady=True)
    assert hidden_overload(steady, patient) == 0.25
    assert hidden_overload(level(4.0, 40, 40, 10.0), patient) == 1.0
    assert hidden_overload(long, Slo("none", None, 0.1, target=0.9)) == 0.0


def test_the_number_of_server_starts_stands_with_the_capacity():
    levels = [level(4.0, 400, 400), level(8.0, 0, 800), level(5.0, 400, 400)]
    assert estimate(levels, SearchConfig(), NINE).starts is None
    placed = [
        msgspec.structs.replace(one, start=at) for one, at in zip(levels, (0, 0, 2), strict=True)
    ]
    assert estimate(placed, SearchConfig(), NINE).starts == 2


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
        and found.is_steady is summary.is_steady
        and found.mean_e2e_seconds == summary.latencies.e2e.mean
    )
