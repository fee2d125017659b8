"""The curve's posterior."""

import math

import numpy as np
import pytest

from loadtests.capacity.estimate import estimate
from loadtests.capacity.levels import Level
from loadtests.capacity.posterior import (
    REACH,
    SLOPES,
    Observation,
    Posterior,
    nearness,
    posterior,
    share_good,
)
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.distribution import runs_of
from loadtests.metrics.slo import Slo

NINE = Slo("nine", 0.5, None, target=0.9)


SINGLE_STREAM = Level(rate=None, due=5, good=5, duration_seconds=2.55, mean_e2e_seconds=0.51)


def level(rate, good, due, seconds=100.0, **changes):
    return Level(rate=rate, good=good, due=due, duration_seconds=seconds, **changes)


def test_requests_that_share_their_fate_count_for_less():
    def width(bad_runs):
        levels = [SINGLE_STREAM] + [
            level(rate, len(g) - g.count(False), len(g), runs=runs_of(g))
            for rate, g in ((5.5, bad_runs(40)), (6.0, bad_runs(80)), (6.5, bad_runs(160)))
        ]
        found = estimate(levels, SearchConfig(), NINE)
        return found.high - found.low

    def together(bad):
        return [True] * (400 - bad // 2) + [False] * bad + [True] * (400 - bad // 2)

    def apart(bad):
        return [(i * bad) // 800 == ((i + 1) * bad) // 800 for i in range(800)]

    assert width(together) > 1.5 * width(apart)


def test_more_of_the_same_evidence_narrows():
    few = posterior([Observation(5.5, 530, 550), Observation(6.5, 540, 650)], 0.01, 1000.0, 0.9)
    many = posterior(
        [Observation(5.5, 530, 550), Observation(6.5, 540, 650)] * 6, 0.01, 1000.0, 0.9
    )
    assert many.quantile(0.95) - many.quantile(0.05) < 0.6 * (
        few.quantile(0.95) - few.quantile(0.05)
    )
    assert 5.5 < many.quantile(0.5) < 6.5


def curve(rate, slope, target=0.8, counted=None):
    """The share of good requests where the capacity is 1 request/s."""
    return share_good(rate, np.array([1.0]), np.array([slope]), target, counted)[0]


def test_the_curve_is_a_power_of_the_rate_in_the_odds():
    assert curve(1.0, 3.0) == pytest.approx(0.8)
    assert curve(2.0, 3.0) == pytest.approx(1 / (1 + 0.25 * 8))  # odds of a bad one: 1 to 4, x 2^3
    assert curve(0.5, 3.0) == pytest.approx(1 / (1 + 0.25 / 8))
    assert curve(100.0, 100.0) == 0.002 and curve(0.01, 100.0) == pytest.approx(1.0)
    # By a rate that came out of 16 arrivals: 0.5 x 4^2 / 16 x (2 x 0.8 - 1) less in log odds.
    assert curve(1.0, 4.0, counted=16) == pytest.approx(1 / (1 + 0.25 * math.exp(-0.3)))
    assert curve(1.0, 100.0, counted=16) == pytest.approx(1 / (1 + 0.25 * math.exp(-0.6)))


def test_levels_near_the_target_count_by_the_curve():
    assert nearness(0.1, 0.9) == pytest.approx(1.0)
    odds = math.exp(2.0) / 9  # 2 from the target in log odds
    assert nearness(odds / (1 + odds), 0.9) == pytest.approx(0.5)
    assert nearness(0.0, 0.9) == pytest.approx(nearness(0.002, 0.9))
    assert nearness(1.0, 0.9) == pytest.approx(nearness(0.998, 0.9))


def mean_slope(found: Posterior) -> float:
    """How steeply the odds of a bad request grow with the rate (an exponent)."""
    return float((found.weights.sum(axis=0) * SLOPES).sum())


def test_without_levels_the_capacity_is_the_prior():
    prior = posterior([], 0.01, 100.0, 0.9)
    assert prior.capacities[0] == pytest.approx(0.01)
    assert prior.capacities[-1] == pytest.approx(100.0)
    assert prior.quantile(0.5) == pytest.approx(1.0, rel=0.02)
    assert prior.quantile(0.25) == pytest.approx(0.1, rel=0.05)
    weights = np.exp(-0.5 * (np.log(SLOPES / 4.0) / 1.3) ** 2)
    assert mean_slope(prior) == pytest.approx(float((weights * SLOPES).sum() / weights.sum()))
    assert prior.bound(0.05) is None and prior.bound(0.95) is None


def test_a_bound_that_only_the_grid_gives_is_not_known():
    all_good = posterior([Observation(4.0, 400, 400)], 0.01, 1000.0, 0.9)
    assert all_good.capacities[0] == pytest.approx(4.0 / REACH)
    assert all_good.bound(0.95) is None
    all_bad = posterior([Observation(4.0, 0, 400)], 0.01, 1000.0, 0.9)
    assert all_bad.bound(0.05) is None
    one_good = posterior([Observation(1.0, 1, 1)], 0.01, 1000.0, 0.99)
    assert one_good.bound(0.05) is None and one_good.bound(0.95) is None
    both = posterior(
        [Observation(4.0, 400, 400), Observation(4.0, 390, 400), Observation(8.0, 0, 800)],
        *(0.01, 1000.0, 0.9),
    )
    low, high = both.bound(0.05), both.bound(0.95)
    assert low is not None and high is not None and 2.5 < low < high < 8.5


def test_levels_that_contradict_each_other_widen_the_interval():
    """A machine that is twice as quick at times: what the next start finds is not known better."""

    def width(levels):
        found = posterior(levels, 0.01, 1000.0, 0.9)
        return math.log(found.quantile(0.95) / found.quantile(0.05))

    alike = [Observation(rate, 900, 1000) for rate in (4.0, 4.0, 4.0, 4.0)]
    apart = [Observation(rate, 900, 1000) for rate in (3.0, 5.0, 3.0, 5.0)]
    assert width(apart) > 1.3 * width(alike)


def test_a_good_share_says_nothing_of_an_overload_that_the_level_hides():
    """A queue that grows is good until TTFT is at the limit."""

    def interval(hidden):
        seen = [Observation(6.0, 597, 600, hidden=hidden), Observation(9.0, 90, 900, hidden=0.05)]
        found = posterior([Observation(3.0, 898, 900), *seen], 0.01, 1000.0, 0.9)
        return found.quantile(0.05)

    shown, hides, blind = interval(0.0), interval(0.25), interval(1.0)
    assert 6.0 * 0.75 * 0.9 < hides < 0.9 * shown and 3.0 < blind < 0.8 * hides
    # A bad share is evidence all the same.
    bad = posterior([Observation(6.0, 200, 600, hidden=0.05)], 0.01, 1000.0, 0.9)
    assert bad.quantile(0.95) < 6.3


def test_an_overload_that_may_be_hidden_does_not_draw_the_capacity_to_below_the_rates():
    """Levels near the capacity show it by their bad requests, however long they were."""

    def median(hidden):
        shares = ((5.6, 0.94), (5.8, 0.92), (6.0, 0.90), (6.2, 0.87), (6.4, 0.83))
        seen = [Observation(rate, round(700 * good), 700, hidden=hidden) for rate, good in shares]
        return posterior(seen, 0.01, 1000.0, 0.9).quantile(0.5)

    assert median(0.03) > 0.998 * median(0.0)


def test_what_differs_from_start_to_start_widens_the_interval_of_the_next():
    """Levels of one start agree among each other, and say little of the next start."""

    def interval(*starts):
        """Each start, (its number, its speed), with the same three levels."""
        levels = [
            Observation(rate * speed, good, 500, start=start)
            for start, speed in starts
            for rate, good in ((5.5, 495), (6.0, 450), (6.6, 300))
        ]
        found = posterior(levels, 0.01, 1000.0, 0.9)
        return math.log(found.quantile(0.95) / found.quantile(0.05)), found

    one, found = interval((0, 1.0), (0, 1.0), (0, 1.0))
    three, _ = interval((0, 1.0), (1, 1.0), (2, 1.0))
    apart, last_is_fast = interval((0, 0.85), (1, 1.0), (2, 1.15))
    assert 0.6 * one > three and apart > 4 * three
    unknown, _ = interval((None, 1.0), (None, 1.0), (None, 1.0))
    assert unknown < 0.6 * one, "of this start alone"
    # What comes next on the start that runs now is another matter.
    assert last_is_fast.mean_share(6.0) > found.mean_share(6.0) + 0.05
    assert last_is_fast.quantile(0.5) == pytest.approx(found.quantile(0.5), rel=0.03)


def test_the_interval_of_three_starts_covers_the_next_one():
    """Whose speed differs from theirs by 12 % (sd), as theirs do from each other."""
    rng = np.random.default_rng(11)
    covered = 0
    for _ in range(30):
        *starts, following = np.exp(0.12 * rng.normal(size=4)).tolist()
        seen = [
            Observation(6.0 * speed * off, good, 500, start=number)
            for number, speed in enumerate(starts)
            for off, good in ((0.92, 495), (1.0, 450), (1.1, 300))
        ]
        found = posterior(seen, 0.01, 1000.0, 0.9)
        covered += found.quantile(0.05) <= 6.0 * following <= found.quantile(0.95)
    assert covered >= 26


TOGETHER = (250, 8, 240, 12, 40)
SEEN = [
    Observation(4.0, 400, 400, runs=(400,)),
    Observation(5.5, 530, 550, runs=TOGETHER),
    Observation(6.5, 540, 650),
    Observation(12.0, 30, 900),
]
QUANTILES = (5.136870587186526, 6.026091085780421, 6.940065319394718)
SLOPE, CLUMP, TELLING = 7.80595776729089, 34.1541813189206, 5.34203294870435


def test_the_figures_of_some_levels_stay_what_they_were():
    """The constants were chosen on worlds of known capacity: a change of one shows here."""
    found = posterior(SEEN, 0.01, 1000.0, 0.9)
    assert [found.quantile(q) for q in (0.05, 0.5, 0.95)] == pytest.approx(QUANTILES, rel=1e-6)
    assert (mean_slope(found), found.clump) == pytest.approx((SLOPE, CLUMP), rel=1e-6)
    assert found.most_telling_rate(60.0, 0.1, 99.0) == pytest.approx(TELLING, rel=1e-6)


def test_the_most_telling_rate_is_near_the_capacity_and_within_the_limits():
    found = posterior(SEEN, 0.01, 1000.0, 0.9)
    assert found.quantile(0.02) < found.most_telling_rate(60.0, 0.1, 99.0) < found.quantile(0.98)
    assert found.most_telling_rate(60.0, 6.8, 7.0) == pytest.approx(6.8, rel=0.04)
