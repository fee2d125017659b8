"""What is known of a cell's capacity: the highest rate that meets the SLO. The one place. Pure.

    found = estimate(levels, slo, step_times=step_times, policy=policy, workload=workload)
    found.state, found.confirmed_rate, found.estimated_rate, found.low, found.high

The step-time model measures, a level confirms. The limit is simulated from step times
(*estimated*), with one factor from the levels near it, how much longer their steps took than the
step-time model says, in which the calibration counts as up to half a level: their errors are
independent. Its interval is limit x exp(+-1.645 sd), sd = what was measured with so many levels x
the steepness d ln limit / d ln step time, cut by what levels exclude. Without a step-time model the
limit lies between the highest rate that held and the lowest that failed. Only what ran,
undisturbed, steady and long enough, is held (*confirmed*).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from crossover.loadtests.capacity.step_observation import level_factor, two_speeds
from crossover.loadtests.levels.level_columns import Judged, Level
from crossover.loadtests.levels.slo_attainment import MIN_DESIGN_EFFECT, wilson
from crossover.loadtests.records.journal_events import Capacity
from crossover.models import formatting
from crossover.models.formatting import share
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    LOADED,
    MIN_TELLING,
    MOVED,
    Z_90,
    Lengths,
    PrefixReuse,
    SimulatedCapacity,
    capacity,
    common_factor,
    sd_of,
)
from crossover.serving.capacity.slo import Slo, requests_to_hold
from crossover.serving.capacity.step_time_model import StepTimeModel
from crossover.serving.workload.arrivals import Arrivals
from crossover.serving.workload.request_lengths import Workload

CONFIRMING_SHARE = 0.8  # of the limit: where a level confirms, and tells the factor
MAX_TELLING = 1.4  # times the limit: above, queues say little of steps

MIN_SECONDS = 60.0  # of a level that confirms; twice that, to tell the factor to 6 %, below ...
SLOW_RATE = 3.0  # requests/s
TTFT_LIMITS = 30.0  # of which such a level is long: an overload of 1/30 shows within it
ANSWERS = 20.0  # E2E times of a single-stream request that it is long, too
ROUNDING = 0.98  # of the time asked: a window ends with a request
# A level that is too short to confirm a rate bounds the capacity from below if an overload of a
# tenth shows within it: of simulated levels at 1.1 x the capacity, 12 % met the SLO if they were
# ten times as long as the TTFT limit, and 85 % if they were 1.5 times as long.
MIN_BOUNDING_SECONDS, BOUNDING_LIMITS = 15.0, 10.0
# Requests that count as one where no step-time model says that the limit is higher. A level of four
# minutes at the limit, or two at 1.1 x the limit, has only good requests in 25 to 30 % of cases by
# the luck of its arrivals; with this floor 2 to 7 % of levels at 1.1 x the limit hold (1.3: 3 to 23
# %).
AS_ONE_BY_LEVELS = 4.0
SAME_RATE = 1.1  # two rates whose ratio is at most this count as tries of the same rate
# A server start counts as missing the SLO unloaded only after so many single-stream requests, or
# after so many that missed it: with a target of 99 %, one slow request of five proves nothing.
MIN_UNLOADED_REQUESTS = 20
MIN_UNLOADED_MISSES = 5


class Counted(NamedTuple):
    """A level that counts for an SLO. `rate` is 0.0 where it was not at a rate."""

    level: Level
    judged: Judged
    rate: float


def estimate(
    levels: Sequence[Level],
    slo: Slo,
    *,
    step_times: StepTimeModel | None = None,
    policy: SchedulerSettings | None = None,
    reused_share: float = 0.0,
    reuse: PrefixReuse | None = None,
    reasoning_share: float = 0.0,
    workload: Lengths | Workload | None = None,
    arrivals: Arrivals | None = None,
    least_seconds: float = MIN_SECONDS,
) -> Capacity:
    """The capacity by all finished levels of a cell, in whatever order; by levels alone where no
    step-time model that fits is given.

    `least_seconds`: of the shortest level that confirms.
    """
    seen = _counted(levels, slo)
    if (unloaded := _misses_unloaded(seen, slo)) is not None:
        return unloaded
    loaded, failed = _loaded(seen)
    found = Capacity(state="not_confirmed")
    if step_times is not None and policy is not None and workload is not None and step_times.fits:
        level_factors = [
            (counted.rate, factor)
            for counted in loaded
            if (factor := _factor(step_times, counted.level, policy))
        ]
        speed_factors = [
            factor for counted in loaded for factor in _speeds(step_times, counted.level, policy)
        ]
        # Whatever the step-time model says, the limit is not far above a rate that missed the
        # target.
        missed_rates = [
            counted.rate
            for counted in loaded
            if counted.judged.good < slo.target * counted.judged.due
        ]

        def simulate(factor: float) -> SimulatedCapacity:
            return _simulated(
                step_times.slower(factor),
                policy,
                workload,
                slo,
                arrivals=arrivals,
                reused_share=reused_share,
                reuse=reuse,
                reasoning_share=reasoning_share,
            )

        found = _by_step_times(
            simulate, level_factors, speed_factors, min(missed_rates, default=math.inf)
        )
    found = _confirmed(_below(found, failed), seen, slo, least_seconds)
    return _with_lower_bound(found, loaded, ROUNDING * shortest_bounding_level(slo))


def confirmed_rate(
    levels: Sequence[Level], slo: Slo, limit: float, least_seconds: float = MIN_SECONDS
) -> float | None:
    """The rate that is confirmed where the simulated limit is this; None: none is."""
    found = Capacity(state="not_confirmed", estimated_rate=limit)
    return _confirmed(found, _counted(levels, slo), slo, least_seconds).confirmed_rate


# A cell is asked for again after each level, and once more by a report.
_factor = functools.lru_cache(maxsize=64)(level_factor)
_speeds = functools.lru_cache(maxsize=64)(two_speeds)
_simulated = functools.lru_cache(maxsize=64)(capacity)


def _counted(levels: Sequence[Level], slo: Slo) -> list[Counted]:
    """The levels that count, judged."""
    return [Counted(one, one.judge(slo), one.rate or 0.0) for one in levels if one.counts]


def _loaded(seen: Sequence[Counted]) -> tuple[list[Counted], float]:
    """The levels at a rate, and the lowest rate that clearly failed; inf: none did."""
    loaded = [one for one in seen if one.rate and one.judged.due]
    failed = [one.rate for one in loaded if one.judged.verdict == "misses"]
    return loaded, min(failed, default=math.inf)


def confirming_seconds(
    slo: Slo,
    rate: float,
    alone_seconds: float | None = None,
    *,
    by_levels: bool = False,
    least_seconds: float = MIN_SECONDS,
) -> float:
    """The window with which a level at `rate` proves that it holds, and tells the factor.

    `alone_seconds`: E2E of a request alone. `by_levels`: without a step-time model. As many
    requests are expected to be good as lie three quarters of the way from the target to all.
    """
    # Wilson's lower bound of a share s reaches the target p at z^2 p (1 - p) / (s - p)^2 requests.
    needed = requests_to_hold(slo) / 0.75**2
    return max(
        least_seconds * (2 if rate < SLOW_RATE else 1),
        shortest_level(slo, alone_seconds, least_seconds),
        (AS_ONE_BY_LEVELS if by_levels else MIN_DESIGN_EFFECT) * needed / rate,
    )


def shortest_level(slo: Slo, alone_seconds: float | None, least_seconds: float) -> float:
    """Return the seconds of the shortest window that can confirm a rate.

    `alone_seconds`: mean E2E of a single-stream request; None: not measured. `least_seconds`: the
    minimum, whatever the SLO is.
    """
    ttft_seconds = slo.ttft_seconds or 0.0
    return max(least_seconds, TTFT_LIMITS * ttft_seconds, ANSWERS * (alone_seconds or 0.0))


def shortest_bounding_level(slo: Slo) -> float:
    """Return the seconds of the shortest window that can bound the capacity from below."""
    limits = (slo.ttft_seconds, slo.ttfa_seconds, slo.e2e_seconds)  # a queue may be so long
    shortest_limit = min((limit for limit in limits if limit is not None), default=0.0)
    return max(MIN_BOUNDING_SECONDS, BOUNDING_LIMITS * shortest_limit)


def _misses_unloaded(seen: Sequence[Counted], slo: Slo) -> Capacity | None:
    """Return a capacity of 0.0 if single-stream requests miss the SLO on every start of the server.

    None: on some start they meet it or are too few to tell, none was sent, or a level under load
    meets the SLO.
    """
    # An endpoint that is not ours is never restarted: the key of all its levels is None.
    by_start: dict[int | None, list[Judged]] = {}
    for counted in seen:
        if counted.level.is_single_stream:
            by_start.setdefault(counted.level.started.start, []).append(counted.judged)
    is_met_under_load = any(one.rate and one.judged.verdict == "meets" for one in seen)
    if not by_start or is_met_under_load:
        return None
    if not all(_is_missed(levels, slo) for levels in by_start.values()):
        return None
    # An endpoint cannot be started again, so there each of its levels counts instead.
    starts = len(by_start.keys() - {None}) + len(by_start.get(None, ()))
    return Capacity(
        state="misses_slo_unloaded",
        starts=starts,
        estimated_rate=0.0,
        low=0.0,
        high=0.0,
        reason=_unloaded_reason(by_start, starts),
    )


def _is_missed(levels: Sequence[Judged], slo: Slo) -> bool:
    """Return whether these single-stream levels of one server start prove that the SLO is missed:
    Wilson's upper bound of their SLO attainment is below the target."""
    good = sum(judged.good for judged in levels)
    due = sum(judged.due for judged in levels)
    missed = due - good
    is_enough = (
        due >= MIN_UNLOADED_REQUESTS
        or missed >= MIN_UNLOADED_MISSES
        or (good == 0 and due >= 2)  # all of them
    )
    return is_enough and wilson(good, due, slo.confidence)[1] < slo.target


def _unloaded_reason(by_start: Mapping[int | None, Sequence[Judged]], starts: int) -> str:
    """Return `12 of 20 single-stream requests missed the SLO, on 2 starts`."""
    judged_levels = [judged for levels in by_start.values() for judged in levels]
    due = sum(judged.due for judged in judged_levels)
    missed = due - sum(judged.good for judged in judged_levels)
    unit = "level" if by_start.keys() == {None} else "start"
    where = f"one {unit}" if starts == 1 else f"{starts} {unit}s"
    return f"{missed} of {due} single-stream requests missed the SLO, on {where}"


def _by_step_times(
    simulate: Callable[[float], SimulatedCapacity],
    level_factors: Sequence[tuple[float, float]],
    speed_factors: Sequence[float],
    lowest_missed_rate: float,
) -> Capacity:
    """Return the simulated capacity and its interval, with all step times scaled by one factor,
    which the levels near that capacity give.

    `simulate`: returns the capacity for a factor. `level_factors`: (rate, factor) of each level.
    `speed_factors`: factors within levels in which the machine's speed changed.
    `lowest_missed_rate`: the lowest rate that missed the target; inf: none did.
    """
    factor = LOADED
    levels_worth = 0.0  # the number of levels that `factor` is worth
    near_factors: list[float] = []
    lowest_limit = lowest_missed_rate
    found = simulate(factor)
    for _ in range(3):  # another factor moves the capacity, and so the levels that are near it
        lowest_limit = min(lowest_limit, found.rate)
        lowest, highest = MIN_TELLING * lowest_limit, MAX_TELLING * found.rate
        now_near = [measured for rate, measured in level_factors if lowest <= rate <= highest]
        if not now_near or now_near == near_factors:
            break
        near_factors = now_near
        factor, levels_worth = common_factor(near_factors)
        found = simulate(factor)
    if found.rate <= 0:
        return Capacity(
            state="not_confirmed",
            method="step_times",
            reason=f"by the step-time model, SLO attainment unloaded is only "
            f"{share(found.alone_share, 2)}",
        )
    reach = math.exp(Z_90 * sd_of(levels_worth) * found.steepness)
    # If the machine's speed changed, the interval covers both speeds: the capacity changes by the
    # ratio of the step times to the power of the steepness.
    factors = [factor, *near_factors, *speed_factors]
    if levels_worth == len(near_factors):  # the calibration was at another speed
        factors.append(LOADED)
    moved = max(factors) / min(factors) - 1
    if moved <= MOVED:
        factors = [factor]
    return Capacity(
        state="not_confirmed",
        estimated_rate=found.rate,
        low=found.rate * (factor / max(factors)) ** found.steepness / reach,
        high=found.rate * (factor / min(factors)) ** found.steepness * reach,
        method="step_times",
        steepness=found.steepness,
        factor=factor if near_factors else None,
        users=found.users,
        speed_moved=moved if moved > MOVED else None,
    )


def _below(found: Capacity, failed: float) -> Capacity:
    """A rate that clearly failed bounds the limit from above; inf: none did."""
    if failed == math.inf or (found.high is not None and found.high <= failed):
        return found
    low, limit = found.low, found.estimated_rate
    if limit is not None and low is not None:
        # Where the step-time model says more than what failed, it is wrong by what is left of its
        # interval.
        low, limit = min(low, failed * low / limit), min(limit, failed)
    return msgspec.structs.replace(found, low=low, estimated_rate=limit, high=failed)


def _confirmed(
    found: Capacity, seen: Sequence[Counted], slo: Slo, least_seconds: float
) -> Capacity:
    """With the highest rate that is confirmed, not above what all levels together say."""
    loaded, failed = _loaded(seen)
    e2e = [one.level.mean(one.level.e2e) for one in seen if one.level.is_single_stream]
    known = [seconds for seconds in e2e if seconds is not None]
    alone = sum(known) / len(known) if known else None
    least = ROUNDING * shortest_level(slo, alone, least_seconds)
    is_by_step_times = found.estimated_rate is not None  # else the levels alone say
    fit = [one for one in loaded if one.judged.steady and one.level.window_seconds >= least]
    for rate in sorted({one.rate for one in fit if one.rate < failed}, reverse=True):
        own = [one for one in fit if one.rate == rate]
        if rate <= (found.estimated_rate or math.inf) and _is_proven(
            own, loaded, slo, is_by_step_times
        ):
            seconds = sum(one.level.window_seconds for one in own)
            due = sum(one.judged.due for one in own)
            held = min(rate, due / seconds)
            middle = None if found.high is None else math.sqrt(held * found.high)
            return msgspec.structs.replace(
                found,
                state="confirmed",
                confirmed_rate=held,
                confirmed_seconds=seconds,
                confirmed_requests=due,
                confirmed_attainment=sum(one.judged.good for one in own) / due,
                starts=len({one.level.started.start for one in own}),
                estimated_rate=found.estimated_rate if is_by_step_times else middle,
                method="step_times" if is_by_step_times else "levels",
                low=max(found.low or 0.0, held),
                reason="" if found.high else "no measured rate missed the SLO",
            )
    needed, rate = None, CONFIRMING_SHARE * (found.estimated_rate or 0.0)
    if found.method == "levels" and alone:
        rate = 1 / alone
    if rate:  # 0.0: nothing to confirm by the step-time model
        needed = confirming_seconds(
            slo, rate, alone, by_levels=not is_by_step_times, least_seconds=least_seconds
        )
    why = "no valid level of open-loop load was measured"
    if loaded:
        why = "no level was long and steady enough, with enough SLO attainment, to confirm a rate"
    return msgspec.structs.replace(
        found,
        starts=len({one.level.started.start for one in seen}),
        confirm_seconds=needed,
        reason=found.reason or why,
    )


def _with_lower_bound(
    found: Capacity, loaded: Sequence[Counted], shortest_seconds: float
) -> Capacity:
    """With the highest rate of a level that met the SLO as the lower bound, where there is no
    step-time model and the levels were too short to confirm a rate."""
    if found.is_confirmed or found.method != "levels":
        return found
    met = [
        min(each.rate, each.judged.due / each.level.window_seconds)
        for each in loaded
        if each.judged.verdict == "meets"
        and each.rate < (found.high or math.inf)
        and each.level.window_seconds >= shortest_seconds
    ]
    if not met:
        return found
    low, unit_rate = max(met), found.high or max(met)
    words = f"levels met the SLO at {formatting.rate(low, rounded='down', like=unit_rate)}"
    if found.high is not None:
        words += f" and missed it at {formatting.rate(found.high, rounded='up', like=unit_rate)}"
    return msgspec.structs.replace(
        found, low=low, reason=f"{words}, but were too short to confirm a rate"
    )


def _is_proven(
    own: Sequence[Counted], loaded: Sequence[Counted], slo: Slo, is_by_step_times: bool
) -> bool:
    """Whether the levels at a rate hold together, on effective numbers, and so do all that ran at
    or below it.

    Of several levels just above the limit one holds by chance: tries near it that did not hold
    share the confidence.
    """
    rate, as_one = own[0].rate, MIN_DESIGN_EFFECT if is_by_step_times else AS_ONE_BY_LEVELS
    tries = 1 + sum(
        1 / SAME_RATE <= one.rate / rate <= SAME_RATE and one.judged.verdict != "meets"
        for one in loaded
        if one.rate != rate
    )
    total = good = 0.0
    for _, judged, _ in own:
        count = min(judged.effective, judged.due / as_one)
        total += count
        good += count * (judged.share or 0.0)
    below = [one.judged for one in loaded if one.rate <= rate]
    share = sum(one.good for one in below) / sum(one.due for one in below)
    proven = wilson(good, total, 1 - (1 - slo.confidence) / tries)[0]
    return share >= slo.target and proven >= slo.target
