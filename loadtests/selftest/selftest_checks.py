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
from loadtests.records.run_journal import Capacity, LevelFinished, LevelPurpose, LevelStarted

# Request id -> what the server did (loadtests.selftest.reference_server).
Log = Mapping[str, Mapping[str, Any]]
Unit = Literal["seconds", "count", "number", "requests/s"]
QUANTILES = (0.50, 0.95, 0.99)
SHARE = 0.01  # of a time: what it may be off by, or so many seconds where that is more
FLOOR_SECONDS = {"TTFT": 0.001, "TPOT": 0.0001, "E2E": 0.001}  # a TPOT is a mean
DISPERSION_SIGMA = 3.3  # standard deviations: about 1 in 1,000 right processes has more
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
    note: str = ""

    @property
    def passed(self) -> bool:
        """The measured value is within `limit` of the truth, or at most `limit`."""
        if self.measured is None or self.note.startswith("wrong"):
            return False
        return abs(self.measured - (self.truth or 0.0)) <= self.limit * (1 + 1e-9)


def times_rows(world: str, records: Sequence[RequestRecord], log: Log) -> list[Row]:
    """TTFT, TPOT, E2E at three quantiles, and the longest gap between chunks, of one world.

    True are the moments at which the server had read the request and wrote each chunk, so the
    client's delays of sending and receiving count as error.
    """
    found = [log.get(record.request_id or "") for record in records]
    entries = [entry for entry in found if entry is not None and entry["chunks"]]
    rows = [Row(world, "answers", len(log), len(entries), 0, "count")]
    if not entries:
        return rows
    level = level_of(records)
    first = np.array([entry["chunks"][0] for entry in entries])
    last = np.array([entry["chunks"][-1] for entry in entries])
    arrived = np.array([entry["arrived"] for entry in entries])
    later = np.array([entry["tokens"] - entry["first_tokens"] for entry in entries])
    pairs = {
        "TTFT": (first - arrived, level.ttft),
        "TPOT": ((last - first)[later > 0] / later[later > 0], level.tpot[~np.isnan(level.tpot)]),
        "E2E": (last - arrived, level.e2e),
    }
    for name, (values, seen) in pairs.items():
        for share in QUANTILES:
            truth, measured = (
                float(np.quantile(one, share, method="inverted_cdf")) for one in (values, seen)
            )
            limit = max(SHARE * truth, FLOOR_SECONDS[name])
            rows.append(Row(world, f"{name} p{share * 100:g}", truth, measured, limit, "seconds"))
    gaps = np.concatenate([np.diff(entry["chunks"]) for entry in entries])
    truth, most = float(gaps.max()), float(level.itl.max(initial=0.0))
    rows.append(Row(world, "longest gap", truth, most, max(SHARE * truth, 0.001), "seconds"))
    if stalls := int((gaps > 1.0).sum()):
        rows.append(Row(world, "stalls", stalls, int((level.itl > 1.0).sum()), 0, "count"))
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
    return [Row(world, name, true[name], seen[name], 0, "count") for name in sorted(true | seen)]


def arrival_row(world: str, arrived: npt.NDArray[np.float64], rate: float) -> Row:
    """The server's arrivals (ascending, seconds) against Poisson.

    The index of dispersion of their counts in short windows (variance / mean) is 1 for Poisson,
    less where they come evenly, more where they come in clumps.
    """
    windows = int((arrived[-1] - arrived[0]) * rate / 2)  # of two mean gaps each
    counts, _ = np.histogram(arrived, bins=windows)
    spread = float(counts.var(ddof=1) / counts.mean())
    several = DISPERSION_SIGMA * math.sqrt(2 / windows)
    return Row(world, "index of dispersion", 1.0, spread, several, "number")


def lag_row(world: str, records: Sequence[RequestRecord], limit_seconds: float) -> Row:
    """How late the requests left, p99."""
    lag = send_lag_p99(level_of(records))
    return Row(world, "send lag p99", None, lag, limit_seconds, "seconds")


def capacity_rows(world: str, found: Capacity, truth: float) -> list[Row]:
    """The estimate within CAPACITY_SHARE, inside an interval that holds the truth; what is
    confirmed is no more than the truth.
    """
    note = f"wrong: {found.reason}"
    if found.low is not None and found.high is not None:
        holds = found.low <= truth <= found.high
        note = f"{'' if holds else 'wrong '}interval {found.low:.3g} to {found.high:.3g}"
    most = truth * (1 + CONFIRMED_SHARE)
    return [
        Row(world, "limit", truth, found.limit, CAPACITY_SHARE * truth, "requests/s", note),
        Row(world, "confirmed", None, found.held, most, "requests/s"),
    ]


def level_of(records: Sequence[RequestRecord], **asked: Any) -> Level:
    """A finished level; `asked`: of its LevelStarted; without a window all of them are in it."""
    last = max((record.due_seconds for record in records), default=0.0)
    same = {"cell": "", "level": "", "window_seconds": asked.pop("window_seconds", last + 1)}
    started = LevelStarted(purpose=LevelPurpose.LOAD, **same, **asked)
    return Level.of(records, started, LevelFinished(due=len(records), **same))
