"""Whether a client measured what happened: its records and the server's account in, rows out.

    rows = times_rows("one token a chunk", records, log)
    [row.passed for row in rows]

Pure. Times may differ by 1 % or 1 ms (0.1 ms for a TPOT), whichever is more; counts not at all.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np

from loadtests.metrics.request_metrics import (
    e2e_seconds,
    failure_kind,
    itl_seconds,
    send_lag_seconds,
    tpot_seconds,
    ttft_seconds,
)
from loadtests.records.events import Capacity
from loadtests.records.schema import RequestRecord
from loadtests.workload.arrivals import Poisson, Times, generator
from loadtests.workload.goodness_of_fit import check

# Request id -> what the server did (loadtests.selftest.reference_server).
Log = Mapping[str, Mapping[str, Any]]
Unit = Literal["seconds", "count", "number", "requests/s"]
QUANTILES = (0.50, 0.95, 0.99)
# Mean gaps in a window of the index of dispersion: many short windows, so that +- 0.15 can be told.
DISPERSION_GAPS = 2
SHARE = 0.01  # of a time: what it may be off by, or so many seconds where that is more
FLOOR_SECONDS = {"TTFT": 0.001, "TPOT": 0.0001, "E2E": 0.001}  # a TPOT is a mean: a tenth
GAP_FLOOR_SECONDS = 0.001
CAPACITY_SHARE = 0.15
SIMULATED = 200_000  # requests


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table, values in `unit`. `truth` None: `limit` is an upper bound."""

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


def capacity_row(what: str, truth: float, found: Capacity) -> Row:
    """Passed within CAPACITY_SHARE of the truth, which the interval must hold."""
    row = Row(
        what=what,
        truth=truth,
        measured=found.estimate,
        limit=CAPACITY_SHARE * truth,
        unit="requests/s",
        passed=False,
        note=found.reason,
    )
    if found.low is None or found.high is None or found.estimate is None:
        return row
    is_near = abs(found.estimate - truth) <= row.limit
    return msgspec.structs.replace(
        row,
        passed=is_near and found.low <= truth <= found.high,
        note=f"interval {found.low:.3g} to {found.high:.3g}",
    )


def near(what: str, truth: float, measured: float | None, limit: float, unit: Unit) -> Row:
    """Passes when the measured value is within `limit` of the truth."""
    passed = measured is not None and abs(measured - truth) <= limit * (1 + 1e-9)
    return Row(what=what, truth=truth, measured=measured, limit=limit, unit=unit, passed=passed)


def below(what: str, measured: float | None, limit: float, unit: Unit) -> Row:
    """Passes when the measured value is at most `limit`."""
    passed = measured is not None and measured <= limit
    return Row(what=what, truth=None, measured=measured, limit=limit, unit=unit, passed=passed)


def times_rows(world: str, records: Sequence[RequestRecord], log: Log) -> list[Row]:
    """TTFT, TPOT, E2E at three quantiles, and the longest gap between chunks, of one world.

    True are the moments at which the server had read the request and wrote each chunk, so the
    client's delays of sending and receiving count as error.
    """
    pairs = [
        (r, entry)
        for r in records
        if (entry := log.get(r.request_id or "")) is not None and entry["chunks"]
    ]
    true = _true_times([entry for _, entry in pairs])
    seen = {
        "TTFT": [ttft_seconds(r) for r, _ in pairs],
        "TPOT": [tpot_seconds(r) for r, _ in pairs],
        "E2E": [e2e_seconds(r) for r, _ in pairs],
    }
    rows = [near(f"{world}: answers", len(log), len(pairs), 0, "count")]
    for name, values in true.items():
        known = [value for value in seen[name] if value is not None]
        for share in QUANTILES:
            is_ = quantile(values, share)
            if is_ is not None:
                limit = max(SHARE * is_, FLOOR_SECONDS[name])
                what = f"{world}: {name} p{share * 100:g}"
                rows.append(near(what, is_, quantile(known, share), limit, "seconds"))
    return rows + _gap_rows(world, pairs)


def _true_times(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """TTFT, TPOT and E2E by the server's account, in seconds."""
    true: dict[str, list[float]] = {"TTFT": [], "TPOT": [], "E2E": []}
    for entry in entries:
        chunks = entry["chunks"]
        later = entry["tokens"] - entry["first_tokens"]
        true["TTFT"].append(chunks[0] - entry["arrived"])
        true["E2E"].append(chunks[-1] - entry["arrived"])
        if later:
            true["TPOT"].append((chunks[-1] - chunks[0]) / later)
    return true


def _gap_rows(world: str, pairs: Sequence[tuple[RequestRecord, Mapping[str, Any]]]) -> list[Row]:
    """The longest gap between chunks, and how many are over 1 s."""
    true = [b - a for _, entry in pairs for a, b in pairwise(entry["chunks"])]
    seen = [gap for r, _ in pairs for gap in itl_seconds(r)]
    if not true or not seen:
        return []
    longest = max(true)
    limit = max(SHARE * longest, GAP_FLOOR_SECONDS)
    rows = [near(f"{world}: longest gap", longest, max(seen), limit, "seconds")]
    if longest > 1.0:
        stalls = sum(gap > 1.0 for gap in true)
        found = sum(gap > 1.0 for gap in seen)
        rows.append(near(f"{world}: stalls seen", stalls, found, 0, "count"))
    return rows


def failure_rows(records: Sequence[RequestRecord], log: Log) -> list[Row]:
    """Whole, refused and cut-off answers, each as often as the server says."""
    true = Counter(_outcome(entry) for entry in log.values())
    names = {None: "whole", "refused": "refused (429)", "cut_off": "cut off"}
    kinds = [failure_kind(r) for r in records]
    seen = Counter(names.get(kind, kind or "") for kind in kinds)
    return [
        near(f"failures: {name}", true[name], seen[name], 0, "count")
        for name in sorted(set(true) | set(seen))
    ]


def _outcome(entry: Mapping[str, Any]) -> str:
    if entry["status"] == 429:
        return "refused (429)"
    return "whole" if entry.get("whole") else "cut off"


def arrival_rows(world: str, arrived: Times, rate: float, seconds: float) -> list[Row]:
    """The server's arrivals against Poisson: CV of the gaps, lag-1 autocorrelation, dispersion."""
    found = check(Poisson(), arrived - np.min(arrived), rate, seconds)
    window = DISPERSION_GAPS / rate
    counts, _ = np.histogram(
        arrived - np.min(arrived),
        bins=int(seconds / window),
        range=(0.0, int(seconds / window) * window),
    )
    rows = [
        near(f"{world}: CV of gaps", 1.0, found.cv, 0.05, "number"),
        near(f"{world}: lag-1 autocorrelation", 0.0, found.lag1, 0.05, "number"),
        near(
            f"{world}: index of dispersion",
            1.0,
            float(counts.var(ddof=1) / counts.mean()),
            0.15,
            "number",
        ),
    ]
    return rows


def lag_row(world: str, records: Sequence[RequestRecord], limit_seconds: float) -> Row:
    """How late the requests left, p99."""
    lags = [lag for r in records if (lag := send_lag_seconds(r)) is not None]
    return below(f"{world}: send lag p99", quantile(lags, 0.99), limit_seconds, "seconds")


def quantile(values: Sequence[float], share: float) -> float | None:
    """By nearest rank; None for no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]


def capacity_of_slots(
    slots: int, service_seconds: float, wait_seconds: float, share: float
) -> float:
    """The Poisson rate (requests/s) at which `share` of an M/D/c queue waits <= `wait_seconds`.

    By bisection over a simulation with common random numbers, exact to about 0.5 %.
    """
    unit = np.cumsum(generator(1, 0x5E1F).standard_exponential(SIMULATED))

    def attained(rate: float) -> float:
        free = [0.0] * slots
        good = 0
        for at in (unit / rate).tolist():
            start = max(at, free[0])
            heapq.heapreplace(free, start + service_seconds)
            good += start - at <= wait_seconds
        return good / SIMULATED

    low, high = 0.0, slots / service_seconds
    for _ in range(11):
        middle = (low + high) / 2
        low, high = (middle, high) if attained(middle) >= share else (low, middle)
    return (low + high) / 2
