"""The search for the capacity: the highest rate that meets the SLO. Pure: levels in, next step out.

    levels: list[Level] = []
    while isinstance(step := next_step(levels, config, slo, elapsed_seconds), Measure):
        levels.append(measure(step))
    step.capacity                           # step is Finished

First single-stream requests on an idle server: where they fail the SLO, no rate meets it. Then open
load, up or down from the hint (a prediction, or what one stream suggests) until one rate holds and
one does not; then where a measurement says most about the capacity, until the interval is as narrow
as asked. A part of the budget is kept for the end: a level that runs at the low end of the interval
long enough to confirm it. Only what was run and held is a capacity. The levels are of several
starts of the server: a narrow interval of one start says nothing of the next. The last one begins
with the confirmed rate; where there is none with the level that may confirm one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from loadtests.capacity.confirmation import (
    candidates,
    chance_to_confirm,
    confirming_seconds,
    seconds_to_confirm,
)
from loadtests.capacity.estimate import Evidence
from loadtests.capacity.levels import Level, single_stream_seconds
from loadtests.capacity.search_config import SearchConfig
from loadtests.metrics.slo import Slo, requests_to_hold
from loadtests.records.events import Capacity

Purpose = Literal["single_stream", "bracket", "narrow", "confirm", "repeat", "fixed"]

PLAINLY = 4.0  # times the odds of a bad request that the SLO allows: surely above the capacity
MOST_INVALID = 3  # levels in a row, after which the search ends
LEAST_WARMUP_SECONDS = 2.0
MOST_WARMUP_SECONDS = 60.0
WARMUP_SHARE = 0.15  # of the window
WARMUP_ANSWERS = 2.0  # E2E times of a single-stream request
LOWEST_CONFIRMED = 0.25  # of the low end of the interval: below it a level says too little
CONFIRMED_ENOUGH = 0.9  # of the low end of the interval
NEARLY_ALONE = 0.15  # of the rate of one stream
REPEAT_SHARE = 0.15  # of the budget, that a check of drift may take
FEW_CONFIRMING = 4.0  # levels that confirm; who can pay for fewer does not narrow first
NARROW_ENOUGH = 0.5  # low end over the middle, from where it is worth to confirm
LEAST_CHANCE = 0.1  # of a level that is run to confirm
NARROW_SHARE = 0.25  # of what is left, for a level as long as one that confirms
LOWEST_RATE = 1 / 200  # of the rate of one stream: requests hardly ever meet below it


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Measure this next. A level that slo.is_hopeless may be cut off."""

    rate: float | None  # None: one request at a time, `requests` of them or `duration_seconds`
    duration_seconds: float  # that count; warm-up comes before
    purpose: Purpose
    requests: int | None = None
    warmup_seconds: float = 0.0


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    capacity: Capacity


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """This start of the server says no more: start it again, and ask again."""

    capacity: Capacity


def next_step(
    levels: Sequence[Level],
    config: SearchConfig,
    slo: Slo,
    elapsed_seconds: float,
    start: int | None = None,
) -> Measure | Finished | Restart:
    """What to do after these levels, with `elapsed_seconds` of the budget used.

    `start`: which start of the server this is, from 1; None: it cannot be started again.
    """
    seen = Evidence(levels, config, slo)
    if config.rates:
        return _next_fixed(seen)
    left = config.budget_seconds - elapsed_seconds
    if not seen.single_stream:
        return _first_single_stream(seen, left)
    if seen.single_stream_verdict == "fails" and seen.confirmed is None:
        return Finished(seen.capacity)
    if sum(not level.is_valid for level in levels[-MOST_INVALID:]) == MOST_INVALID:
        return _finished(seen, "the last three levels were not valid")
    if _is_done(seen):
        return _on_other_starts(seen, start, left) or Finished(seen.capacity)
    if (again := _again_on_last_start(seen, start, left)) is not None:
        return again
    if not seen.loaded and seen.is_doubtful_alone:
        more = _more_single_stream(seen, min(left, 0.25 * config.budget_seconds))
        if more is not None:
            return more
    if _is_nearly_alone(seen) and seen.single_stream_verdict == "unresolved":
        more = _more_single_stream(seen, min(left, 0.5 * config.budget_seconds))
        if more is not None:
            return more
    kept = _kept_seconds(seen, left)
    step = _confirm(seen, left) if _is_short_of_time(seen, left) else None
    step = step or _explore(seen, left - kept)
    if step is None and seen.single_stream_verdict == "unresolved":
        step = _more_single_stream(seen, min(left, 0.25 * config.budget_seconds))
    return step or _confirm(seen, left) or _explore(seen, left) or _out_of_budget(seen)


def warmup_seconds(window_seconds: float, levels: Sequence[Level]) -> float:
    """Requests due before this do not count: the queue of an idle server has to fill first.

    15 % of the window, and no less than two answers of an idle server take.
    """
    answers = WARMUP_ANSWERS * (single_stream_seconds(levels) or 0.0)
    wanted = max(LEAST_WARMUP_SECONDS, WARMUP_SHARE * window_seconds, answers)
    return min(MOST_WARMUP_SECONDS, wanted)


def _is_done(seen: Evidence) -> bool:
    found, rate = seen.capacity, seen.confirmed
    if rate is None:
        return False
    at_limit = rate >= 0.999 * seen.config.max_rate
    return at_limit or (found.is_narrow and rate >= CONFIRMED_ENOUGH * (found.low or 0.0))


def _on_other_starts(
    seen: Evidence, start: int | None, left_seconds: float
) -> Measure | Restart | None:
    """More of a capacity that is known on too few starts; None where they are enough, or where
    what is left does not pay for a level.
    """
    measured = {level.start for level in seen.loaded}
    if start is None or len(measured) >= seen.config.starts:
        return None
    again = _repeat(seen)
    if again.duration_seconds * (1 + seen.config.overhead) > left_seconds:
        return None
    return Restart(seen.capacity) if start in measured else again


def _again_on_last_start(seen: Evidence, start: int | None, left_seconds: float) -> Measure | None:
    """The rate that another start has confirmed; else the level that may confirm one; else the
    first level, where that costs little.
    """
    config = seen.config
    if start is None or start < config.starts or not seen.loaded:
        return None
    if any(level.start == start for level in seen.loaded):
        return None
    most = min(
        left_seconds - _kept_seconds(seen, left_seconds), REPEAT_SHARE * config.budget_seconds
    )
    again = _repeat(seen)
    if seen.confirmed is None and (sure := _confirm(seen, left_seconds)) is not None:
        return sure
    if seen.confirmed is not None:
        seconds = confirming_seconds(seen.slo, single_stream_seconds(seen.levels))
        seconds = min(seconds, max(left_seconds / (1 + config.overhead), config.level_seconds_min))
        again, most = _measure(seen, seen.confirmed, seconds, "repeat"), left_seconds
    return again if again.duration_seconds * (1 + config.overhead) <= most else None


def _repeat(seen: Evidence) -> Measure:
    rate = seen.loaded[0].rate or 0.0
    return _measure(seen, rate, seen.config.level_seconds(rate), "repeat")


def _kept_seconds(seen: Evidence, left_seconds: float) -> float:
    """Seconds kept for the level that confirms; 0.0 where one is confirmed or cannot be paid."""
    if seen.is_surely_confirmed:
        return 0.0
    config = seen.config
    least = confirming_seconds(seen.slo, single_stream_seconds(seen.levels))
    least *= 1 + config.overhead
    wanted = max(least, config.confirming_share * config.budget_seconds)
    return min(wanted, left_seconds) if least <= left_seconds else 0.0


def _is_short_of_time(seen: Evidence, left_seconds: float) -> bool:
    """Nothing is confirmed, both sides are known, and few levels that confirm can be paid: one that
    narrows from below then had better be long enough to confirm.
    """
    if seen.confirmed is not None or not (seen.held and seen.broken):
        return False
    low, middle = (seen.belief.quantile(q) for q in (1 - seen.config.confidence, 0.5))
    least = confirming_seconds(seen.slo, single_stream_seconds(seen.levels))
    is_short = left_seconds < FEW_CONFIRMING * least * (1 + seen.config.overhead)
    return is_short and low > NARROW_ENOUGH * middle


def _explore(seen: Evidence, left_seconds: float) -> Measure | None:
    """The next level that brackets or narrows; None where nothing is to gain, or to pay with."""
    if seen.broken and seen.held and seen.capacity.is_narrow:
        return None
    wanted = _next_rate(seen, left_seconds)
    if wanted is None:
        return None
    rate, purpose = wanted
    wanted_seconds = _narrow_seconds(seen, left_seconds) if purpose == "narrow" else 0.0
    seconds = _duration(rate, wanted_seconds, seen.config, left_seconds)
    return None if seconds is None else _measure(seen, rate, seconds, purpose)


def _narrow_seconds(seen: Evidence, left_seconds: float) -> float:
    """As long as a level that confirms, where that is no large part of what is left."""
    least = confirming_seconds(seen.slo, single_stream_seconds(seen.levels))
    return max(seen.config.level_seconds_max, min(least, NARROW_SHARE * left_seconds))


def _measure(seen: Evidence, rate: float, seconds: float, purpose: Purpose) -> Measure:
    return Measure(rate, seconds, purpose, None, warmup_seconds(seconds, seen.levels))


def _confirm(seen: Evidence, left_seconds: float) -> Measure | None:
    """The rate and length whose confirming level promises most: the rate times its chance."""
    config, slo = seen.config, seen.slo
    affordable = left_seconds / (1 + config.overhead)
    least = confirming_seconds(slo, single_stream_seconds(seen.levels))
    if affordable < least or not seen.held:
        return None
    low = min(seen.belief.quantile(1 - config.confidence), max(seen.held) * 1.05)
    if not seen.broken:
        low = max(seen.held)
    measured = candidates(seen.levels)
    floor = config.min_rate
    if seen.is_surely_confirmed:
        floor = max(floor, 1.02 * (seen.confirmed or 0.0))
    fresh = np.geomspace(low, low * LOWEST_CONFIRMED, 15).tolist()
    again = [rate for rate in measured if rate <= low]
    best, most = None, 0.0
    for rate in sorted({*fresh, *again}, reverse=True):
        if not floor <= rate <= config.max_rate:
            continue
        pool = measured.get(rate, (0, 0))
        seconds = seconds_to_confirm(rate, seen.belief, slo, pool)
        seconds = affordable if seconds is None else min(max(least, seconds), affordable)
        chance = chance_to_confirm(rate, seconds, seen.belief, slo, pool)
        # The last that can be paid asks for a rate that is likely to hold.
        worth = chance * (rate if affordable >= seconds + least else math.sqrt(rate))
        if chance >= LEAST_CHANCE and worth > most:
            best, most = _measure(seen, float(rate), seconds, "confirm"), worth
    return best


def _is_nearly_alone(seen: Evidence) -> bool:
    """The lowest rate broke the SLO, and its requests hardly met: alone they come quicker."""
    rate = min(seen.broken, default=None)
    return rate is not None and not seen.held and rate <= NEARLY_ALONE * _single_stream_rate(seen)


def _to_confirm(seen: Evidence) -> str:
    """What a confirming level would take; "" where one is confirmed, or none is to be expected."""
    if seen.confirmed is not None or not seen.held:
        return ""
    low = min(seen.belief.quantile(1 - seen.config.confidence), max(seen.held))
    least = confirming_seconds(seen.slo, single_stream_seconds(seen.levels))
    needed = [
        (max(least, seconds) * (1 + seen.config.overhead), float(rate))
        for rate in np.geomspace(low, low * LOWEST_CONFIRMED, 8)
        if (seconds := seconds_to_confirm(float(rate), seen.belief, seen.slo, luck=0.0)) is not None
    ]
    if not needed:
        return ""
    seconds, rate = min(needed)
    return f"; to confirm {rate:.2g} requests/s would take about {seconds:.0f} s"


def _finished(seen: Evidence, why: str) -> Finished:
    reason = f"{seen.capacity.reason}; {why}"
    return Finished(msgspec.structs.replace(seen.capacity, reason=reason))


def _out_of_budget(seen: Evidence) -> Finished:
    used = f"the budget of {seen.config.budget_seconds:.0f} s is used up"
    return _finished(seen, used + _to_confirm(seen))


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
    return _measure(seen, rate, seconds, "fixed")


def _next_rate(seen: Evidence, left_seconds: float) -> tuple[float, Purpose] | None:
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
    seconds = _narrow_seconds(seen, left_seconds)
    hidden = (seen.slo.ttft_seconds or 0.0) / seconds
    rate = seen.belief.most_telling_rate(seconds, low / 1.25, top, hidden)
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
    if lowest <= max(config.min_rate * 1.001, LOWEST_RATE * _single_stream_rate(seen)):
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
    """Requests/s of one stream at a time; the lowest rate allowed where no request ended."""
    each = single_stream_seconds(seen.levels)
    return 1.0 / each if each else seen.config.min_rate


def _more_single_stream(seen: Evidence, left_seconds: float) -> Measure | None:
    """Enough single-stream requests to tell; None where what is left does not pay for five."""
    due = sum(level.due for level in seen.single_stream)
    each_seconds = sum(level.duration_seconds for level in seen.single_stream) / max(1, due)
    wanted = max(seen.config.single_stream_requests, min(requests_to_hold(seen.slo), 4 * due))
    seconds = min(left_seconds, wanted * each_seconds * 1.1)
    return None if seconds < 5 * each_seconds else Measure(None, seconds, "single_stream", wanted)


def _duration(
    rate: float, least_seconds: float, config: SearchConfig, left_seconds: float
) -> float | None:
    """Seconds to measure at this rate; None: what is left does not pay for the shortest level."""
    wanted = max(config.level_seconds(rate), least_seconds)
    affordable = left_seconds / (1 + config.overhead)
    if affordable >= wanted + config.level_seconds_min:
        return wanted
    if affordable >= wanted:  # the rest would not pay for another level
        return min(affordable, max(wanted, config.level_seconds_max))
    return affordable if affordable >= config.level_seconds_min else None
