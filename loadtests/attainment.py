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
SLOPES = np.geomspace(2.0, 100.0, 20)
SLOPE_MEDIAN, SLOPE_SPREAD = 10.0, 0.9  # lognormal prior; queues near capacity show 5 to 30
CLUMP_PRIOR, CLUMP_PRIOR_WEIGHT = 60.0, 3.0
CORRELATED = 1.6
NEAR = 1.5
LAPSE = 0.002  # no share is taken for nearer to 0 than this: one stray good request far above capacity must not move the curve


class Observation(msgspec.Struct, frozen=True):
    """One level: rate in requests/s, counts, and (good, due) of consecutive batches."""

    rate: float
    good: int
    due: int
    correlated: float | None = None
    runs: tuple[int, ...] = ()  # lengths of runs of good, bad, good, ... requests in order of their due times


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
            counted = max(1.0, rate * seconds / dispersion(1.0 - mean, self.clump))
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
    log_prior = np.tile(-0.5 * ((np.log(SLOPES) - math.log(SLOPE_MEDIAN)) / SLOPE_SPREAD) ** 2, (CAPACITY_POINTS, 1))
    shares = [share_good(o.rate, capacities[:, None], SLOPES[None, :], target) for o in seen]
    clump = clumping(seen)
    bad = [(o.due - o.good + 0.5) / (o.due + 1.0) for o in seen]
    for _ in range(3):  # the weight of a level depends on its share by the curve, and the curve on the weights: settled after three rounds
        log_weights = log_prior.copy()
        for o, share, b in zip(seen, shares, bad, strict=True):
            near = nearness(b, target)
            by_curve = _log_likelihood(o, share) / max(dispersion(b, clump), CORRELATED * (o.correlated or 0.0))
            log_weights += near * by_curve + (1 - near) * _by_order(o, capacities, target)[:, None] / max(dispersion(1 - target, clump), CORRELATED * (o.correlated or 0.0))
        weights: Array = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        bad = [1.0 - float((weights * share).sum()) for share in shares]
    return Posterior(capacities, weights, target, clump)


def dispersion(bad_share: float, clump: float) -> float:
    """How many requests of a level count as one, at this share of bad ones."""
    return max(1.0, clump * math.sqrt(max(bad_share, 0.0)))


def _log_likelihood(o: Observation, share: Array) -> Array:
    result: Array = o.good * np.log(share) + (o.due - o.good) * np.log1p(-share + 1e-12)
    return result


def _by_order(o: Observation, capacities: Array, target: float) -> Array:
    """What a level says of each capacity without the curve: below the capacity the share is at least the target, above it at most."""
    share = o.good / o.due
    below = _log_likelihood(o, np.array([max(share, target)]))[0]  # o.rate is below the capacity
    above = _log_likelihood(o, np.array([max(min(share, target), 1e-12)]))[0]
    return np.where(capacities >= o.rate, below, above)


def nearness(bad_share: float, target: float) -> float:
    """Weight of a level by how far its share is from the target's, in log odds: the curve is only straight near by."""
    share = min(max(bad_share, LAPSE), 1 - LAPSE)
    distance = math.log(share / (1 - share)) - math.log((1 - target) / target)
    return 1.0 / (1.0 + (distance / NEAR) ** 2)


def clumping(seen: Sequence[Observation]) -> float:
    """The constant of `dispersion`, from the clusters of bad requests in all levels, and a prior worth a few clusters.

    Clusters that arrive independently with K bad requests each give counts with variance / mean = E[K^2] / E[K] (compound Poisson).
    """
    squares = CLUMP_PRIOR**2 * CLUMP_PRIOR_WEIGHT
    total = CLUMP_PRIOR * CLUMP_PRIOR_WEIGHT
    for o in seen:
        bad = o.due - o.good
        if not 0 < bad < o.due or not o.runs:
            continue
        scale = math.sqrt(bad / o.due)
        sizes = [size / scale for size in clusters(o.runs)]
        squares += sum(size * size for size in sizes)
        total += sum(sizes)
    return squares / total


def clusters(runs: Sequence[int]) -> list[int]:
    """Sizes of the clusters of bad requests in runs of good, bad, good, ... requests.

    How many there are is estimated by the extremal index from the gaps between bad requests, and the longest gaps part them: the
    intervals estimator and its declustering (Ferro & Segers 2003), which need no length of a gap to be chosen.
    """
    gaps: list[int] = []  # requests from one bad one to the next
    for position in range(1, len(runs), 2):
        if runs[position] and gaps_begun(gaps, runs, position):
            gaps.append(runs[position - 1] + 1)
        gaps += [1] * (runs[position] - 1)
    bad = sum(runs[1::2])
    if bad == 0:
        return []
    if not gaps:
        return [bad]
    found = np.array(gaps, dtype=np.float64)
    if found.max() > 2:
        index = 2 * (found - 1).sum() ** 2 / (len(found) * max(1e-9, ((found - 1) * (found - 2)).sum()))
    else:
        index = 2 * found.sum() ** 2 / (len(found) * (found**2).sum())
    parts = max(1, math.floor(min(1.0, index) * bad))
    if parts == 1:
        return [bad]
    threshold = max(2, int(np.sort(found)[-(parts - 1)]))
    sizes = [1]
    for gap in gaps:
        if gap >= threshold:
            sizes.append(1)
        else:
            sizes[-1] += 1
    return sizes


def gaps_begun(gaps: Sequence[int], runs: Sequence[int], position: int) -> bool:
    """True when a bad request came before this run."""
    return any(runs[before] for before in range(1, position, 2))
