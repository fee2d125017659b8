"""How many requests count as one."""

import numpy as np
import pytest

from loadtests.metrics.clustering import clumping, clusters, dispersion
from loadtests.metrics.distribution import runs_of


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


def test_requests_that_count_as_one_grow_with_the_share_of_bad_ones():
    assert dispersion(0.25, 10.0) == pytest.approx(6.5)
    assert dispersion(0.0, 90.0) == dispersion(-0.1, 90.0) == dispersion(0.0001, 10.0) == 1.0


def test_clumping_is_the_prior_until_clusters_are_seen():
    nothing_to_learn = [(0, 100, (100,)), (100, 100, (0, 100)), (4, 100, ())]
    assert clumping([]) == pytest.approx(25.0) == clumping(nothing_to_learn)
    # One cluster of 4 among 100: 4 / sqrt(0.04) = 20, against three clusters' worth of 25.
    assert clumping([(4, 100, (50, 4, 46))]) == pytest.approx((25.0**3 * 20.0) ** (1 / 4))
    # Of 1 and 3: (1 + 9) / 4 in the mean.
    runs = (20, 1, 30, 3, 46)
    assert clusters(runs) == [1, 3]
    assert clumping([(4, 100, runs)]) == pytest.approx((25.0**3 * 12.5**2) ** (1 / 5))


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
