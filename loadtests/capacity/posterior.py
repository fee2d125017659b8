"""The share of good requests against the rate, as one curve with its uncertainty.

Below the capacity the share is at least the target, above it at most. Near the capacity the odds
of a bad request grow about as a power of the rate,

    odds(rate) = odds(target) * (rate / capacity) ** slope,

with capacity and slope unknown. A level near the target (in log odds) counts by this curve, one
far from it only by the order. The posterior is computed on a grid, flat in ln(capacity) and broad
in the slope: no fit fails with three levels or with none bad.

Requests of one level share their fate, so the likelihood is divided by the dispersion, var / mean
of the count of bad ones over a binomial's (quasi-likelihood, McCullagh & Nelder 1989, 4.5): the
larger of two estimates, from clusters of bad requests and from how long latencies remember. The
constants were chosen on M/D/4 and continuous batching with known capacity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

CAPACITY_POINTS = 500
SLOPES = np.geomspace(2.0, 100.0, 16)
SLOPE_MEDIAN = 10.0  # of a lognormal prior; queues near capacity show 5 to 40
SLOPE_SPREAD = 0.9
NEAR = 2.0  # distance in log odds from the target at which curve and order weigh the same
CLUMP_PRIOR = 90.0
CLUMP_PRIOR_WEIGHT = 4.0  # clusters
CORRELATED = 1.6  # batches of a tenth of a level see about 1 / 1.6 of a queue's memory
SAFETY = 1.3
LAPSE = 0.002  # least share good: one stray good request far above capacity must not count
ROUNDS = 3
PREDICTION_SCALE = 0.2  # of ln(predicted / true), with Student's t tails
PREDICTION_FREEDOM = 3


class Observation(msgspec.Struct, frozen=True):
    """One level: rate in requests/s, counts, and how far neighbours share their fate."""

    rate: float
    good: int
    due: int
    correlated: float | None = None
    runs: tuple[int, ...] = ()


class Posterior:
    """Weights over a grid of capacities (requests/s) and slopes, summing to 1."""

    def __init__(self, capacities: Array, weights: Array, target: float, clump: float) -> None:
        self.capacities = capacities
        self.weights = weights
        self.target = target
        self.clump = clump
        self._marginal: Array = weights.sum(axis=1)

    def quantile(self, q: float) -> float:
        """The rate below which the capacity lies with probability q."""
        return float(np.exp(np.interp(q, np.cumsum(self._marginal), np.log(self.capacities))))

    @property
    def mean_slope(self) -> float:
        """How steeply the odds of a bad request grow with the rate (an exponent)."""
        return float((self.weights.sum(axis=0) * SLOPES).sum())

    def most_telling_rate(self, seconds: float, low: float, high: float) -> float:
        """The rate from low to high whose outcome the capacity explains most of (its variance).

        Far below the capacity no request fails, far above all do, whatever the capacity is.
        """
        low = max(low, self.quantile(0.02) * 0.97)
        high = min(high, self.quantile(0.98) * 1.03)
        best = self.quantile(0.5)
        best_score = -1.0
        held = self._marginal > 1e-12  # a narrow belief leaves most of the grid empty
        capacities = self.capacities[held, None]
        weights = self.weights[held]
        marginal = self._marginal[held]
        for rate in np.geomspace(min(low, high), max(low, high), 25):
            good = share_good(float(rate), capacities, SLOPES[None, :], self.target)
            mean = float((weights * good).sum())
            by_capacity = (weights * good).sum(axis=1) / marginal
            explained = float((marginal * (by_capacity - mean) ** 2).sum())
            total = float((weights * (good - mean) ** 2).sum())
            counted = max(1.0, rate * seconds / dispersion(1.0 - mean, self.clump))
            noise = float((weights * good * (1 - good)).sum()) / counted
            score = explained / (total - explained + noise + 1e-12)
            if score > best_score:
                best = float(rate)
                best_score = score
        return best


def posterior(
    seen: Sequence[Observation],
    min_rate: float,
    max_rate: float,
    target: float,
    predicted_rate: float | None = None,
) -> Posterior:
    """What the levels say. With none: the prior, flat in ln(capacity) from min_rate to max_rate.

    `predicted_rate` decides where little was measured, and yields to measurements (heavy tails).
    """
    low, high = min_rate, max_rate
    if seen:  # the grid covers where the answer can be, in steps far below any precision asked
        low = max(low, min(o.rate for o in seen) / 4)
        high = min(high, max(o.rate for o in seen) * 4)
    capacities = np.geomspace(min(low, high / 2), max(high, low * 2), CAPACITY_POINTS)
    prior = _log_prior(capacities, predicted_rate)
    shares = [share_good(o.rate, capacities[:, None], SLOPES[None, :], target, o.due) for o in seen]
    by_curve = [_log_likelihood(o, share) for o, share in zip(seen, shares, strict=True)]
    by_order = [_by_order(o, capacities, target)[:, None] for o in seen]
    clump = clumping(seen)
    bad = [(o.due - o.good + 0.5) / (o.due + 1.0) for o in seen]
    for _ in range(ROUNDS):  # the weights of levels depend on the curve, the curve on the weights
        log_weights = prior.copy()
        for i, o in enumerate(seen):
            near = nearness(bad[i], target)
            remembered = CORRELATED * (o.correlated or 0.0)
            spread = max(dispersion(max(bad[i], 1 - target), clump), remembered)
            log_weights += near * by_curve[i] / spread
            log_weights += (1 - near) * by_order[i] / max(dispersion(1 - target, clump), remembered)
        weights: Array = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        bad = [1.0 - float((weights * share).sum()) for share in shares]
    return Posterior(capacities, weights, target, clump)


def _log_prior(capacities: Array, predicted_rate: float | None) -> Array:
    """[capacities, slopes]: lognormal in the slope, Student's t around a prediction."""
    by_slope = -0.5 * ((np.log(SLOPES) - math.log(SLOPE_MEDIAN)) / SLOPE_SPREAD) ** 2
    prior = np.tile(by_slope, (len(capacities), 1))
    if predicted_rate is not None:
        apart = (np.log(capacities) - math.log(predicted_rate)) / PREDICTION_SCALE
        prior -= ((PREDICTION_FREEDOM + 1) / 2 * np.log1p(apart**2 / PREDICTION_FREEDOM))[:, None]
    return prior


def share_good(
    rate: float, capacity: Array, slope: Array, target: float, counted: int | None = None
) -> Array:
    """The curve: the share of good requests at the asked rate.

    With `counted`, `rate` is as it came out over so many arrivals: the asked rate's share is an
    average over such rates (relative variance 1 / counted), corrected to second order.
    """
    log_odds_bad = math.log((1 - target) / target) + slope * (math.log(rate) - np.log(capacity))
    share: Array = 1.0 / (1.0 + np.exp(np.clip(log_odds_bad, -50, 50)))
    if counted is not None:
        log_odds_bad = log_odds_bad - np.minimum(0.5 * slope**2 / counted, 1.0) * (2 * share - 1)
        share = 1.0 / (1.0 + np.exp(np.clip(log_odds_bad, -50, 50)))
    return np.maximum(share, LAPSE)


def dispersion(bad_share: float, clump: float) -> float:
    """How many requests of a level count as one, at this share of bad ones; at least 1."""
    return max(1.0, SAFETY * clump * math.sqrt(max(bad_share, 0.0)))


def nearness(bad_share: float, target: float) -> float:
    """Weight of the curve for a level, by its distance from the target in log odds."""
    share = min(max(bad_share, LAPSE), 1 - LAPSE)
    distance = math.log(share / (1 - share)) - math.log((1 - target) / target)
    return 1.0 / (1.0 + (distance / NEAR) ** 2)


def clumping(seen: Sequence[Observation]) -> float:
    """The constant of `dispersion`, from the clusters of bad requests in all levels and a prior.

    Independent clusters of K bad requests give counts of variance / mean = E[K^2] / E[K].
    """
    logs = CLUMP_PRIOR_WEIGHT * math.log(CLUMP_PRIOR)
    weight = CLUMP_PRIOR_WEIGHT
    for o in seen:
        bad = o.due - o.good
        if 0 < bad < o.due and o.runs:
            sizes = np.array(clusters(o.runs), dtype=np.float64)
            mean = float(np.dot(sizes, sizes) / sizes.sum())
            logs += len(sizes) * math.log(mean / math.sqrt(bad / o.due))
            weight += len(sizes)
    return math.exp(logs / weight)


def clusters(runs: Sequence[int]) -> list[int]:
    """Sizes of the clusters of bad requests in runs of good, bad, good, ... requests.

    The extremal index of the gaps between bad requests gives their number, and the longest gaps
    part them (intervals estimator, Ferro & Segers 2003).
    """
    bad = np.flatnonzero(np.repeat(np.arange(len(runs)) % 2, runs))
    if len(bad) < 2:
        return [1] * len(bad)
    gaps = np.diff(bad).astype(np.float64)
    if gaps.max() > 2:
        index = 2 * (gaps - 1).sum() ** 2 / (len(gaps) * max(1e-9, ((gaps - 1) * (gaps - 2)).sum()))
    else:
        index = 2 * gaps.sum() ** 2 / (len(gaps) * (gaps**2).sum())
    count = max(1, math.floor(min(1.0, index) * len(bad)))
    if count == 1:
        return [len(bad)]
    parting = max(2.0, float(np.sort(gaps)[-(count - 1)]))
    ends = np.flatnonzero(gaps >= parting) + 1
    return [len(part) for part in np.split(bad, ends)]


def _log_likelihood(o: Observation, share: Array) -> Array:
    bad: Array = (o.due - o.good) * np.log1p(-np.minimum(share, 1 - 1e-12))
    return o.good * np.log(share) + bad


def _by_order(o: Observation, capacities: Array, target: float) -> Array:
    """Without the curve: below the capacity the share is at least the target, above at most."""
    share = o.good / o.due
    below = _log_likelihood(o, np.array([max(share, target)]))[0]
    above = _log_likelihood(o, np.array([max(min(share, target), 1e-12)]))[0]
    by_order: Array = np.where(capacities >= o.rate, below, above)
    return by_order
