"""The share of good requests against the rate, as one curve with its uncertainty: what the levels measured so far say about the capacity.

The odds of a bad request grow as a power of the rate: odds(r) = odds(target) * (r / capacity) ** slope, with capacity and slope unknown.
It is the logistic curve in ln(rate); near the capacity of a queue ln P(late) is close to straight in the rate, and levels far from it
weigh little. The posterior is computed on a grid, flat in ln(capacity) and broad in the slope, so there is no fit to fail with three
levels or with none bad.

Requests of one level share their fate (a busy period makes many of them late), so their number counts less than it is: the likelihood is
divided by the dispersion of good requests among consecutive batches (quasi-likelihood; McCullagh & Nelder 1989, section 4.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

CAPACITY_POINTS = 1200
SLOPES = np.geomspace(2.0, 60.0, 18)
SLOPE_MEDIAN, SLOPE_SPREAD = 12.0, 0.8  # lognormal prior; queues near capacity show 5 to 30
DISPERSION_PRIOR, DISPERSION_PRIOR_WEIGHT = 2.0, 10.0  # what batches are taken to show before any were seen, and as how many of them
LAPSE = 0.002  # no share is taken for nearer to 0 than this: one stray good request far above capacity must not move the curve


class Observation(msgspec.Struct, frozen=True):
    """One level: rate in requests/s, counts, and (good, due) of consecutive batches."""

    rate: float
    good: int
    due: int
    batches: tuple[tuple[int, int], ...] = ()


class Posterior:
    """Belief about capacity (requests/s) and slope: weights over a grid, float64 [capacities, slopes], summing to 1."""

    def __init__(self, capacities: Array, weights: Array, target: float, dispersion: float) -> None:
        self.capacities = capacities
        self.weights = weights
        self.target = target
        self.dispersion = dispersion
        self._marginal: Array = weights.sum(axis=1)

    def quantile(self, q: float) -> float:
        """The rate below which the capacity lies with probability q."""
        cumulative = np.cumsum(self._marginal)
        return float(np.exp(np.interp(q, cumulative, np.log(self.capacities))))

    def most_telling_rate(self, seconds: float) -> float:
        """The rate at which a level of this length is expected to narrow the capacity most.

        Share of the variance of the outcome that the capacity explains, over candidates around what is believed: far below it nothing fails
        whatever the capacity is, far above everything does.
        """
        low, high = self.quantile(0.02), self.quantile(0.98)
        candidates = np.geomspace(low * 0.97, high * 1.03, 25)
        best, best_score = self.quantile(0.5), -1.0
        for rate in candidates:
            good = share_good(float(rate), self.capacities[:, None], SLOPES[None, :], self.target)
            by_capacity = (self.weights * good).sum(axis=1) / np.maximum(self._marginal, 1e-300)
            mean = float((self.weights * good).sum())
            explained = float((self._marginal * (by_capacity - mean) ** 2).sum())
            total = float((self.weights * (good - mean) ** 2).sum())
            counted = max(1.0, rate * seconds / self.dispersion)
            noise = float((self.weights * good * (1 - good)).sum()) / counted
            score = explained / (total - explained + noise + 1e-12)
            if score > best_score:
                best, best_score = float(rate), score
        return best


def share_good(rate: float, capacity: Array, slope: Array, target: float) -> Array:
    """The curve: the share of good requests at `rate`."""
    log_odds_bad = math.log((1 - target) / target) + slope * (math.log(rate) - np.log(capacity))
    share: Array = np.maximum(1.0 / (1.0 + np.exp(np.clip(log_odds_bad, -50, 50))), LAPSE)
    return share


def posterior(seen: Sequence[Observation], min_rate: float, max_rate: float, target: float) -> Posterior:
    """What the levels say. With none: the prior, flat in the logarithm of the capacity from min_rate to max_rate."""
    capacities = np.geomspace(min_rate, max_rate, CAPACITY_POINTS)
    if seen:  # the grid is laid where the answer can be, so that its step is far below any precision asked
        rates = [o.rate for o in seen]
        capacities = np.geomspace(max(min_rate, min(rates) / 4), min(max_rate, max(rates) * 4), CAPACITY_POINTS)
    prior = np.exp(-0.5 * ((np.log(SLOPES) - math.log(SLOPE_MEDIAN)) / SLOPE_SPREAD) ** 2)
    spread = 1.0
    weights: Array = np.tile(prior, (CAPACITY_POINTS, 1))
    for _ in range(2):  # the dispersion is taken about the curve, and the curve depends on it: twice is enough
        log_weights = np.log(np.tile(prior, (CAPACITY_POINTS, 1)))
        for o in seen:
            good = share_good(o.rate, capacities[:, None], SLOPES[None, :], target)
            log_weights += (o.good * np.log(good) + (o.due - o.good) * np.log1p(-good + 1e-12)) / spread
        weights = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        spread = dispersion(seen)
    return Posterior(capacities, weights, target, spread)


def dispersion(seen: Sequence[Observation]) -> float:
    """How many requests count as one: Pearson's chi-square of the batches about their level's share, over its degrees of freedom, at
    least 1.
    """
    total, freedom = DISPERSION_PRIOR * DISPERSION_PRIOR_WEIGHT, DISPERSION_PRIOR_WEIGHT
    for o in seen:
        batches = [(good, due) for good, due in o.batches if due]
        if len(batches) < 2 or not 0 < o.good < o.due:
            continue
        share = o.good / o.due
        total += sum((good - due * share) ** 2 / (due * share * (1 - share)) for good, due in batches)
        freedom += len(batches) - 1
    return max(1.0, total / freedom)
