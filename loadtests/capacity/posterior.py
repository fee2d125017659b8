"""The share of good requests against the rate, as one curve with its uncertainty.

Below the capacity the share is at least the target, above it at most. Near the capacity the odds
of a bad request grow about as a power of the rate,

    odds(rate) = odds(target) * (rate / capacity) ** slope,

with capacity and slope unknown: the slope is 5 to 40 in a queue near saturation and about 1 where
requests seldom meet (a slow model). A level near the target (in log odds) counts by this curve, one
far from it only by the order. The posterior is computed on a grid, flat in ln(capacity) and broad
in the slope: no fit fails with three levels or with none bad. Only measured levels enter.

A queue that grows meets the SLO until TTFT is at the limit. So in a level of T seconds a good share
of up to limit / T / (1 - capacity / rate) is evidence of nothing, whatever the long-run share is.

Requests of one level share their fate, so the likelihood is divided by the dispersion, var / mean
of the count of bad ones over a binomial's (quasi-likelihood, McCullagh & Nelder 1989, 4.5), from
the clusters of bad requests in all levels: where queues remember for long, an interval is wide. A
machine is not the same from level to level, and a server not from start to start: each start has
its own capacity, lognormal around the common one, and each level its own around its start's, both
of unknown spread (nested random effects). Quantiles are of a level of the next start; after one
start only, the prior says how far that is from this one. Where starts are not on record, as of a
server that somebody else runs, they are of a level of this start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.metrics.clustering import clumping, dispersion

Array = npt.NDArray[np.float64]

CAPACITY_POINTS = 640
REACH = 64.0  # the grid goes so many times beyond the lowest and the highest rate seen
SLOPES = np.geomspace(0.5, 100.0, 16)
SLOPE_MEDIAN = 4.0  # of a lognormal prior
SLOPE_SPREAD = 1.3
SPREADS = (0.0, 0.04, 0.1, 0.25)  # of ln(capacity) from level to level
SPREAD_WEIGHTS = (0.5, 0.25, 0.17, 0.08)
START_SPREADS = (0.0, 0.04, 0.12, 0.3)  # of ln(capacity) from start to start
START_WEIGHTS = (0.2, 0.25, 0.35, 0.2)
PAD = 96  # points beyond each end of the grid: more than three of the largest spread
ROUNDED = 1e-12  # of the greatest likelihood: below it a Fourier transform gives noise
NEAR = 2.0  # distance in log odds from the target at which curve and order weigh the same
LAPSE = 0.002  # least share good: one stray good request far above capacity must not count
ROUNDS = 3
LOGISTIC = 1.702  # the logistic curve with this slope is the normal distribution to 0.01
MOVED = 0.05  # of ln: a quantile that moves more when the box is halved is the box's


class Observation(msgspec.Struct, frozen=True):
    """One level: rate in requests/s, counts, and how far neighbours share their fate."""

    rate: float
    good: int
    due: int
    runs: tuple[int, ...] = ()
    start: int | None = None
    hidden: float = 0.0  # overload that it does not show (levels.hidden_overload)
    is_steady: bool = True  # False: its requests are bad since a queue grows


class Posterior:
    """Weights over a grid of capacities (requests/s) and slopes, summing to 1.

    Of the last start's capacity; quantiles and bounds are of the next start's.
    """

    def __init__(
        self, capacities: Array, weights: Array, marginal: Array, target: float, clump: float
    ) -> None:
        self.capacities = capacities
        self.weights = weights
        self.target = target
        self.clump = clump  # of steady levels, as one that confirms is judged
        self._marginal = marginal  # of a level of the next start

    def quantile(self, q: float) -> float:
        """The rate below which the capacity of the next start lies with probability q."""
        return _quantile(np.log(self.capacities), self._marginal, q)

    def bound(self, q: float) -> float | None:
        """As `quantile`; None where the levels do not tell: the edge of the grid decides."""
        asked = self.quantile(q)
        quarter = len(self.capacities) // 4
        inner = slice(quarter, -quarter)
        if not self._marginal[inner].sum() > 0:
            return None
        within = _quantile(np.log(self.capacities[inner]), self._marginal[inner], q)
        return asked if abs(math.log(asked / within)) <= MOVED else None

    def mean_share(self, rate: float) -> float:
        """The expected share of good requests at a rate."""
        good = share_good(rate, self.capacities[:, None], SLOPES[None, :], self.target)
        return float((self.weights * good).sum())

    def chance(self, rate: float, counted: float, needed: float) -> float:
        """The chance that of `counted` independent requests at a rate, on the next start, a share
        of at least `needed` is good.
        """
        held = self._marginal > 1e-9
        capacities = self.capacities[held, None]
        share = share_good(rate, capacities, SLOPES[None, :], self.target)
        noise = np.sqrt(share * (1 - share) / counted) + 1e-9
        reached = 1.0 / (1.0 + np.exp(-np.clip(LOGISTIC * (share - needed) / noise, -50, 50)))
        return float(self._marginal[held] @ reached @ self.weights.sum(axis=0))

    def most_telling_rate(
        self, seconds: float, low: float, high: float, hidden: float = 0.0
    ) -> float:
        """The rate from low to high whose outcome the capacity explains most of (its variance).

        Of a level of so many seconds, which hides such an overload. Far below the capacity no
        request fails, far above all do, whatever the capacity is.
        """
        low, high = sorted((low, high))
        best = min(max(self.quantile(0.5), low), high)
        low = min(max(low, self.quantile(0.02) * 0.97), high)
        high = max(min(high, self.quantile(0.98) * 1.03), low)
        best_score = -1.0
        by_capacity = self.weights.sum(axis=1)
        held = by_capacity > 1e-12  # a narrow belief leaves most of the grid empty
        capacities = self.capacities[held, None]
        weights = self.weights[held]
        marginal = by_capacity[held]
        for rate in np.geomspace(low, high, 25):
            good = share_good(float(rate), capacities, SLOPES[None, :], self.target)
            good = np.maximum(good, _unseen(float(rate), capacities, hidden, self.target))
            mean = float((weights * good).sum())
            given = (weights * good).sum(axis=1) / marginal
            explained = float((marginal * (given - mean) ** 2).sum())
            total = float((weights * (good - mean) ** 2).sum())
            counted = max(1.0, rate * seconds / dispersion(1.0 - mean, self.clump))
            noise = float((weights * good * (1 - good)).sum()) / counted
            score = explained / (total - explained + noise + 1e-12)
            if score > best_score:
                best = float(rate)
                best_score = score
        return best


def _quantile(logs: Array, marginal: Array, q: float) -> float:
    return float(np.exp(np.interp(q, np.cumsum(marginal) / marginal.sum(), logs)))


def posterior(
    seen: Sequence[Observation], min_rate: float, max_rate: float, target: float
) -> Posterior:
    """What the levels say. With none: the prior, flat in ln(capacity) from min_rate to max_rate."""
    rates = [o.rate for o in seen] or [min_rate * REACH, max_rate / REACH]
    capacities = np.geomspace(min(rates) / REACH, max(rates) * REACH, CAPACITY_POINTS)
    by_slope = -0.5 * ((np.log(SLOPES) - math.log(SLOPE_MEDIAN)) / SLOPE_SPREAD) ** 2
    prior = np.tile(by_slope, (len(capacities), 1))
    shares = [share_good(o.rate, capacities[:, None], SLOPES[None, :], target, o.due) for o in seen]
    unseen = [_unseen(o.rate, capacities, o.hidden, target)[:, None] for o in seen]
    by_curve = [
        _log_likelihood(o, share, early)
        for o, share, early in zip(seen, shares, unseen, strict=True)
    ]
    by_order = [_by_order(o, capacities, target)[:, None] for o in seen]
    steady = clumping([(o.due - o.good, o.due, o.runs) for o in seen if o.is_steady])
    clump = max(steady, clumping([(o.due - o.good, o.due, o.runs) for o in seen]))
    bad = [(o.due - o.good + 0.5) / (o.due + 1.0) for o in seen]
    logs: list[Array] = []
    for _ in range(ROUNDS):  # the weights of levels depend on the curve, the curve on the weights
        logs = []
        for i in range(len(seen)):
            near = nearness(bad[i], target)
            curve = near * by_curve[i] / dispersion(max(bad[i], 1 - target), clump)
            logs.append(curve + (1 - near) * by_order[i] / dispersion(1 - target, clump))
        weights = _normal(prior + sum(logs))
        bad = [1.0 - float((weights * share).sum()) for share in shares]
    starts = [o.start for o in seen]
    return Posterior(capacities, *_spread(capacities, prior, logs, starts), target, steady)


def _spread(
    capacities: Array, prior: Array, logs: Sequence[Array], starts: Sequence[int | None]
) -> tuple[Array, Array]:
    """Weights of the last start's (capacity, slope), and of the capacity that a level of the next
    start has, over both unknown spreads.
    """
    step = math.log(capacities[1] / capacities[0])
    last = starts[-1] if starts else None
    between = list(zip(START_SPREADS, START_WEIGHTS, strict=True))
    if last is None:  # a server that somebody else runs: of this start
        between = [(0.0, 1.0)]
    found: list[tuple[Array, Array]] = []  # logs, of each pair of spreads
    for spread, weight in zip(SPREADS, SPREAD_WEIGHTS, strict=True):
        by_start: dict[int | None, Array] = {last: np.zeros_like(prior)}
        for log, start in zip(logs, starts, strict=True):
            by_start[start] = by_start.get(start, 0.0) + _blurred(log, spread / step)
        for apart, share in between:
            others = prior + math.log(weight * share)
            for start, log in by_start.items():
                others = others if start == last else others + _blurred(log, apart / step)
            own = _blurred(others, apart / step) + by_start[last]
            common = others + _blurred(by_start[last], apart / step)
            found.append((own, _blurred(common, math.hypot(spread, apart) / step)))
    highest = max(float(own.max()) for own, _ in found)
    weights: Array = np.sum([np.exp(own - highest) for own, _ in found], axis=0)
    following = np.sum([np.exp(one - highest).sum(axis=1) for _, one in found], axis=0)
    return weights / weights.sum(), following / following.sum()


def _blurred(log_table: Array, steps: float) -> Array:
    """Log of a [CAPACITY_POINTS, ...] table averaged over a normal of `steps` grid steps."""
    if steps <= 0:
        return log_table
    highest = log_table.max()
    padded = np.pad(np.exp(log_table - highest), ((PAD, PAD), (0, 0)), mode="edge")
    kernel = np.exp(-2.0 * (math.pi * steps * np.fft.rfftfreq(len(padded))) ** 2)
    smooth = np.fft.irfft(np.fft.rfft(padded, axis=0) * kernel[:, None], len(padded), axis=0)
    blurred: Array = np.log(np.maximum(smooth[PAD:-PAD], ROUNDED)) + highest
    return blurred


def _normal(log_weights: Array) -> Array:
    weights: Array = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    return weights


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


def _unseen(rate: float, capacity: Array, hidden: float, target: float) -> Array:
    """The share of good requests until an overload shows; never sure, as no queue grows evenly."""
    overload = np.maximum(1.0 - capacity / rate, 1e-9)
    early: Array = np.minimum(hidden / overload, 1.0 - (1.0 - target) / 3.0)
    return np.where(capacity < rate, early, 0.0)


def nearness(bad_share: float, target: float) -> float:
    """Weight of the curve for a level, by its distance from the target in log odds."""
    share = min(max(bad_share, LAPSE), 1 - LAPSE)
    distance = math.log(share / (1 - share)) - math.log((1 - target) / target)
    return 1.0 / (1.0 + (distance / NEAR) ** 2)


def _log_likelihood(o: Observation, share: Array, early: Array | float = 0.0) -> Array:
    """One-sided: at least the share `early` may be good whatever the capacity is; a bad request
    counts in full. But nothing is likelier than the share that was seen: else capacities just below
    each rate would be.
    """
    seen = min(max(o.good / o.due, 1e-12), 1 - 1e-12)
    most = o.good * math.log(seen) + (o.due - o.good) * math.log1p(-seen)
    bad: Array = (o.due - o.good) * np.log1p(-np.minimum(share, 1 - 1e-12))
    return np.minimum(o.good * np.log(np.maximum(share, early)) + bad, most)


def _by_order(o: Observation, capacities: Array, target: float) -> Array:
    """Without the curve: below the capacity the share is at least the target, above at most."""
    share = o.good / o.due
    below = _log_likelihood(o, np.array([max(share, target)]))[0]
    above = _log_likelihood(o, np.array([max(min(share, target), 1e-12)]))[0]
    at = o.rate * (1.0 - o.hidden) if share >= target else o.rate
    by_order: Array = np.where(capacities >= at, below, above)
    return by_order
