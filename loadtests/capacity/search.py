"""The search for the capacity: the highest rate that meets the SLO. Pure: levels in, next step out.

    levels: list[Level] = []
    while isinstance(step := next_step(levels, config, slo, elapsed_seconds), Measure):
        levels.append(measure(step))
    step.capacity                           # step is Finished

First a single-stream level on an idle server: where that fails the SLO, no rate meets it. Then
open load, up or down from the hint (a prediction, or what one stream suggests) until one rate
holds and one does not; then where a measurement says most about the capacity, until the interval
is as narrow as asked or the budget is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from loadtests.capacity.estimate import Evidence, Level
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.slo import Slo, requests_to_hold
from loadtests.records.events import Capacity

Purpose = Literal["single_stream", "bracket", "narrow", "fixed"]

PLAINLY = 4.0  # times the odds of a bad request that the SLO allows: surely above the capacity
MOST_INVALID = 3  # levels in a row, after which the search ends


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Measure this next. A level that slo.is_hopeless may be cut off."""

    rate: float | None  # None: one request at a time, `requests` of them or `duration_seconds`
    duration_seconds: float  # that count; warm-up comes before
    purpose: Purpose
    requests: int | None = None


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    capacity: Capacity


def next_step(
    levels: Sequence[Level], config: SearchConfig, slo: Slo, elapsed_seconds: float
) -> Measure | Finished:
    """What to do after these levels, with `elapsed_seconds` of the budget used."""
    seen = Evidence(levels, config, slo)
    if config.rates:
        return _next_fixed(seen)
    if seen.capacity.status != "unresolved":
        return Finished(seen.capacity)
    left = config.budget_seconds - elapsed_seconds
    if not seen.single_stream:
        return _first_single_stream(seen, left)
    if sum(not level.is_valid for level in levels[-MOST_INVALID:]) == MOST_INVALID:
        return _finished(seen, "the last three levels were not valid")
    if seen.is_flat and seen.single_stream_verdict == "unresolved":
        more = _more_single_stream(seen, min(left, 0.25 * config.budget_seconds))
        if more is not None:
            return more
    wanted = _next_rate(seen)
    if wanted is None:
        if seen.single_stream_verdict == "holds":
            why = "single-stream requests meet the SLO and the lowest rates tried do not"
            return _finished(seen, why)
        return _more_single_stream(seen, left) or _out_of_budget(seen)
    rate, purpose = wanted
    duration = _duration(rate, purpose, config, left)
    return _out_of_budget(seen) if duration is None else Measure(rate, duration, purpose)


def _finished(seen: Evidence, why: str) -> Finished:
    reason = f"{seen.capacity.reason}; {why}"
    return Finished(msgspec.structs.replace(seen.capacity, reason=reason))


def _out_of_budget(seen: Evidence) -> Finished:
    return _finished(seen, f"the budget of {seen.config.budget_seconds:.0f} s is used up")


def _single_stream(config: SearchConfig) -> Measure:
    return Measure(
        None, config.single_stream_seconds, "single_stream", config.single_stream_requests
    )


def _first_single_stream(seen: Evidence, left_seconds: float) -> Measure | Finished:
    failed = sum(level.rate is None for level in seen.levels)
    if failed < MOST_INVALID and left_seconds > 0:
        return _single_stream(seen.config)
    invalid = f"{failed} single-stream levels were not valid"
    return _finished(seen, invalid if failed else "the budget was gone before it began")


def _next_fixed(seen: Evidence) -> Measure | Finished:
    """The next of the asked rates, after one single-stream level; none is left out."""
    config = seen.config
    if not any(level.rate is None for level in seen.levels):
        return _single_stream(config)
    done = sum(level.rate is not None for level in seen.levels)
    if done >= len(config.rates):
        return Finished(seen.capacity)
    rate = config.rates[done]
    seconds = config.rate_seconds[done] if config.rate_seconds else config.level_seconds(rate)
    return Measure(rate, seconds, "fixed")


def _next_rate(seen: Evidence) -> tuple[float, Purpose] | None:
    """The rate to measure; None: only an idle server is left to ask."""
    if not seen.held and not seen.broken:
        return _within(_hint(seen), seen.config), "bracket"
    if not seen.broken:
        return _rate_above(seen), "bracket"
    if not seen.held:
        rate = _rate_below(seen)
        return None if rate is None else (rate, "bracket")
    # A little beyond both sides, which may be chance; not beyond a rate that is plainly broken.
    low, high = sorted((max(seen.held), min(seen.broken)))
    good, due = seen.pooled_at(high)
    odds = (due - good + 0.5) / (good + 0.5)
    plainly = odds > PLAINLY * (1 - seen.slo.target) / seen.slo.target
    top = high if plainly else high * 1.25
    rate = seen.belief.most_telling_rate(seen.config.level_seconds_max, low / 1.25, top)
    return _within(rate, seen.config), "narrow"


def _rate_above(seen: Evidence) -> float:
    """Up from the highest rate that held, in growing strides, from the hint where it is above."""
    config = seen.config
    start = config.start_rate
    if start is not None and max(seen.held) < 0.95 * start:
        return min(config.max_rate, start)
    up = [rate for rate in seen.held if start is None or rate >= 0.95 * start]
    return min(config.max_rate, max(seen.held) * _stride(len(up), config))


def _rate_below(seen: Evidence) -> float | None:
    """Down from the lowest rate that broke; None where one stream alone has a higher rate."""
    config = seen.config
    start = config.start_rate
    lowest = min(seen.broken)
    if lowest <= max(config.min_rate * 1.001, 0.15 * _single_stream_rate(seen)):
        return None
    if start is not None and config.min_rate <= start < lowest / 1.05:
        return start
    down = [rate for rate in seen.broken if start is None or rate <= 1.05 * start]
    return max(config.min_rate, lowest / _stride(len(down), config))


def _within(rate: float, config: SearchConfig) -> float:
    return min(max(rate, config.min_rate), config.max_rate)


def _stride(levels: int, config: SearchConfig) -> float:
    """The factor to the next rate after this many levels on the same side."""
    first = 1.5 if config.start_rate is None else 1.25
    return min(4.0, first + 0.5 * (levels - 1))


def _hint(seen: Evidence) -> float:
    if seen.config.start_rate is not None:
        return seen.config.start_rate
    return seen.config.batching_gain * _single_stream_rate(seen)


def _single_stream_rate(seen: Evidence) -> float:
    """Requests/s of one stream at a time; min_rate where none of its requests ended."""
    lasted = [level.mean_e2e_seconds for level in seen.single_stream if level.mean_e2e_seconds]
    return 1.0 / (sum(lasted) / len(lasted)) if lasted else seen.config.min_rate


def _more_single_stream(seen: Evidence, left_seconds: float) -> Measure | None:
    """Enough single-stream requests to tell; None where what is left does not pay for five."""
    due = sum(level.due for level in seen.single_stream)
    each_seconds = sum(level.duration_seconds for level in seen.single_stream) / max(1, due)
    wanted = max(seen.config.single_stream_requests, min(requests_to_hold(seen.slo), 4 * due))
    seconds = min(left_seconds, wanted * each_seconds * 1.1)
    return None if seconds < 5 * each_seconds else Measure(None, seconds, "single_stream", wanted)


def _duration(
    rate: float, purpose: Purpose, config: SearchConfig, left_seconds: float
) -> float | None:
    """Seconds to measure at this rate; None: what is left does not pay for the shortest level."""
    wanted = config.level_seconds_max if purpose == "narrow" else config.level_seconds(rate)
    affordable = left_seconds / (1 + config.overhead)
    if affordable >= wanted + config.level_seconds_min:
        return wanted
    if affordable >= wanted:  # the rest would not pay for another level
        return min(affordable, config.level_seconds_max)
    return affordable if affordable >= config.level_seconds_min else None
