"""The share of good requests against the rate, as one curve with its uncertainty: what the levels measured so far say about the capacity.

Two things are known without any model: below the capacity the share of good requests is at least the target, above it at most. Near the
capacity more is: the odds of a bad request grow about as a power of the rate,

    odds(rate) = odds(target) * (rate / capacity) ** slope,

the logistic curve in ln(rate), with capacity and slope unknown. A level near the target (in log odds) speaks by the curve, one far from it
only by the order. The posterior is computed on a grid, flat in ln(capacity) and broad in the slope, so there is no fit to fail with three
levels or with none bad.

Requests of one level share their fate (a busy period makes many of them late), so they count for less than their number: the likelihood
is divided by the dispersion, var / mean of the count of bad ones over that of a binomial (quasi-likelihood, McCullagh & Nelder 1989,
section 4.5). Two estimates of it, and the larger counts: from the clusters of bad requests, and from how long latencies remember (the
dispersion of TTFT means), which speaks up even where no request was bad. The constants were chosen on M/D/4 and continuous batching with
known capacity (tests/loadtests/test_search.py holds them to it).
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
SLOPE_MEDIAN, SLOPE_SPREAD = 10.0, 0.9  # lognormal prior: queues near capacity show 5 to 40
NEAR = 2.0  # distance in log odds from the target at which curve and order weigh the same
CLUMP_PRIOR, CLUMP_PRIOR_WEIGHT = 90.0, 4.0
CORRELATED = 1.6  # batches of a tenth of a level see about this part less than the whole memory of a queue
SAFETY = 1.3
LAPSE = 0.002  # no share is taken for nearer to 0 than this: one stray good request far above capacity must not move the curve
ROUNDS = 3
PREDICTION_SCALE, PREDICTION_FREEDOM = (
    0.2,
    3,
)  # of ln(predicted / true): what calibration and simulation were off by, and worse now and then


class Observation(msgspec.Struct, frozen=True):
    """One level: rate in requests/s, counts, and what shows how far neighbours share their fate (see search.Level)."""

    rate: float
    good: int
    due: int
    correlated: float | None = None
    runs: tuple[int, ...] = ()


class Posterior:
    """Belief about capacity (requests/s) and slope: weights over a grid, float64 [capacities, slopes], summing to 1."""

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
        """The rate from low to high at which a level of this length is expected to narrow the capacity most.

        Share of the variance of the outcome that the capacity explains, over candidates around what is believed: far below it nothing fails
        whatever the capacity is, far above everything does.
        """
        low, high = max(low, self.quantile(0.02) * 0.97), min(high, self.quantile(0.98) * 1.03)
        best, best_score = self.quantile(0.5), -1.0
        held = self._marginal > 1e-12  # a narrow belief leaves most of the grid empty
        capacities, weights, marginal = self.capacities[held, None], self.weights[held], self._marginal[held]
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
                best, best_score = float(rate), score
        return best


def posterior(
    seen: Sequence[Observation], min_rate: float, max_rate: float, target: float, predicted_rate: float | None = None
) -> Posterior:
    """What the levels say. With none: the prior, flat in the logarithm of the capacity from min_rate to max_rate.

    A predicted capacity counts as evidence that is off by PREDICTION_SCALE or so, with the heavy tails of Student's t: it decides where
    little was measured, and gives way where measurements contradict it.
    """
    rates = [o.rate for o in seen]
    # The grid is laid where the answer can be, so that its step is far below any precision asked.
    low, high = (max(min_rate, min(rates) / 4), min(max_rate, max(rates) * 4)) if seen else (min_rate, max_rate)
    capacities = np.geomspace(min(low, high / 2), max(high, low * 2), CAPACITY_POINTS)
    prior = np.tile(-0.5 * ((np.log(SLOPES) - math.log(SLOPE_MEDIAN)) / SLOPE_SPREAD) ** 2, (CAPACITY_POINTS, 1))
    if predicted_rate is not None:
        apart = (np.log(capacities) - math.log(predicted_rate)) / PREDICTION_SCALE
        prior -= ((PREDICTION_FREEDOM + 1) / 2 * np.log1p(apart**2 / PREDICTION_FREEDOM))[:, None]
    shares = [share_good(o.rate, capacities[:, None], SLOPES[None, :], target, o.due) for o in seen]
    by_curve = [_log_likelihood(o, share) for o, share in zip(seen, shares, strict=True)]
    by_order = [_by_order(o, capacities, target)[:, None] for o in seen]
    clump = clumping(seen)
    bad = [(o.due - o.good + 0.5) / (o.due + 1.0) for o in seen]
    for _ in range(ROUNDS):  # a level's weight depends on its share by the curve, and the curve on the weights; settled after three
        log_weights = prior.copy()
        for i, o in enumerate(seen):
            near = nearness(bad[i], target)
            remembered = CORRELATED * (o.correlated or 0.0)
            log_weights += near * by_curve[i] / max(dispersion(max(bad[i], 1 - target), clump), remembered)
            log_weights += (1 - near) * by_order[i] / max(dispersion(1 - target, clump), remembered)
        weights: Array = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        bad = [1.0 - float((weights * share).sum()) for share in shares]
    return Posterior(capacities, weights, target, clump)


def share_good(rate: float, capacity: Array, slope: Array, target: float, counted: int | None = None) -> Array:
    """The curve: the share of good requests at `rate`.

    With `counted`, `rate` is the one that this many arrivals came out at. The curve is of the asked rate, an average over rates that come
    out with a relative variance of 1 / counted; where it bends upwards that average lies above the curve of the latter, by half the
    variance times the bend.
    """
    log_odds_bad = math.log((1 - target) / target) + slope * (math.log(rate) - np.log(capacity))
    share: Array = 1.0 / (1.0 + np.exp(np.clip(log_odds_bad, -50, 50)))
    if counted is not None:
        log_odds_bad = log_odds_bad - np.minimum(0.5 * slope**2 / counted, 1.0) * (2 * share - 1)
        share = 1.0 / (1.0 + np.exp(np.clip(log_odds_bad, -50, 50)))
    return np.maximum(share, LAPSE)


def dispersion(bad_share: float, clump: float) -> float:
    """How many requests of a level count as one, at this share of bad ones: about the root of the share in queues, and at least 1."""
    return max(1.0, SAFETY * clump * math.sqrt(max(bad_share, 0.0)))


def nearness(bad_share: float, target: float) -> float:
    """Weight of the curve for a level, by how far its share is from the target's in log odds; the rest of its weight is the order's."""
    share = min(max(bad_share, LAPSE), 1 - LAPSE)
    distance = math.log(share / (1 - share)) - math.log((1 - target) / target)
    return 1.0 / (1.0 + (distance / NEAR) ** 2)


def clumping(seen: Sequence[Observation]) -> float:
    """The constant of `dispersion`, from the clusters of bad requests in all levels, and a prior worth a few clusters.

    Clusters that arrive independently with K bad requests each give counts with variance / mean = E[K^2] / E[K] (compound Poisson).
    """
    logs, weight = CLUMP_PRIOR_WEIGHT * math.log(CLUMP_PRIOR), CLUMP_PRIOR_WEIGHT
    for o in seen:
        bad = o.due - o.good
        if 0 < bad < o.due and o.runs:
            sizes = np.array(clusters(o.runs), dtype=np.float64)
            logs += len(sizes) * math.log(float(np.dot(sizes, sizes) / sizes.sum()) / math.sqrt(bad / o.due))
            weight += len(sizes)
    return math.exp(logs / weight)


def clusters(runs: Sequence[int]) -> list[int]:
    """Sizes of the clusters of bad requests in runs of good, bad, good, ... requests.

    How many there are is estimated by the extremal index from the gaps between bad requests, and the longest gaps part them: the
    intervals estimator and its declustering (Ferro & Segers 2003), which need no length of a gap to be chosen.
    """
    found: list[int] = []  # from one bad request to the next
    since_bad: int | None = None
    for position, length in enumerate(runs):
        if position % 2 == 0:
            since_bad = None if since_bad is None else since_bad + length
        elif length:
            if since_bad is not None:
                found.append(since_bad + 1)
            found += [1] * (length - 1)
            since_bad = 0
    bad = sum(runs[1::2])
    if len(found) == 0:
        return [bad] if bad else []
    gaps = np.array(found, dtype=np.float64)
    if gaps.max() > 2:
        index = 2 * (gaps - 1).sum() ** 2 / (len(gaps) * max(1e-9, ((gaps - 1) * (gaps - 2)).sum()))
    else:
        index = 2 * gaps.sum() ** 2 / (len(gaps) * (gaps**2).sum())
    count = max(1, math.floor(min(1.0, index) * bad))
    if count == 1:
        return [bad]
    parting = max(2.0, float(np.sort(gaps)[-(count - 1)]))
    sizes = [1]
    for gap in gaps:
        if gap >= parting:
            sizes.append(1)
        else:
            sizes[-1] += 1
    return sizes


def _log_likelihood(o: Observation, share: Array) -> Array:
    result: Array = o.good * np.log(share) + (o.due - o.good) * np.log1p(-np.minimum(share, 1 - 1e-12))
    return result


def _by_order(o: Observation, capacities: Array, target: float) -> Array:
    """Without the curve: where the rate is below the capacity the share is at least the target, above it at most."""
    share = o.good / o.due
    below = _log_likelihood(o, np.array([max(share, target)]))[0]
    above = _log_likelihood(o, np.array([max(min(share, target), 1e-12)]))[0]
    by_order: Array = np.where(capacities >= o.rate, below, above)
    return by_order
