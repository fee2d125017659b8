"""What is known of a cell's capacity: the highest rate that meets the SLO. The one place. Pure.

    found = estimate(levels, slo, law=law, policy=policy, workload=workload)
    found.state, found.held, found.limit, found.low, found.high

The law measures, a level confirms. The limit is simulated from step times (*estimated*), with one
factor from the levels near it: how much longer their steps took than the law says. Its interval is
limit x exp(+-1.645 sd), sd = a measured constant x the steepness d ln limit / d ln step time, cut
by what levels exclude. Without a law the limit lies between the highest rate that held and the
lowest that failed. Only what ran, undisturbed, steady and long enough, is held (*confirmed*).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from loadtests.analysis.good_share_interval import LEAST_AS_ONE, wilson
from loadtests.analysis.level import Judged, Level
from loadtests.analysis.slo import Slo, requests_to_hold
from loadtests.records.run_journal import Capacity
from loadtests.simulation.batching_simulator import SchedulingPolicy
from loadtests.simulation.simulated_capacity import (
    LEAST_TELLING,
    LOADED,
    SD_CALIBRATED,
    SD_LEVEL,
    Lengths,
    SimulatedCapacity,
    capacity,
)
from loadtests.simulation.step_law import StepLaw
from loadtests.simulation.step_observation import level_factor
from loadtests.workload.arrivals import Arrivals
from loadtests.workload.request_lengths import Workload

CONFIRMING_SHARE = 0.8  # of the limit: where a level confirms, and tells the factor
MOST_TELLING = 1.4  # times the limit: above, queues say little of steps
Z_90 = 1.645  # standard deviations to either end of a 90 % interval
MOVED = 0.2  # steps that took longer by more than this: the machine's speed changed

LEAST_SECONDS = 60.0  # of a level that confirms; twice that, to tell the factor to 6 %, below ...
SLOW_RATE = 3.0  # requests/s
TTFT_LIMITS = 30.0  # of which such a level is long: an overload of 1/30 shows within it
ANSWERS = 20.0  # E2E times of a single-stream request that it is long, too
ROUNDING = 0.98  # of the time asked: a window ends with a request
# Requests that count as one where no law says that the limit is higher. A level of four minutes at
# the limit, or two at 1.1 x the limit, has only good requests in 25 to 30 % of cases by the luck of
# its arrivals; with this floor 2 to 7 % of levels at 1.1 x the limit hold (1.3: 3 to 23 %).
AS_ONE_BY_LEVELS = 4.0
NEAR = 1.1  # rates apart by less are tries of one
LEAST_ALONE = 20  # single-stream requests before "not even alone" ...
LEAST_BAD = 5  # ... or so many bad ones: at 99 % one slow one of five proves nothing


class Counted(NamedTuple):
    """A level that counts for an SLO. `rate` is 0.0 where it was not at a rate."""

    level: Level
    judged: Judged
    rate: float


def estimate(
    levels: Sequence[Level],
    slo: Slo,
    *,
    law: StepLaw | None = None,
    policy: SchedulingPolicy | None = None,
    workload: Lengths | Workload | None = None,
    arrivals: Arrivals | None = None,
    least_seconds: float = LEAST_SECONDS,
) -> Capacity:
    """The capacity by all finished levels of a cell, in whatever order; by levels alone where no
    law that fits is given.

    `least_seconds`: of the shortest level that confirms.
    """
    seen = [Counted(one, one.judge(slo), one.rate or 0.0) for one in levels if one.counts]
    if (found := _not_even_alone(seen, slo)) is not None:
        return found
    loaded = [one for one in seen if one.rate and one.judged.due]
    failed = min((one.rate for one in loaded if one.judged.verdict == "fails"), default=math.inf)
    found = Capacity(state="no_rate_confirmed")
    if law is not None and policy is not None and workload is not None and law.fits:
        told = [(one.rate, factor) for one in loaded if (factor := _factor(law, one.level, policy))]

        def simulate(factor: float) -> SimulatedCapacity:
            return _simulated(policy, workload, slo, law.slower(factor), arrivals)

        found = _by_law(simulate, told)
    return _confirmed(_below(found, failed), seen, loaded, failed, slo, least_seconds)


_factor = functools.lru_cache(maxsize=64)(level_factor)  # its steps may be many


@functools.lru_cache(maxsize=64)  # a cell is asked for again after each level, a report once more
def _simulated(
    policy: SchedulingPolicy,
    workload: Lengths | Workload,
    slo: Slo,
    law: StepLaw,
    arrivals: Arrivals | None,
) -> SimulatedCapacity:
    return capacity(law, policy, workload, slo, arrivals=arrivals)


def confirming_seconds(
    slo: Slo,
    rate: float,
    alone_seconds: float | None = None,
    *,
    by_levels: bool = False,
    least_seconds: float = LEAST_SECONDS,
) -> float:
    """The window with which a level at `rate` proves that it holds, and tells the factor.

    `alone_seconds`: E2E of a request alone. `by_levels`: without a law. As many requests are
    expected to be good as lie three quarters of the way from the target to all.
    """
    share = 1 - (1 - slo.target) / 4
    low, high = float(requests_to_hold(slo)), 1e6
    while high / low > 1.02:  # the fewest independent requests whose share proves the target
        middle = math.sqrt(low * high)
        holds = wilson(share * middle, middle, slo.confidence)[0] >= slo.target
        low, high = (low, middle) if holds else (middle, high)
    return max(
        least_seconds * (2 if rate < SLOW_RATE else 1),
        _least_seconds(slo, alone_seconds, least_seconds),
        (AS_ONE_BY_LEVELS if by_levels else LEAST_AS_ONE) * high / rate,
    )


def _least_seconds(slo: Slo, alone: float | None, least_seconds: float) -> float:
    """The shortest window that confirms, whatever it shows."""
    return max(least_seconds, TTFT_LIMITS * (slo.ttft_seconds or 0.0), ANSWERS * (alone or 0.0))


def _not_even_alone(seen: Sequence[Counted], slo: Slo) -> Capacity | None:
    """Where requests one at a time miss the SLO on every start; None: they do not, or too few
    were asked. Load makes no request better: what holds under load holds alone.
    """
    starts: dict[object, tuple[int, int]] = {}
    for level, judged, _ in seen:
        if level.is_single_stream:
            start = level.name if level.started.start is None else level.started.start
            good, due = starts.get(start, (0, 0))
            starts[start] = (good + judged.good, due + judged.due)
    for good, due in starts.values():
        is_enough = due >= LEAST_ALONE or due - good >= LEAST_BAD or (not good and due >= 2)
        if not is_enough or wilson(good, due, slo.confidence)[1] >= slo.target:
            return None
    if not starts or any(one.rate and one.judged.verdict == "holds" for one in seen):
        return None
    good, due = (sum(counts) for counts in zip(*starts.values(), strict=True))
    where = "one start" if len(starts) == 1 else f"{len(starts)} starts"
    return Capacity(
        state="not_even_alone",
        starts=len(starts),
        limit=0.0,
        low=0.0,
        high=0.0,
        reason=f"{due - good} of {due} requests one at a time missed the SLO, on {where}",
    )


def _by_law(
    simulate: Callable[[float], SimulatedCapacity], told: Sequence[tuple[float, float]]
) -> Capacity:
    """The simulated limit with one factor from the levels near it; `told`: (rate, factor)."""
    factor, near = LOADED, list[float]()
    found = simulate(factor)
    for _ in range(3):
        ends = LEAST_TELLING * found.rate, MOST_TELLING * found.rate
        now = [one for at, one in told if ends[0] <= at <= ends[1]]
        if not now or now == near:
            break
        near = now
        factor = math.exp(sum(map(math.log, near)) / len(near))
        found = simulate(factor)
    if found.rate <= 0:
        return Capacity(
            state="no_rate_confirmed",
            method="law",
            reason=f"by the law {found.alone_share:.0%} of requests are good one at a time",
        )
    reach = math.exp(Z_90 * (SD_LEVEL if near else SD_CALIBRATED) * found.steepness)
    # Both speeds of a machine that changed: steps that take longer lower the limit so much more.
    slowest, fastest = max(near, default=factor), min(near, default=factor)
    if near and not 1 / (1 + MOVED) <= factor / LOADED <= 1 + MOVED:  # it was calibrated at another
        slowest, fastest = max(slowest, LOADED), min(fastest, LOADED)
    moved = slowest / fastest - 1
    if moved <= MOVED:
        slowest = fastest = factor
    return Capacity(
        state="no_rate_confirmed",
        limit=found.rate,
        low=found.rate * (factor / slowest) ** found.steepness / reach,
        high=found.rate * (factor / fastest) ** found.steepness * reach,
        method="law",
        steepness=found.steepness,
        factor=factor if near else None,
        speed_moved=moved if moved > MOVED else None,
    )


def _below(found: Capacity, failed: float) -> Capacity:
    """A rate that clearly failed bounds the limit from above; inf: none did."""
    if failed == math.inf or (found.high is not None and found.high <= failed):
        return found
    low, limit = found.low, found.limit
    if limit is not None and low is not None:
        # Where the law says more than what failed, it is wrong by what is left of its interval.
        low, limit = min(low, failed * low / limit), min(limit, failed)
    return msgspec.structs.replace(found, low=low, limit=limit, high=failed)


def _confirmed(
    found: Capacity,
    seen: Sequence[Counted],
    loaded: Sequence[Counted],
    failed: float,
    slo: Slo,
    least_seconds: float,
) -> Capacity:
    """With the highest rate that is confirmed, not above what all levels together say."""
    e2e = [one.level.mean(one.level.e2e) for one in seen if one.level.is_single_stream]
    known = [seconds for seconds in e2e if seconds is not None]
    alone = sum(known) / len(known) if known else None
    least = ROUNDING * _least_seconds(slo, alone, least_seconds)
    is_law = found.limit is not None  # else the levels alone say
    fit = [one for one in loaded if _may_confirm(one, least)]
    for rate in sorted({one.rate for one in fit}, reverse=True):
        own = [one for one in fit if one.rate == rate]
        below = [one.judged for one in loaded if one.rate <= rate]
        if rate >= failed or (found.limit is not None and rate > found.limit):
            continue
        if not _is_proven(own, rate, loaded, slo, LEAST_AS_ONE if is_law else AS_ONE_BY_LEVELS):
            continue
        if sum(one.good for one in below) < slo.target * sum(one.due for one in below):
            continue
        seconds = sum(one.level.window_seconds for one in own)
        due = sum(one.judged.due for one in own)
        held = min(rate, due / seconds)
        middle = None if found.high is None else math.sqrt(held * found.high)
        return msgspec.structs.replace(
            found,
            state="holds",
            held=held,
            held_seconds=seconds,
            held_requests=due,
            held_share=sum(one.judged.good for one in own) / due,
            starts=_starts(own),
            limit=found.limit if is_law else middle,
            method="law" if is_law else "levels",
            low=max(found.low or 0.0, held),
            reason="" if found.high else "no rate was seen to break the SLO",
        )
    needed, rate = (
        None,
        CONFIRMING_SHARE * found.limit if found.limit else 1 / alone if alone else 0,
    )
    if rate:
        needed = confirming_seconds(
            slo, rate, alone, by_levels=not is_law, least_seconds=least_seconds
        )
    why = "no level of open load was measured"
    if fit:
        due = sum(one.judged.due for one in fit)
        many = "1 level" if len(fit) == 1 else f"{len(fit)} levels"
        why = f"{many}, {due} requests: too few were good, or too few were asked, to prove a rate"
    elif loaded:
        why = "no level was steady and long enough"
    return msgspec.structs.replace(
        found, starts=_starts(seen), confirm_seconds=needed, reason=found.reason or why
    )


def _may_confirm(one: Counted, least_seconds: float) -> bool:
    """Long and steady enough."""
    return one.level.window_seconds >= least_seconds and bool(one.judged.steady)


def _is_proven(
    own: Sequence[Counted], rate: float, loaded: Sequence[Counted], slo: Slo, as_one: float
) -> bool:
    """Whether the levels at a rate hold together, on effective numbers.

    Of several levels just above the limit one holds by chance: tries near it that did not hold
    share the confidence.
    """
    tries = 1 + sum(
        1 / NEAR <= one.rate / rate <= NEAR and one.judged.verdict != "holds"
        for one in loaded
        if one.rate != rate
    )
    counts = [
        (min(one.judged.effective, one.judged.due / as_one), one.judged.share or 0.0) for one in own
    ]
    total = sum(count for count, _ in counts)
    good = sum(count * share for count, share in counts)
    return wilson(good, total, 1 - (1 - slo.confidence) / tries)[0] >= slo.target


def _starts(seen: Sequence[Counted]) -> int:
    """Starts of the server that levels ran on; where that is not on record, one."""
    return len({one.level.started.start for one in seen})
