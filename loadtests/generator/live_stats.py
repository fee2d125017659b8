"""Counts and histograms of a running level, second by second, for the live page.

    live = Live(SLO_PRESETS["chat"])
    live.due(record.due_seconds)
    live.add(record)
    live.as_series(most=300)       # what the page draws

Histograms have sixteen steps to an octave: quantiles are within 2.2 %. Results are made of the
records, never of this. Load generators send theirs to the master as they grow (`taken`, `merge`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from loadtests.metrics.request_metrics import (
    is_good,
    outcome,
    send_lag_seconds,
    tpot_seconds,
    ttft_seconds,
)
from loadtests.metrics.slo import Slo
from loadtests.records.schema import RequestRecord

STEPS = 16  # of a histogram, to an octave
LEAST_SECONDS = 1e-6
QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
TIMES = ("ttft", "tpot", "lag")
NEVER = 1 << 20  # the step of requests that did not end well: infinitely late

Histogram = dict[int, int]


class Second(msgspec.Struct, kw_only=True):
    """One second of a level. `due` by when requests were due, all else by when they ended."""

    due: int = 0
    ended: int = 0
    good: int = 0
    failed: int = 0
    tokens: int = 0
    ttft: Histogram = {}
    tpot: Histogram = {}
    lag: Histogram = {}


class Live:
    """All seconds so far. Cheap to add to: some 4 us a request."""

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.seconds: dict[int, Second] = {}

    def due(self, due_seconds: float) -> None:
        """A request's time has come."""
        self._at(due_seconds).due += 1

    def add(self, record: RequestRecord) -> None:
        """A request has ended."""
        _count(self._at(record.due_seconds).lag, send_lag_seconds(record))
        if record.ended_seconds is None:
            return
        second = self._at(record.ended_seconds)
        second.ended += 1
        second.good += is_good(record, self.slo)
        second.failed += record.error is not None
        second.tokens += record.output_tokens or 0
        is_ok = outcome(record) == "ok"
        _count(second.ttft, ttft_seconds(record) if is_ok else math.inf)
        _count(second.tpot, tpot_seconds(record) if is_ok else math.inf)

    def taken(self) -> bytes:
        """All that was added since the last call, to be merged elsewhere."""
        grown = self.seconds
        self.seconds = {}
        return msgspec.json.encode(grown)

    def merge(self, taken: bytes) -> None:
        for at, more in msgspec.json.decode(taken, type=dict[int, Second]).items():
            mine = self._at(at)
            for name in ("due", "ended", "good", "failed", "tokens"):
                setattr(mine, name, getattr(mine, name) + getattr(more, name))
            for name in TIMES:
                _merge(getattr(mine, name), getattr(more, name))

    def as_series(self, most: int = 300) -> dict[str, Any]:
        """Lists over time of at most `most` points: rates per second, quantiles in seconds."""
        last = max(self.seconds, default=-1)
        width = max(1, math.ceil((last + 1) / most))
        points: dict[str, list[Any]] = {
            name: [] for name in ("at", "due", "ended", "good", "failed", "tokens")
        }
        for name in TIMES:
            points |= {f"{name}_{q}": [] for q in QUANTILES}
        total = Second()
        for start in range(0, last + 1, width):
            part = Second()
            for at in range(start, min(start + width, last + 1)):
                if (second := self.seconds.get(at)) is not None:
                    _add(part, second)
            _add(total, part)
            points["at"].append(start)
            for name in ("due", "ended", "good", "failed", "tokens"):
                points[name].append(getattr(part, name) / width)
            for name in TIMES:
                for q, share in QUANTILES.items():
                    points[f"{name}_{q}"].append(quantile(getattr(part, name), share))
        whole: dict[str, Any] = {
            name: getattr(total, name) for name in ("due", "ended", "good", "failed", "tokens")
        }
        whole |= {
            f"{name}_{q}": quantile(getattr(total, name), share)
            for name in TIMES
            for q, share in QUANTILES.items()
        }
        return {"width_seconds": width, "points": points, "total": whole}

    def _at(self, seconds: float) -> Second:
        found = self.seconds.get(int(seconds))
        if found is None:
            found = self.seconds[int(seconds)] = Second()
        return found


def quantile(histogram: Mapping[int, int], share: float) -> float | None:
    """By nearest rank, as the middle of its step; None for no values, and for NEVER."""
    rank = math.ceil(share * sum(histogram.values()) - 1e-9)
    for step in sorted(histogram):
        rank -= histogram[step]
        if rank <= 0:
            if step == NEVER:
                return None
            return LEAST_SECONDS * math.exp2((step + 0.5) / STEPS) if step >= 0 else 0.0
    return None


def _count(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        step = _step(seconds)
        histogram[step] = histogram.get(step, 0) + 1


def _step(seconds: float) -> int:
    if math.isinf(seconds):
        return NEVER
    return int(math.log2(seconds / LEAST_SECONDS) * STEPS) if seconds >= LEAST_SECONDS else -1


def _merge(mine: Histogram, more: Mapping[int, int]) -> None:
    for step, count in more.items():
        mine[step] = mine.get(step, 0) + count


def _add(total: Second, part: Second) -> None:
    for name in ("due", "ended", "good", "failed", "tokens"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    for name in TIMES:
        _merge(getattr(total, name), getattr(part, name))
