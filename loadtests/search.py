"""The search for the capacity: the highest rate of requests that keeps the promise. Pure: levels in, what to do next out.

    levels: list[Level] = []
    while isinstance(step := next_step(levels, config, promise, elapsed_seconds), Measure):
        levels.append(measure(step))        # whoever measures: Locust against a server, or a simulated clock in a test
    step.capacity                           # step is Finished

First a lone level: a few requests one after the other, on an idle server. Where those already break the promise it holds at no rate. Then
levels of open load: from the hint (a simulation's prediction, or what the lone requests suggest) up or down until one holds and one does
not, then where a measurement says most about the capacity, until the interval is as narrow as asked or the budget is gone. What is known
from all levels together, `estimate` says: a monotone curve of the share of good requests against the logarithm of the rate
(loadtests/attainment.py), so that noise at one level cannot contradict the others. Levels whose client was the bottleneck do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from loadtests.attainment import Observation, Posterior, posterior
from loadtests.slo import Promise, Verdict, requests_to_hold, verdict
from loadtests.summary import Summary

Purpose = Literal["lone", "bracket", "narrow", "fixed"]
Status = Literal["resolved", "unresolved", "none", "at_least"]

FLAT_SLOPE = 4.0  # of the odds of a bad request against the rate; queues near their capacity show 5 to 40
PLAINLY = 4.0  # times the odds of a bad request that the promise allows: a rate with more is above the capacity, no chance about it


class SearchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to search. Rates in requests per second."""

    min_rate: float = 0.01
    max_rate: float = 1000.0
    precision: float = 0.10  # half the width of the interval over the estimate: 0.10 is +- 10 %
    level_seconds_min: float = 20.0
    level_seconds_max: float = 120.0
    level_requests_min: int = 30  # a level is made longer, up to its most, until this many requests are expected
    budget_seconds: float = 600.0  # for all levels, their warm-up and their draining
    start_rate: float | None = None  # a predicted capacity: where to look first; None: calibrated and simulated by the runner
    predicted_rate: float | None = None  # by calibration and simulation: evidence beside the levels, and of little weight beside many
    calibration_seconds: float = 60.0  # at most, and at most an eighth of the budget; 0: no calibration, measuring only
    rates: tuple[float, ...] = ()  # no search: these rates and no others, in this order; one that is there twice is measured twice
    rate_seconds: tuple[float, ...] = ()  # how long each of `rates` is measured; empty: as long as a level of a search
    lone_requests: int = 5
    lone_seconds: float = 60.0  # after this no further lone request is begun
    batching_gain: float = 2.0  # first guess without a prediction: this many times what one stream at a time would do
    confidence: float = 0.95  # of each side of the interval
    overhead: float = 0.25  # warm-up and draining of a level, as a share of its duration, for the budget

    def __post_init__(self) -> None:
        for name in ("min_rate", "max_rate", "precision", "level_seconds_min", "level_seconds_max", "budget_seconds", "lone_seconds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.max_rate <= self.min_rate:
            raise ValueError(f"max_rate must be above min_rate = {self.min_rate}, got {self.max_rate}")
        if self.level_seconds_max < self.level_seconds_min:
            raise ValueError(f"level_seconds_max must be at least {self.level_seconds_min}, the minimum, got {self.level_seconds_max}")
        for name in ("start_rate", "predicted_rate"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.level_requests_min < 1 or self.lone_requests < 1:
            raise ValueError("level_requests_min and lone_requests must be at least 1")
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0.5 and 1, got {self.confidence}")
        if not self.batching_gain >= 1:
            raise ValueError(f"batching_gain must be at least 1, got {self.batching_gain}")
        if not (math.isfinite(self.calibration_seconds) and self.calibration_seconds >= 0):
            raise ValueError(f"calibration_seconds must be 0 or more, got {self.calibration_seconds}")
        for name in ("rates", "rate_seconds"):
            for value in getattr(self, name):
                if not (math.isfinite(value) and value > 0):
                    raise ValueError(f"{name} must all be above 0, got {value}")
        if self.rate_seconds and len(self.rate_seconds) != len(self.rates):
            raise ValueError(f"rate_seconds has {len(self.rate_seconds)} entries for {len(self.rates)} rates: give one for each, or none")
        if not self.overhead >= 0:
            raise ValueError(f"overhead must be 0 or more, got {self.overhead}")


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One finished level, as the search sees it (`level_of` makes one of a Summary).

    `rate` None is the lone level (one request at a time). How far neighbouring requests share their fate show `runs`, the lengths of runs
    of good, bad, good, ... requests in order of their due times, and `correlated`, how many consecutive latencies count as one; both may
    be missing, and are then assumed as in a queue of a few servers. `batches` are (good, due) in consecutive parts of the window, for
    reports. An invalid level is kept for the record and not counted.
    """

    rate: float | None
    due: int
    good: int
    duration_seconds: float
    batches: tuple[tuple[int, int], ...] = ()
    runs: tuple[int, ...] = ()
    correlated: float | None = None
    mean_e2e_seconds: float | None = None
    is_valid: bool = True


def level_of(summary: Summary) -> Level:
    """A level's summary as the search sees it. A level without an asked rate is a lone one."""
    return Level(
        rate=summary.asked_rate,
        due=summary.due,
        good=summary.good,
        duration_seconds=summary.window.seconds,
        batches=summary.batches,
        runs=summary.runs,
        correlated=summary.correlated,
        mean_e2e_seconds=summary.e2e.mean,
        is_valid=summary.is_valid,
    )


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Measure this next. `rate` None: closed loop, one request at a time, `requests` of them or until `duration_seconds` have passed.

    `duration_seconds` is the window that counts; warm-up comes before it. A level that slo.is_hopeless may be cut off.
    """

    rate: float | None
    duration_seconds: float
    purpose: Purpose
    requests: int | None = None


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate that keeps the promise, requests/s.

    resolved: low..high is as narrow as asked. unresolved: it is not; None on a side where no level says anything (low 0.0: no rate was
    seen to hold, though one may). none: the promise holds at no rate, low and high are 0. at_least: it holds at the highest rate allowed.
    """

    low: float
    high: float | None
    estimate: float | None
    status: Status
    holds_at_any_rate: bool | None  # None: not known
    reason: str


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    capacity: Capacity


def next_step(levels: Sequence[Level], config: SearchConfig, promise: Promise, elapsed_seconds: float) -> Measure | Finished:
    """What to do after these levels. `elapsed_seconds` is what the search has used of its budget."""
    found = estimate(levels, config, promise)
    if config.rates:
        return _next_fixed(levels, config, found)
    if found.status != "unresolved":
        return Finished(found)
    left = config.budget_seconds - elapsed_seconds
    lone = [level for level in levels if level.rate is None and level.is_valid]
    if not lone:
        failed = sum(level.rate is None for level in levels)
        if failed >= 3 or left <= 0:
            return Finished(_because(found, f"{failed} lone levels were not valid" if failed else "the budget was gone before it began"))
        return Measure(None, config.lone_seconds, "lone", config.lone_requests)
    if sum(not level.is_valid for level in levels[-3:]) == 3:
        return Finished(_because(found, "the last three levels were not valid"))
    belief = _belief(levels, config, promise)
    if _is_flat(belief, levels, promise) and _verdict_of(lone, promise) == "unresolved":
        more = _more_lone(lone, config, promise, min(left, 0.25 * config.budget_seconds))
        if more is not None:
            return more
    wanted = _next_rate(levels, belief, config, promise)
    if wanted is None:
        if _verdict_of(lone, promise) == "holds":
            return Finished(_because(found, "lone requests keep the promise and the lowest rates tried do not"))
        return _more_lone(lone, config, promise, left) or _out_of_budget(found, config)
    rate, purpose = wanted
    duration = _duration(rate, purpose, config, left)
    return _out_of_budget(found, config) if duration is None else Measure(rate, duration, purpose)


def _next_fixed(levels: Sequence[Level], config: SearchConfig, found: Capacity) -> Measure | Finished:
    """The next of the rates that were asked for, after one lone level; none is left out, whatever the earlier ones showed."""
    if not any(level.rate is None for level in levels):
        return Measure(None, config.lone_seconds, "lone", config.lone_requests)
    done = sum(level.rate is not None for level in levels)
    if done >= len(config.rates):
        return Finished(found)
    rate = config.rates[done]
    if config.rate_seconds:
        return Measure(rate, config.rate_seconds[done], "fixed")
    return Measure(rate, min(config.level_seconds_max, max(config.level_seconds_min, config.level_requests_min / rate)), "fixed")


def estimate(levels: Sequence[Level], config: SearchConfig, promise: Promise) -> Capacity:
    """What the levels say about the capacity, whatever order they were measured in: also for a promise that no search was run for."""
    lone = [level for level in levels if level.rate is None and level.is_valid]
    lone_verdict = _verdict_of(lone, promise)
    if lone_verdict == "fails":
        bad, due = sum(level.due - level.good for level in lone), sum(level.due for level in lone)
        why = f"{bad} of {due} requests broke the promise with nothing else running"
        return Capacity(low=0.0, high=0.0, estimate=0.0, status="none", holds_at_any_rate=False, reason=why)
    open_levels = [level for level in levels if level.rate is not None and level.is_valid and level.due]
    if not open_levels:
        return _unresolved(0.0, None, None, True if lone_verdict == "holds" else None, "no level of open load was measured")
    held, broken = _held_and_broken(levels, promise)
    belief = _belief(levels, config, promise)
    low, middle, high = (belief.quantile(q) for q in (1 - config.confidence, 0.5, config.confidence))
    if not broken:
        top = max(held)
        if top >= config.max_rate * 0.999 and _pooled_verdict(open_levels, top, promise) == "holds":
            why = f"the promise holds at {top:.4g} requests/s, the highest rate allowed"
            return Capacity(low=top, high=None, estimate=None, status="at_least", holds_at_any_rate=True, reason=why)
        return _unresolved(low, None, None, True, f"no rate up to {top:.4g} requests/s was seen to break the promise")
    if not held:
        return _unresolved(0.0, high, None, None, "no rate was seen to keep the promise")
    if _is_flat(belief, levels, promise) and lone_verdict != "holds":
        why = (
            "the share of good requests hardly depends on the rate, and too few lone requests were measured to say what it is without load"
        )
        return _unresolved(0.0, high, middle, None, why)
    if high - low > 2 * config.precision * middle:
        return _unresolved(low, high, middle, True, "the interval is wider than asked")
    why = f"{len(open_levels)} levels, {sum(level.due for level in open_levels)} requests"
    return Capacity(low=low, high=high, estimate=middle, status="resolved", holds_at_any_rate=True, reason=why)


def _unresolved(low: float, high: float | None, middle: float | None, holds_at_any_rate: bool | None, reason: str) -> Capacity:
    return Capacity(low=low, high=high, estimate=middle, status="unresolved", holds_at_any_rate=holds_at_any_rate, reason=reason)


def _out_of_budget(found: Capacity, config: SearchConfig) -> Finished:
    return Finished(_because(found, f"the budget of {config.budget_seconds:.0f} s is used up"))


def _verdict_of(levels: Sequence[Level], promise: Promise) -> Verdict:
    return verdict(sum(level.good for level in levels), sum(level.due for level in levels), promise)


def _is_flat(belief: Posterior, levels: Sequence[Level], promise: Promise) -> bool:
    """Whether the rate hardly seems to matter: then there may be no capacity to find, and an idle server must be asked.

    Where some rate has been proven to hold, there is one.
    """
    tried = [level for level in levels if level.rate is not None and level.is_valid and level.due]
    if belief.mean_slope >= FLAT_SLOPE or len(tried) < 3:
        return False
    return all(verdict(level.good, level.due, promise) != "holds" for level in tried)


def pooled(levels: Sequence[Level]) -> list[tuple[float, int, int]]:
    """(rate, good, due) in ascending order of rate, levels at one rate merged, shares made non-increasing by pooling neighbours (PAVA)."""
    merged: dict[float, list[int]] = {}
    for level in levels:
        if level.rate is not None and level.is_valid and level.due:
            counts = merged.setdefault(level.rate, [0, 0])
            counts[0] += level.good
            counts[1] += level.due
    blocks: list[tuple[list[float], int, int]] = []  # rates, good, due
    for rate in sorted(merged):
        good, due = merged[rate]
        blocks.append(([rate], good, due))
        while len(blocks) > 1 and blocks[-2][1] * blocks[-1][2] < blocks[-1][1] * blocks[-2][2]:
            last = blocks.pop()
            before = blocks.pop()
            blocks.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
    return [(rate, good, due) for rates, good, due in blocks for rate in rates]


def _because(found: Capacity, why: str) -> Capacity:
    return msgspec.structs.replace(found, reason=f"{found.reason}; {why}")


def _held_and_broken(levels: Sequence[Level], promise: Promise) -> tuple[list[float], list[float]]:
    """Rates whose pooled share of good requests is at least the target, and those where it is below: sides of the bracket, not verdicts."""
    shares = pooled(levels)
    return (
        [rate for rate, good, due in shares if good >= promise.target * due],
        [rate for rate, good, due in shares if good < promise.target * due],
    )


def _pooled_verdict(levels: Sequence[Level], rate: float, promise: Promise) -> str:
    good, due = next((good, due) for at, good, due in pooled(levels) if at == rate)
    return verdict(good, due, promise)


def _belief(levels: Sequence[Level], config: SearchConfig, promise: Promise) -> Posterior:
    seen = [
        Observation(level.due / level.duration_seconds, level.good, level.due, level.correlated, level.runs)
        for level in levels
        if level.rate is not None and level.is_valid and level.due
    ]
    return posterior(seen, config.min_rate, config.max_rate, promise.target, config.predicted_rate)


def _next_rate(levels: Sequence[Level], belief: Posterior, config: SearchConfig, promise: Promise) -> tuple[float, Purpose] | None:
    """The rate to measure, or None where only an idle server is left to ask."""
    held, broken = _held_and_broken(levels, promise)
    if not held and not broken:
        return _first_rate(levels, config), "bracket"
    if not broken:
        # Faster and faster up: a hint that was far too low costs the logarithm of its error.
        if config.start_rate is not None and max(held) < 0.95 * config.start_rate:
            return min(config.max_rate, config.start_rate), "bracket"  # these were measured for another promise
        up = [rate for rate in held if config.start_rate is None or rate >= 0.95 * config.start_rate]
        return min(config.max_rate, max(held) * _stride(len(up), config)), "bracket"
    if not held:
        lowest = min(broken)
        if lowest <= max(config.min_rate * 1.001, 0.15 * _lone_rate(levels, config)):
            return None
        if config.start_rate is not None and config.min_rate <= config.start_rate < lowest / 1.05:
            return config.start_rate, "bracket"
        down = [rate for rate in broken if config.start_rate is None or rate <= 1.05 * config.start_rate]
        return max(config.min_rate, lowest / _stride(len(down), config)), "bracket"
    # Within what held and what broke, and a little beyond where either may have been chance; where it broke by far it was not.
    low, high = sorted((max(held), min(broken)))
    good, due = next((good, due) for at, good, due in pooled(levels) if at == high)
    odds = (due - good + 0.5) / (good + 0.5)
    beyond = 1.0 if odds > PLAINLY * (1 - promise.target) / promise.target else 1.25
    rate = belief.most_telling_rate(config.level_seconds_max, low / 1.25, high * beyond)
    return min(max(rate, config.min_rate), config.max_rate), "narrow"


def _stride(levels: int, config: SearchConfig) -> float:
    """The factor to the next rate, after this many levels on the same side: a prediction is off by less than a guess."""
    first = 1.5 if config.start_rate is None else 1.25
    return min(4.0, first + 0.5 * (levels - 1))


def _first_rate(levels: Sequence[Level], config: SearchConfig) -> float:
    hint = config.start_rate if config.start_rate is not None else config.batching_gain * _lone_rate(levels, config)
    return min(max(hint, config.min_rate), config.max_rate)


def _lone_rate(levels: Sequence[Level], config: SearchConfig) -> float:
    """Requests per second of one stream at a time; min_rate where no lone request came to an end."""
    lasted = [level.mean_e2e_seconds for level in levels if level.rate is None and level.is_valid and level.mean_e2e_seconds]
    return 1.0 / (sum(lasted) / len(lasted)) if lasted else config.min_rate


def _more_lone(lone: Sequence[Level], config: SearchConfig, promise: Promise, left_seconds: float) -> Measure | None:
    """Ask the idle server again, with enough requests to tell. None where what is left does not pay for five."""
    due = sum(level.due for level in lone)
    each_seconds = sum(level.duration_seconds for level in lone) / max(1, due)
    wanted = max(config.lone_requests, min(requests_to_hold(promise), 4 * due))
    seconds = min(left_seconds, wanted * each_seconds * 1.1)
    return None if seconds < 5 * each_seconds else Measure(None, seconds, "lone", wanted)


def _duration(rate: float, purpose: Purpose, config: SearchConfig, left_seconds: float) -> float | None:
    """How long to measure at this rate; None when what is left of the budget does not pay for the shortest level."""
    wanted = max(config.level_seconds_min, config.level_requests_min / rate)
    if purpose == "narrow":
        wanted = config.level_seconds_max
    wanted = min(wanted, config.level_seconds_max)
    affordable = left_seconds / (1 + config.overhead)
    if affordable >= wanted:
        # A rest that would not pay for another level is better spent on this one.
        return min(affordable, config.level_seconds_max) if affordable < wanted + config.level_seconds_min else wanted
    return affordable if affordable >= config.level_seconds_min else None
