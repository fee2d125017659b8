"""Percentiles of latencies, each given only if enough observations support it."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

PERCENTILES = (("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99))
BEYOND = 3  # observations that must lie beyond a percentile for it to be given


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Nearest-rank percentiles in seconds. None: fewer than three observations lie beyond it.

    The latency of a request that failed is infinite. `mean` is the mean of the finite latencies.
    """

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @property
    def median_or_mean(self) -> float | None:
        """The median, or the mean if there is no finite median."""
        return self.p50 if self.p50 is not None and self.p50 < math.inf else self.mean


def distribution(values: npt.NDArray[np.float64]) -> Distribution:
    """Return the distribution of [observations], in seconds. inf: the request failed; nan: the
    latency is not defined, and is left out."""
    known = np.sort(values[~np.isnan(values)])
    finite = known[np.isfinite(known)]
    supported = [(name, q) for name, q in PERCENTILES if len(known) * (1 - q) >= BEYOND - 1e-9]
    return Distribution(
        mean=float(finite.mean()) if len(finite) else None,
        **{name: float(known[math.ceil(q * len(known) - 1e-9) - 1]) for name, q in supported},
    )
