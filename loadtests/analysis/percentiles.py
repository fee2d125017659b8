"""Percentiles of latencies; those that too few observations support are not given."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

PERCENTILES = (("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99))
BEYOND = 3  # observations that must lie beyond a percentile for it to be given


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Nearest-rank percentiles over `count` observations, in seconds.

    `late` of them never came and count as infinite; the mean is over the others. A percentile
    is None where fewer than three observations lie beyond it, or where it is infinite: then
    `never` names it.
    """

    count: int
    late: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    never: tuple[str, ...] = ()

    @property
    def median_or_mean(self) -> float | None:
        """The median; the mean where too few observations give no median."""
        return self.mean if self.p50 is None else self.p50


def distribution(values: npt.NDArray[np.float64]) -> Distribution:
    """Of [observations]: inf never came, nan is not defined and left out."""
    known = np.sort(values[~np.isnan(values)])
    finite = known[np.isfinite(known)]
    given = [(n, q) for n, q in PERCENTILES if len(known) * (1 - q) >= BEYOND - 1e-9]
    ranks = {name: math.ceil(q * len(known) - 1e-9) - 1 for name, q in given}
    return Distribution(
        count=len(known),
        late=len(known) - len(finite),
        mean=float(finite.mean()) if len(finite) else None,
        never=tuple(name for name, rank in ranks.items() if rank >= len(finite)),
        **{name: float(finite[rank]) for name, rank in ranks.items() if rank < len(finite)},
    )
