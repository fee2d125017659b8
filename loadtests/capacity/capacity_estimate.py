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
from collections.abc import Callable, Sequence
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
# Requests that count as one where no step-time model says that the limit is higher. A level of four
# minutes at the limit, or two at 1.1 x the limit, has only good requests in 25 to 30 % of cases by
# the luck of its arrivals; with this floor 2 to 7 % of levels at 1.1 x the limit hold (1.3: 3 to 23
# %).
AS_ONE_BY_LEVELS = 4.0
NEAR = 1.1  # rates apart by less are tries of one
MIN_ALONE = 20  # single-stream requests before "not even alone" ...
MIN_BAD = 5  # ... or so many bad ones: at 99 % one slow one of five proves nothing


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
    if (found := _not_even_alone(seen, slo)) is not None:
        return found
    loaded, failed = _loaded(seen)
    found = Capacity(state="not_confirmed")
    if step_times is not None and policy is not None and workload is not None and step_times.fits:
        told = [
            (one.rate, factor)
            for one in loaded
            if (factor := _factor(step_times, one.level, policy))
        ]
        speeds = [one for each in loaded for one in _speeds(step_times, each.level, policy)]
        # Whatever the step-time model says, the limit is not far above a rate that missed the
        # target.
        short = [one.rate for one in loaded if one.judged.good < slo.target * one.judged.due]

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

        found = _by_step_times(simulate, told, speeds, min(short, default=math.inf))
    return _with_lower_bound(_confirmed(_below(found, failed), seen, slo, least_seconds), loaded)


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


def shortest_level(slo: Slo, alone: float | None, least_seconds: float) -> float:
    """Return the length of the shortest window that confirms, whatever it shows."""
    return max(least_seconds, TTFT_LIMITS * (slo.ttft_seconds or 0.0), ANSWERS * (alone or 0.0))


def _not_even_alone(seen: Sequence[Counted], slo: Slo) -> Capacity | None:
    """Where requests one at a time miss the SLO on every start; None: they do not, or too few
    were asked. Load makes no request better: what holds under load holds alone.
    """
    starts: dict[object, list[Judged]] = {}
    for level, judged, _ in seen:
        if level.is_single_stream:
            starts.setdefault(level.started.start, []).append(judged)  # None: of an endpoint
    if not starts or any(one.rate and one.judged.verdict == "meets" for one in seen):
        return None
    missed = asked = 0
    for own in starts.values():
        good, due = sum(one.good for one in own), sum(one.due for one in own)
        is_enough = due >= MIN_ALONE or due - good >= MIN_BAD or (not good and due >= 2)
        if not is_enough or wilson(good, due, slo.confidence)[1] >= slo.target:
            return None
        missed, asked = missed + due - good, asked + due
    # Of an endpoint each level counts, since it cannot be started again.
    count = len(starts.keys() - {None}) + len(starts.get(None, ()))
    unit = "level" if starts.keys() == {None} else "start"
    where = f"one {unit}" if count == 1 else f"{count} {unit}s"
    return Capacity(
        state="misses_slo_unloaded",
        starts=count,
        estimated_rate=0.0,
        low=0.0,
        high=0.0,
        reason=f"{missed} of {asked} single-stream requests missed the SLO, on {where}",
    )


def _by_step_times(
    simulate: Callable[[float], SimulatedCapacity],
    told: Sequence[tuple[float, float]],
    speeds: Sequence[float],
    short: float,
) -> Capacity:
    """The simulated limit with one factor from the levels near it; `told`: (rate, factor).

    `speeds`: factors within levels in which the machine's speed changed. `short`: the lowest rate
    that missed the target; inf: none did.
    """
    factor, counts, near, least = LOADED, 0.0, list[float](), short
    found = simulate(factor)
    for _ in range(3):
        least = min(least, found.rate)
        ends = MIN_TELLING * least, MAX_TELLING * found.rate
        now = [one for at, one in told if ends[0] <= at <= ends[1]]
        if not now or now == near:
            break
        near = now
        factor, counts = common_factor(near)
        found = simulate(factor)
    if found.rate <= 0:
        return Capacity(
            state="not_confirmed",
            method="step_times",
            reason=f"by the step-time model, SLO attainment unloaded is only "
            f"{share(found.alone_share, 2)}",
        )
    reach = math.exp(Z_90 * sd_of(counts) * found.steepness)
    # Both speeds of a machine that changed: steps that take longer lower the limit so much more.
    seen = [factor, *near, *speeds]
    if counts == len(near):  # the calibration was at another
        seen.append(LOADED)
    moved = max(seen) / min(seen) - 1
    if moved <= MOVED:
        seen = [factor]
    return Capacity(
        state="not_confirmed",
        estimated_rate=found.rate,
        low=found.rate * (factor / max(seen)) ** found.steepness / reach,
        high=found.rate * (factor / min(seen)) ** found.steepness * reach,
        method="step_times",
        steepness=found.steepness,
        factor=factor if near else None,
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


def _with_lower_bound(found: Capacity, loaded: Sequence[Counted]) -> Capacity:
    """With the highest rate of a level that met the SLO as the lower bound, where there is no
    step-time model and the levels were too short to confirm a rate."""
    if found.is_confirmed or found.method != "levels":
        return found
    met = [
        min(each.rate, each.judged.due / each.level.window_seconds)
        for each in loaded
        if each.judged.verdict == "meets" and each.rate < (found.high or math.inf)
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
        1 / NEAR <= one.rate / rate <= NEAR and one.judged.verdict != "meets"
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
