"""The curve's posterior."""

import math

import numpy as np
import pytest

from loadtests.capacity.estimate import Level, estimate
from loadtests.capacity.posterior import (
    SLOPES,
    Observation,
    clumping,
    clusters,
    dispersion,
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


def test_clusters_of_bad_requests():
    assert clusters((100,)) == [] and clusters((0, 7)) == [7] and clusters((5, 1, 5)) == [1]
    assert clusters((50, 6, 200, 4, 300, 5, 50)) == [6, 4, 5]
    rng = np.random.default_rng(0)
    alone = clusters(runs_of((rng.random(5000) > 0.02).tolist()))
    assert np.mean(alone) < 1.3
    runs = [
        int(rng.geometric(1 / 400)) if i % 2 == 0 else int(rng.geometric(1 / 12))
        for i in range(200)
    ]
    assert np.mean(clusters(runs)) == pytest.approx(12, rel=0.25)


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


def test_requests_that_count_as_one_grow_with_the_share_of_bad_ones():
    assert dispersion(0.25, 10.0) == pytest.approx(6.5)
    assert dispersion(0.0, 90.0) == dispersion(-0.1, 90.0) == dispersion(0.0001, 10.0) == 1.0


def test_clumping_is_the_prior_until_clusters_are_seen():
    nothing_to_learn = [
        Observation(1.0, 100, 100, runs=(100,)),
        Observation(1.0, 0, 100, runs=(0, 100)),
        Observation(1.0, 96, 100),
    ]
    assert clumping([]) == pytest.approx(90.0) == clumping(nothing_to_learn)
    # One cluster of 4 among 100: 4 / sqrt(0.04) = 20, against four clusters' worth of 90.
    four = Observation(1.0, 96, 100, runs=(50, 4, 46))
    assert clumping([four]) == pytest.approx((90.0**4 * 20.0) ** (1 / 5))
    # Of 1 and 3: (1 + 9) / 4 in the mean.
    two = Observation(1.0, 96, 100, runs=(20, 1, 30, 3, 46))
    assert clusters(two.runs) == [1, 3]
    assert clumping([two]) == pytest.approx((90.0**4 * 12.5**2) ** (1 / 6))


@pytest.mark.parametrize(
    ("bad", "sizes"),
    [
        ([0, 1, 2, 10, 11, 30], [3, 2, 1]),
        ([5, 7], [1, 1]),
        ([5, 6], [2]),
        ([0, 1, 3, 4], [2, 2]),
        ([0, 1, 2, 3, 4, 50], [5, 1]),
        ([0, 3, 6, 9], [1, 1, 1, 1]),
        (range(8), [8]),
        ([0, 2, 7, 27, 30], [2, 1, 1, 1]),
    ],
)
def test_clusters_are_parted_at_the_longest_gaps(bad, sizes):
    assert clusters(runs_of(i not in bad for i in range(60))) == sizes


def test_without_levels_the_capacity_is_the_prior_or_the_prediction():
    prior = posterior([], 0.01, 100.0, 0.9)
    assert prior.capacities[0] == pytest.approx(0.01)
    assert prior.capacities[-1] == pytest.approx(100.0)
    assert prior.quantile(0.5) == pytest.approx(1.0, rel=0.02)
    assert prior.quantile(0.25) == pytest.approx(0.1, rel=0.02)
    weights = np.exp(-0.5 * (np.log(SLOPES / 10.0) / 0.9) ** 2)
    assert prior.mean_slope == pytest.approx(float((weights * SLOPES).sum() / weights.sum()))
    # Student's t with 3 degrees of freedom: 95 % lie below 2.353 times the scale of 0.2.
    predicted = posterior([], 0.01, 100.0, 0.9, predicted_rate=5.0)
    assert predicted.quantile(0.5) == pytest.approx(5.0, rel=0.02)
    assert predicted.quantile(0.95) == pytest.approx(5.0 * math.exp(0.2 * 2.353), rel=0.03)


@pytest.mark.parametrize(
    ("min_rate", "max_rate", "ends"),
    [(0.01, 1000.0, (1.0, 24.0)), (2.0, 10.0, (2.0, 10.0)), (5.0, 6.0, (3.0, 10.0))],
)
def test_the_grid_covers_four_times_the_rates_seen_within_the_limits(min_rate, max_rate, ends):
    seen = [Observation(4.0, 100, 100), Observation(6.0, 80, 100)]
    found = posterior(seen, min_rate, max_rate, 0.9)
    assert (found.capacities[0], found.capacities[-1]) == pytest.approx(ends)
    assert found.weights.sum() == pytest.approx(1.0)


TOGETHER = (250, 8, 240, 12, 40)
SEEN = [
    Observation(4.0, 400, 400, runs=(400,)),
    Observation(5.5, 530, 550, correlated=60.0, runs=TOGETHER),
    Observation(6.5, 540, 650, correlated=2.0),
    Observation(12.0, 30, 900),
]
QUANTILES = (5.328190728973253, 6.201390278129484, 7.132029818011144)
SLOPE, CLUMP, TELLING = 9.534431354599235, 76.16022791408612, 5.6812612172474575


def test_the_figures_of_some_levels_stay_what_they_were():
    """The constants were chosen on queues of known capacity: a change of one shows here."""
    found = posterior(SEEN, 0.01, 1000.0, 0.9, predicted_rate=7.0)
    assert [found.quantile(q) for q in (0.05, 0.5, 0.95)] == pytest.approx(QUANTILES, rel=1e-6)
    assert (found.mean_slope, found.clump) == pytest.approx((SLOPE, CLUMP), rel=1e-6)
    assert found.most_telling_rate(60.0, 0.1, 99.0) == pytest.approx(TELLING, rel=1e-6)


def test_the_most_telling_rate_is_near_the_capacity_and_within_the_limits():
    found = posterior(SEEN, 0.01, 1000.0, 0.9)
    assert found.quantile(0.02) < found.most_telling_rate(60.0, 0.1, 99.0) < found.quantile(0.98)
    assert found.most_telling_rate(60.0, 6.8, 7.0) == pytest.approx(6.8)
