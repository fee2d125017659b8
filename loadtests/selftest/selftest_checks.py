"""Whether a client measured what happened: its records and the server's account in, rows out.

    rows = times_rows("one token a chunk", records, log)
    [row.passed for row in rows]

Pure. Times may differ by 1 % or 1 ms (0.1 ms for a TPOT), whichever is more; counts not at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from loadtests.analysis.level import Level, failure_of
from loadtests.analysis.level_validity import send_lag_p99
from loadtests.records.request_record import RequestRecord
from loadtests.records.run_journal import Capacity, LevelPurpose, LevelStarted

# Request id -> what the server did (loadtests.selftest.reference_server).
Log = Mapping[str, Mapping[str, Any]]
Unit = Literal["seconds", "count", "number", "requests/s"]
QUANTILES = (0.50, 0.95, 0.99)
SHARE = 0.01  # of a time: what it may be off by, or so many seconds where that is more
FLOOR_SECONDS = {"TTFT": 0.001, "TPOT": 0.0001, "E2E": 0.001, "gap": 0.001}  # a TPOT is a mean
# 1 in 1,000 right processes of 1,800 arrivals has a larger distance: 1.95 / sqrt(n)
KOLMOGOROV = 1.95
LAG_SIGMA = 3.3  # standard deviations of an autocorrelation: about 0.1 % as well
CAPACITY_SHARE = 0.15
CONFIRMED_SHARE = 0.05  # that a confirmed rate may be above the truth: a minute may be lucky


class Row(msgspec.Struct, frozen=True):
    """One line of the table, values in `unit`. `truth` None: `limit` is an upper bound."""

    world: str
    what: str
    truth: float | None
    measured: float | None
    limit: float
    unit: Unit
    passed: bool
    note: str = ""

    @property
    def error(self) -> float | None:
        return None if self.truth is None or self.measured is None else self.measured - self.truth

    @property
    def used(self) -> float:
        """The share of what is allowed that the error takes; inf: nothing was measured."""
        off = self.measured if self.truth is None else self.error
        if off is None:
            return math.inf
        return abs(off) / max(self.limit, 1e-12)


def near(
    world: str, what: str, truth: float, measured: float | None, limit: float, unit: Unit
) -> Row:
    """Passes when the measured value is within `limit` of the truth."""
    passed = measured is not None and abs(measured - truth) <= limit * (1 + 1e-9)
    return Row(world, what, truth, measured, limit, unit, passed)


def below(world: str, what: str, measured: float | None, limit: float, unit: Unit) -> Row:
    """Passes when the measured value is at most `limit`."""
    passed = measured is not None and measured <= limit
    return Row(world, what, None, measured, limit, unit, passed)


def times_rows(world: str, records: Sequence[RequestRecord], log: Log) -> list[Row]:
    """TTFT, TPOT, E2E at three quantiles, and the longest gap between chunks, of one world.

    True are the moments at which the server had read the request and wrote each chunk, so the
    client's delays of sending and receiving count as error.
    """
    entries = [entry for r in records if (entry := log.get(r.request_id or "")) is not None]
    entries = [entry for entry in entries if entry["chunks"]]
    rows = [near(world, "answers", len(log), len(entries), 0, "count")]
    if not entries:
        return rows
    level = _level_of(records)
    first, last, arrived = (
        np.array(values)
        for values in zip(
            *((one["chunks"][0], one["chunks"][-1], one["arrived"]) for one in entries), strict=True
        )
    )
    later = np.array([one["tokens"] - one["first_tokens"] for one in entries])
    gaps = np.concatenate([np.diff(entry["chunks"]) for entry in entries])
    pairs = {
        "TTFT": (first - arrived, level.ttft),
        "TPOT": ((last - first)[later > 0] / later[later > 0], level.tpot),
        "E2E": (last - arrived, level.e2e),
        "gap": (gaps, level.itl),
    }
    for name, (values, seen) in pairs.items():
        for share in (1.0,) if name == "gap" else QUANTILES:
            if len(values):
                truth = _quantile(values, share)
                limit = max(SHARE * truth, FLOOR_SECONDS[name])
                what = "longest gap" if name == "gap" else f"{name} p{share * 100:g}"
                rows.append(near(world, what, truth, _quantile(seen, share), limit, "seconds"))
    if (stalls := int((gaps > 1.0).sum())) > 0:
        found = int((level.itl > 1.0).sum())
        rows.append(near(world, "stalls seen", stalls, found, 0, "count"))
    return rows


def failure_rows(world: str, records: Sequence[RequestRecord], log: Log) -> list[Row]:
    """Whole, refused and cut-off answers, each as often as the server says."""
    true = Counter(
        "refused (429)" if one["status"] == 429 else "whole" if one.get("whole") else "cut off"
        for one in log.values()
    )
    names = {None: "whole", "refused": "refused (429)", "cut_off": "cut off"}
    kinds = [failure_of(record) for record in records]
    seen = Counter(names.get(kind, kind or "") for kind in kinds)
    return [near(world, name, true[name], seen[name], 0, "count") for name in sorted(true | seen)]


def arrival_rows(world: str, arrived: npt.NDArray[np.float64], rate: float) -> list[Row]:
    """The server's arrivals against Poisson: gaps by Kolmogorov-Smirnov, and one after the other.

    `arrived`: ascending, seconds. Gaps that are right one by one may still come in clumps: that is
    in the autocorrelation of gaps and in the counts of windows (variance / mean, Poisson: 1).
    """
    from scipy.stats import kstest

    gaps = np.diff(arrived)
    found = kstest(gaps, "expon", args=(0, 1 / rate))
    off = gaps - gaps.mean()
    lag1 = float(np.dot(off[1:], off[:-1]) / np.dot(off, off))
    windows = int((arrived[-1] - arrived[0]) * rate / 2)  # of two mean gaps each
    counts, _ = np.histogram(arrived, bins=windows)
    spread = float(counts.var(ddof=1) / counts.mean())
    several = math.sqrt(2 / windows)
    return [
        below(
            world,
            "distance from Poisson",
            float(found.statistic),
            KOLMOGOROV / len(gaps) ** 0.5,
            "number",
        ),
        near(world, "lag-1 autocorrelation", 0.0, lag1, LAG_SIGMA / len(gaps) ** 0.5, "number"),
        near(world, "index of dispersion", 1.0, spread, LAG_SIGMA * several, "number"),
    ]


def lag_row(world: str, records: Sequence[RequestRecord], limit_seconds: float) -> Row:
    """How late the requests left, p99."""
    return below(world, "send lag p99", send_lag_p99(_level_of(records)), limit_seconds, "seconds")


def capacity_rows(
    world: str, found: Capacity, truth: float, low: float | None = None, high: float | None = None
) -> list[Row]:
    """The estimate within CAPACITY_SHARE, inside an interval that holds the truth; what is
    confirmed is no more than the truth. `low`, `high`: of a server whose speed changes.
    """
    low, high = low or truth, high or truth
    limit = max(CAPACITY_SHARE * truth, high * (1 + CAPACITY_SHARE) - truth)
    row = near(world, "limit", truth, found.limit, limit, "requests/s")
    if found.low is None or found.high is None:
        row = msgspec.structs.replace(row, passed=False, note=found.reason)
    else:
        holds = found.low <= high and low <= found.high
        note = f"interval {found.low:.3g} to {found.high:.3g}"
        row = msgspec.structs.replace(row, passed=row.passed and holds, note=note)
    most = high * (1 + CONFIRMED_SHARE)
    return [row, below(world, "confirmed", found.held, most, "requests/s")]


def _level_of(records: Sequence[RequestRecord]) -> Level:
    """All of them, as one level."""
    last = max((record.due_seconds for record in records), default=0.0)
    started = LevelStarted(
        cell="", level="", purpose=LevelPurpose.LOAD, rate_per_second=1.0, window_seconds=last + 1
    )
    return Level.of(records, started)


def _quantile(values: npt.NDArray[np.float64], share: float) -> float:
    """By nearest rank, of those that are defined; nan for none."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return math.nan
    return float(known[max(0, math.ceil(share * len(known) - 1e-9) - 1)])
