"""Which rate is confirmed: a level at it ran, long enough, and met the SLO.

"Holds up to X" is said of such a rate only (as MLPerf's Server scenario asks a run of a minimum
duration at the rate that is reported). A level confirms where it is valid, was not cut short, is
steady, and is no shorter than `confirming_seconds`; levels at one rate count together. One that is
too short for the TTFT limit alone is judged by the limit that it is long for, requests and trend:
who answers within 2 s under load for a minute, and goes on to, does so within 5 s. Arrivals are
drawn: where fewer came than the rate asks for, the level confirms the rate at which they came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from loadtests.capacity.levels import Level, single_stream_seconds
from loadtests.capacity.posterior import Posterior
from loadtests.metrics.clustering import dispersion
from loadtests.metrics.slo import (
    ROUNDING,
    TTFT_LIMITS,
    Slo,
    Verdict,
    requests_to_hold,
    verdict,
)
from loadtests.metrics.wilson import wilson
from loadtests.records.events import Confirmation

LEAST_SECONDS = 60.0
SINGLE_STREAMS = 20.0  # E2E times of a single-stream request
MOST_REQUESTS = 1e5
LUCK = 1.0  # standard deviations of the count that a planned level has in hand


def confirming_seconds(slo: Slo, e2e_seconds: float | None) -> float:
    """The window to confirm with, with the E2E of a single-stream request where known."""
    return max(_least_seconds(e2e_seconds), TTFT_LIMITS * (slo.ttft_seconds or 0.0))


def _least_seconds(e2e_seconds: float | None) -> float:
    """The shortest window that confirms, whatever the SLO."""
    return max(LEAST_SECONDS, SINGLE_STREAMS * (e2e_seconds or 0.0))


def verdicts(levels: Sequence[Level], slo: Slo, clump: float) -> dict[float, Verdict]:
    """Rate -> verdict of the levels that may confirm it, on effective numbers.

    A shorter limit than the SLO's is to confirm by: that it is missed is no failure.
    """
    found: dict[float, Verdict] = {}
    for rate, (good, due) in candidates(levels).items():
        found[rate] = _verdict(good, due, slo, clump)
        if found[rate] == "fails":
            own = sum(level.good for level in _long_and_steady(levels) if level.rate == rate)
            is_failure = _verdict(own, due, slo, clump) == "fails"
            found[rate] = "fails" if is_failure else "unresolved"
    return found


def _verdict(good: int, due: int, slo: Slo, clump: float) -> Verdict:
    return verdict(good, due, slo, dispersion((due - good + 0.5) / (due + 1), clump))


def candidates(levels: Sequence[Level]) -> dict[float, tuple[int, int]]:
    """Rate -> (good, due) of the levels that are long and steady enough to confirm it.

    Good is what counts where they are to confirm.
    """
    found: dict[float, tuple[int, int]] = {}
    for level in _long_and_steady(levels):
        good, due = found.get(level.rate or 0.0, (0, 0))
        more = level.good if level.good_soon is None else level.good_soon
        found[level.rate or 0.0] = (good + more, due + level.due)
    return found


def confirmation(
    levels: Sequence[Level], slo: Slo, clump: float, rate: float
) -> Confirmation | None:
    """The levels that confirm most, of those up to the confirmed `rate`; None where none does.

    A draw of few arrivals confirms less than it was asked for: a lower rate may confirm more.
    """
    rates = sorted(_holding_rates(levels, slo, clump), reverse=True)
    found = [_together(levels, one) for one in rates if one <= rate]
    return max(found, key=offered_rate, default=None)


def _together(levels: Sequence[Level], rate: float) -> Confirmation:
    own = [level for level in _long_and_steady(levels) if level.rate == rate]
    return Confirmation(
        levels=len(own),
        seconds=sum(level.duration_seconds for level in own),
        requests=sum(level.due for level in own),
        asked_rate=rate,
    )


def offered_rate(by: Confirmation) -> float:
    """What the levels confirm, requests/s: the rate asked for, or where fewer came, theirs."""
    offered = by.requests / by.seconds
    return offered if by.asked_rate is None else min(by.asked_rate, offered)


def _long_and_steady(levels: Sequence[Level]) -> list[Level]:
    """Levels at a rate that may confirm it."""
    least = ROUNDING * _least_seconds(single_stream_seconds(levels))
    return [
        level
        for level in levels
        if level.rate is not None
        and level.is_valid
        and level.is_whole
        and level.is_steady
        and not level.grows_soon
        and level.duration_seconds >= least
    ]


def _holding_rates(levels: Sequence[Level], slo: Slo, clump: float) -> list[float]:
    """The rates asked for whose levels hold, below every rate that failed."""
    found = verdicts(levels, slo, clump)
    broken = min((rate for rate, word in found.items() if word == "fails"), default=math.inf)
    return [rate for rate, word in found.items() if word == "holds" and rate < broken]


def confirmed_rate(
    levels: Sequence[Level], slo: Slo, clump: float, low: float = math.inf
) -> float | None:
    """The highest confirmed rate up to `low`, else the lowest; None: no rate is confirmed.

    Above `low`, the interval's end, a rate may hold by chance.
    """
    holding = _holding_rates(levels, slo, clump)
    sure = [rate for rate in holding if rate <= low]
    return max(sure) if sure else min(holding, default=None)


def seconds_to_confirm(
    rate: float,
    belief: Posterior,
    slo: Slo,
    measured: tuple[int, int] = (0, 0),
    luck: float = LUCK,
) -> float | None:
    """The window at `rate` that is expected to hold, beside the (good, due) already measured there.

    With `luck` standard deviations of the count in hand. None where the expected share is so near
    the target that no level would do.
    """
    share = belief.mean_share(rate)
    good, due = measured
    if due:  # what was seen there counts as much as what the curve says
        share = (share + good / due) / 2
    effective = _requests_to_hold(share, slo, luck)
    if effective is None:
        return None
    return max(0.0, effective * dispersion(1 - share, belief.clump) - due) / rate


def chance_to_confirm(
    rate: float, seconds: float, belief: Posterior, slo: Slo, measured: tuple[int, int] = (0, 0)
) -> float:
    """The chance that so long a level at `rate`, on the next start, holds, with the (good, due)
    already measured there.

    Wilson's lower bound reaches p where the share does p + z sqrt(p (1 - p) / n) (score test).
    """
    good, due = measured
    asked = rate * seconds
    together = dispersion((1 - slo.target) / 2, belief.clump)
    z = NormalDist().inv_cdf(slo.confidence)
    margin = z * math.sqrt(slo.target * (1 - slo.target) * together / (asked + due))
    needed = ((slo.target + margin) * (asked + due) - good) / asked
    return belief.chance(rate, asked / together, needed) if needed <= 1 else 0.0


def _requests_to_hold(share: float, slo: Slo, luck: float) -> float | None:
    """The fewest independent requests with which a level of this share holds."""
    low, high = float(requests_to_hold(slo)), MOST_REQUESTS

    def holds(count: float) -> bool:
        unlucky = share - luck * math.sqrt(share * (1 - share) / count)
        return wilson(max(0.0, unlucky) * count, count, slo.confidence)[0] >= slo.target

    if not holds(high):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
