"""What measured levels say about the capacity: the highest rate that meets the SLO. Pure.

A monotone curve of the share of good requests against ln(rate) (loadtests.capacity.posterior) is
fitted to all levels, so noise at one cannot contradict the others. Invalid levels do not count.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from loadtests.capacity.posterior import Observation, Posterior, posterior
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.level_summary import Summary
from loadtests.metrics.slo import Slo, Verdict, verdict
from loadtests.records.events import Capacity

FLAT_SLOPE = 4.0  # of the odds of a bad request against the rate; queues near capacity: 5 to 40


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One finished level. `runs` and `correlated` show how far neighbours share their fate.

    Where both are missing, a queue of a few servers is assumed.
    """

    rate: float | None  # asked, requests/s; None: single-stream
    due: int
    good: int
    duration_seconds: float
    runs: tuple[int, ...] = ()  # lengths of runs of good, bad, good, ... in order of due time
    correlated: float | None = None  # how many consecutive latencies count as one
    mean_e2e_seconds: float | None = None
    is_valid: bool = True  # False: on record, not counted


def level_of(summary: Summary) -> Level:
    """A level without an asked rate is a single-stream one."""
    return Level(
        rate=summary.asked_rate,
        due=summary.counts.due,
        good=summary.counts.good,
        duration_seconds=summary.window.seconds,
        runs=summary.counts.runs,
        correlated=summary.latencies.correlated,
        mean_e2e_seconds=summary.latencies.e2e.mean,
        is_valid=summary.is_valid,
    )


@dataclass(frozen=True)
class Evidence:
    """The levels that count, for one SLO; each derived value is computed once."""

    levels: Sequence[Level]
    config: SearchConfig
    slo: Slo

    @functools.cached_property
    def single_stream(self) -> list[Level]:
        return [level for level in self.levels if level.rate is None and level.is_valid]

    @functools.cached_property
    def loaded(self) -> list[Level]:
        """Levels at a rate."""
        return [lv for lv in self.levels if lv.rate is not None and lv.is_valid and lv.due]

    @functools.cached_property
    def shares(self) -> list[tuple[float, int, int]]:
        return pooled(self.loaded)

    @functools.cached_property
    def held(self) -> list[float]:
        """Rates whose pooled share of good requests reaches the target: a side of the bracket."""
        return [rate for rate, good, due in self.shares if good >= self.slo.target * due]

    @functools.cached_property
    def broken(self) -> list[float]:
        return [rate for rate, good, due in self.shares if good < self.slo.target * due]

    @functools.cached_property
    def belief(self) -> Posterior:
        seen = [
            Observation(lv.due / lv.duration_seconds, lv.good, lv.due, lv.correlated, lv.runs)
            for lv in self.loaded
        ]
        return posterior(
            seen,
            self.config.min_rate,
            self.config.max_rate,
            self.slo.target,
            self.config.predicted_rate,
        )

    @functools.cached_property
    def single_stream_verdict(self) -> Verdict:
        good = sum(level.good for level in self.single_stream)
        return verdict(good, sum(level.due for level in self.single_stream), self.slo)

    @functools.cached_property
    def is_flat(self) -> bool:
        """The rate hardly matters: there may be no capacity, and an idle server must be asked.

        Where some rate has been proven to hold, there is one.
        """
        if len(self.loaded) < 3 or self.belief.mean_slope >= FLAT_SLOPE:
            return False
        return all(verdict(lv.good, lv.due, self.slo) != "holds" for lv in self.loaded)

    def pooled_at(self, rate: float) -> tuple[int, int]:
        """(good, due) of the pool that this measured rate is in."""
        return next((good, due) for at, good, due in self.shares if at == rate)

    @functools.cached_property
    def capacity(self) -> Capacity:
        if self.single_stream_verdict == "fails":
            return _none(self.single_stream)
        if not self.loaded:
            holds = True if self.single_stream_verdict == "holds" else None
            return _unresolved("no level of open load was measured", holds_at_any_rate=holds)
        confidence = self.config.confidence
        low, middle, high = (self.belief.quantile(q) for q in (1 - confidence, 0.5, confidence))
        if not self.broken:
            return self._never_broken(low)
        if not self.held:
            return _unresolved("no rate was seen to meet the SLO", high=high)
        if self.is_flat and self.single_stream_verdict != "holds":
            return _unresolved(
                "the share of good requests hardly depends on the rate, and too few single-stream "
                "requests were measured to say what it is without load",
                high=high,
                estimate=middle,
            )
        if high - low > 2 * self.config.precision * middle:
            return _unresolved("the interval is wider than asked", low, high, middle, True)
        return Capacity(
            low=low,
            high=high,
            estimate=middle,
            status="resolved",
            holds_at_any_rate=True,
            reason=f"{len(self.loaded)} levels, {sum(lv.due for lv in self.loaded)} requests",
        )

    def _never_broken(self, low: float) -> Capacity:
        top = max(self.held)
        at_limit = top >= self.config.max_rate * 0.999
        if not at_limit or verdict(*self.pooled_at(top), self.slo) != "holds":
            return _unresolved(
                f"no rate up to {top:.4g} requests/s was seen to break the SLO",
                low,
                holds_at_any_rate=True,
            )
        return Capacity(
            low=top,
            high=None,
            estimate=None,
            status="at_least",
            holds_at_any_rate=True,
            reason=f"the SLO holds at {top:.4g} requests/s, the highest rate allowed",
        )


def estimate(levels: Sequence[Level], config: SearchConfig, slo: Slo) -> Capacity:
    """The capacity by these levels, in whatever order, also for an SLO not searched for."""
    return Evidence(levels, config, slo).capacity


def pooled(levels: Sequence[Level]) -> list[tuple[float, int, int]]:
    """(rate, good, due) of valid levels, ascending; shares made non-increasing by pooling (PAVA).

    Not scipy's isotonic_regression: that pools equal neighbours too, and requests of lower rates
    would count as evidence for the highest.
    """
    merged: dict[float, list[int]] = {}
    for level in levels:
        if level.rate is not None and level.is_valid and level.due:
            counts = merged.setdefault(level.rate, [0, 0])
            counts[0] += level.good
            counts[1] += level.due
    blocks: list[tuple[list[float], int, int]] = []  # rates, good, due
    for rate in sorted(merged):
        rates, good, due = [rate], *merged[rate]
        while blocks and blocks[-1][1] * due < good * blocks[-1][2]:
            before = blocks.pop()
            rates, good, due = before[0] + rates, before[1] + good, before[2] + due
        blocks.append((rates, good, due))
    return [(rate, good, due) for rates, good, due in blocks for rate in rates]


def _none(single_stream: Sequence[Level]) -> Capacity:
    due = sum(level.due for level in single_stream)
    bad = due - sum(level.good for level in single_stream)
    return Capacity(
        low=0.0,
        high=0.0,
        estimate=0.0,
        status="none",
        holds_at_any_rate=False,
        reason=f"{bad} of {due} requests broke the SLO with nothing else running",
    )


def _unresolved(
    reason: str,
    low: float = 0.0,
    high: float | None = None,
    estimate: float | None = None,
    holds_at_any_rate: bool | None = None,
) -> Capacity:
    return Capacity(
        low=low,
        high=high,
        estimate=estimate,
        status="unresolved",
        holds_at_any_rate=holds_at_any_rate,
        reason=reason,
    )
