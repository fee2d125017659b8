"""What measured levels say about the capacity: the highest rate that meets the SLO. Pure.

    estimate(levels, config, slo).status

The one place that decides between confirmed, at least, alone only, at no rate and unresolved. A
prediction has no part in it. Invalid levels do not count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from loadtests.capacity.confirmation import confirmation, confirmed_rate, offered_rate
from loadtests.capacity.levels import Level, hidden_overload, pooled
from loadtests.capacity.posterior import Observation, Posterior, posterior
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.clustering import clumping, dispersion
from loadtests.metrics.slo import Slo, Verdict, verdict
from loadtests.records.events import Capacity, CapacityStatus, Confirmation

LEAST_SINGLE_STREAM = 20  # requests before "at no rate"
LEAST_BAD = 5  # ... or so many bad ones
LEAST_BAD_LOADED = 20  # of a level that alone bounds the capacity from above


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

    def pooled_at(self, rate: float) -> tuple[int, int]:
        """(good, due) of the pool that this measured rate is in."""
        return next((good, due) for at, good, due in self.shares if at == rate)

    @functools.cached_property
    def belief(self) -> Posterior:
        seen = [
            Observation(
                lv.due / lv.duration_seconds,
                lv.good,
                lv.due,
                lv.runs,
                lv.start,
                hidden_overload(lv, self.slo),
                lv.is_steady is not False,
            )
            for lv in self.loaded
        ]
        return _posterior(tuple(seen), self.config.min_rate, self.config.max_rate, self.slo.target)

    @functools.cached_property
    def single_stream_counts(self) -> tuple[int, int]:
        """(good, due)."""
        return sum(lv.good for lv in self.single_stream), sum(lv.due for lv in self.single_stream)

    @property
    def is_doubtful_alone(self) -> bool:
        """Too few single-stream requests were good, and too few were asked to say so."""
        good, due = self.single_stream_counts
        return good < self.slo.target * due and self.single_stream_verdict == "unresolved"

    @functools.cached_property
    def single_stream_verdict(self) -> Verdict:
        """`fails` takes 20 requests, or five bad ones: at 99 % one slow one of five proves nothing.

        Load makes no request better: what holds under load holds alone.
        """
        good, due = self.single_stream_counts
        found = verdict(good, due, self.slo)
        if found == "fails" and due < LEAST_SINGLE_STREAM and due - good < LEAST_BAD:
            return "unresolved"
        if found == "unresolved" and self.loaded:
            more_good, more = self._up_to(self.belief.quantile(0.5))
            bad = more - more_good
            together = dispersion((bad + 0.5) / (more + 1), self.clump)
            effective = good + more_good / together, due + more / together
            return "holds" if verdict(*effective, self.slo) == "holds" else found
        return found

    @functools.cached_property
    def confirmed(self) -> float | None:
        """The highest asked rate that is confirmed, and is not above the interval, requests/s.

        Of many levels that are just too bad, one holds by chance: so the rate is not above the
        middle of the capacity by all levels, and all that was asked below that reaches the target.
        """
        rate = confirmed_rate(self.levels, self.slo, self.clump, self._low)
        middle = self.belief.quantile(0.5)
        if rate is None or (self.broken and rate > middle):
            return None
        good, due = self._up_to(max(rate, middle))
        good, due = good + self.single_stream_counts[0], due + self.single_stream_counts[1]
        return rate if good >= self.slo.target * due else None

    @functools.cached_property
    def confirmed_by(self) -> Confirmation | None:
        if self.confirmed is None:
            return None
        return confirmation(self.levels, self.slo, self.clump, self.confirmed)

    @property
    def offered(self) -> float | None:
        """What was offered up to the confirmed rate, requests/s: the capacity's `held`."""
        return None if self.confirmed_by is None else offered_rate(self.confirmed_by)

    @property
    def is_surely_confirmed(self) -> bool:
        """The confirmed rate is not above the low end of the interval."""
        return self.confirmed is not None and self.confirmed <= self._low

    @property
    def _low(self) -> float:
        """The low end of the interval; infinite where no rate broke the SLO."""
        return self.belief.quantile(1 - self.config.confidence) if self.broken else math.inf

    def _up_to(self, rate: float) -> tuple[int, int]:
        """(good, due) of levels at most at this rate."""
        seen = [lv for lv in self.loaded if lv.rate is not None and lv.rate <= rate * 1.001]
        return sum(lv.good for lv in seen), sum(lv.due for lv in seen)

    @functools.cached_property
    def clump(self) -> float:
        """As `belief` has it, without the posterior: of levels whose queue does not grow."""
        steady = [lv for lv in self.loaded if lv.is_steady is not False]
        return clumping([(lv.due - lv.good, lv.due, lv.runs) for lv in steady])

    @functools.cached_property
    def capacity(self) -> Capacity:
        if self.single_stream_verdict == "fails" and self.confirmed is None:
            return self._none()
        low, middle, high = self._interval()
        status = self._status(high)
        is_narrow = (
            low is not None
            and high is not None
            and middle is not None
            and high - low <= 2 * self.config.precision * middle
        )
        return Capacity(
            status=status,
            held=self.offered,
            low=low,
            estimate=middle,
            high=high,
            is_narrow=is_narrow,
            reason=self._reason(status),
            confirmed_by=self.confirmed_by,
            starts=self._starts(),
        )

    def _starts(self) -> int | None:
        """Starts of the server that the levels ran on; None where not on record."""
        return len({lv.start for lv in self.loaded if lv.start is not None}) or None

    def _interval(self) -> tuple[float | None, float | None, float | None]:
        """Low, middle and high by the levels; None where none bounds it."""
        if not self.loaded:
            return None, None, None
        confidence = self.config.confidence
        low = self.belief.bound(1 - confidence)
        high = self.belief.bound(confidence) if self.broken else None
        if high is None and low is None:
            high = min((lv.rate for lv in self.loaded if lv.rate and self._fails(lv)), default=None)
        if high is not None and self.offered is not None:
            high = max(high, self.offered)
        known = low is not None and high is not None
        return low, self.belief.quantile(0.5) if known else None, high

    def _fails(self, level: Level) -> bool:
        """By 20 bad requests or more: Wilson's bound of a handful that share their fate is none."""
        if level.due - level.good < LEAST_BAD_LOADED:
            return False
        together = dispersion((level.due - level.good + 0.5) / (level.due + 1), self.belief.clump)
        return verdict(level.good, level.due, self.slo, together) == "fails"

    def _status(self, high: float | None) -> CapacityStatus:
        if self.confirmed is not None:
            return CapacityStatus.AT_LEAST if high is None else CapacityStatus.CONFIRMED
        if self.single_stream_verdict == "holds":
            return CapacityStatus.ALONE_ONLY
        return CapacityStatus.UNRESOLVED

    def _reason(self, status: CapacityStatus) -> str:
        levels, due = len(self.loaded), sum(lv.due for lv in self.loaded)
        counted = f"{levels} level{'s' * (levels != 1)}, {due} requests"
        match status:
            case CapacityStatus.CONFIRMED:
                return counted
            case CapacityStatus.AT_LEAST:
                return f"no rate was seen to break the SLO; {counted}"
            case CapacityStatus.ALONE_ONLY:
                return f"single-stream requests meet the SLO, no rate is confirmed; {counted}"
        if not self.loaded:
            return "no level of open load was measured"
        good, due = self.single_stream_counts
        return f"{good} of {due} single-stream requests were good, no rate is confirmed; {counted}"

    def _none(self) -> Capacity:
        good, due = self.single_stream_counts
        return Capacity(
            status=CapacityStatus.NONE,
            held=0.0,
            low=0.0,
            estimate=0.0,
            high=0.0,
            is_narrow=True,
            reason=f"{due - good} of {due} requests broke the SLO with nothing else running",
        )


@functools.lru_cache(maxsize=64)
def _posterior(
    seen: tuple[Observation, ...], min_rate: float, max_rate: float, target: float
) -> Posterior:
    """Kept: several SLOs, and each step of a search, ask for the same again."""
    return posterior(seen, min_rate, max_rate, target)


def never_quiet(found: Capacity, by: str) -> Capacity:
    """Of a search that ended since the machine was busy: what was confirmed before stays so.

    `by` names who disturbed it.
    """
    reason = f"the machine was busy: {by}"
    if found.holds or found.status is CapacityStatus.NONE:
        return msgspec.structs.replace(found, reason=f"{found.reason}; {reason}")
    return msgspec.structs.replace(
        found, status=CapacityStatus.UNRESOLVED, held=None, reason=reason
    )


def estimate(levels: Sequence[Level], config: SearchConfig, slo: Slo) -> Capacity:
    """The capacity by these levels, in whatever order, also for an SLO not searched for."""
    return Evidence(levels, config, slo).capacity
