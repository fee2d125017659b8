"""How many requests of a level count as one: neighbours share their fate.

A stall or a full queue makes a run of requests bad together, so 100 requests tell less than 100
independent ones. Their number is divided by the dispersion, var / mean of the count of bad ones
over a binomial's, which grows with the share of bad ones. Where a queue grows, all are bad from
some moment on: a trend and no cluster, so such levels say nothing of the others' clusters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

CLUMP_PRIOR = 25.0
CLUMP_PRIOR_WEIGHT = 3.0  # clusters
SAFETY = 1.3


def dispersion(bad_share: float, clump: float) -> float:
    """How many requests of a level count as one, at this share of bad ones; at least 1."""
    return max(1.0, SAFETY * clump * math.sqrt(max(bad_share, 0.0)))


def clumping(levels: Iterable[tuple[int, int, Sequence[int]]]) -> float:
    """The constant of `dispersion`, from the clusters of bad requests in all levels and a prior.

    Each level is (bad requests, requests, runs of good, bad, good, ...).
    Independent clusters of K bad requests give counts of variance / mean = E[K^2] / E[K].
    """
    logs = CLUMP_PRIOR_WEIGHT * math.log(CLUMP_PRIOR)
    weight = CLUMP_PRIOR_WEIGHT
    for bad, due, runs in levels:
        if 0 < bad < due and runs:
            sizes = np.array(clusters(runs), dtype=np.float64)
            mean = float(np.dot(sizes, sizes) / sizes.sum())
            logs += len(sizes) * math.log(mean / math.sqrt(bad / due))
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
