"""Estimates a cell's capacity: the highest rate that meets the SLO. Pure.

    capacity = estimate(levels, slo, server, demand)
    capacity.state, capacity.confirmed_rate, capacity.estimated_rate, capacity.low, capacity.high

With a step-time model, the capacity is simulated (*estimated*). All step times are multiplied by
one factor: how much longer the steps of the levels near the capacity took than the model says. The
calibration counts as up to half a level in it, since its errors are independent of theirs. The SLO
attainment of the levels moves the factor further (attainment_evidence.py). The 90 % interval has
the capacities at factor x exp(+-1.645 sd), where `sd` is the standard deviation of the logarithm of
the factor, measured for so many levels (serving/capacity/simulated_capacity.py, `sd_of`). Rates
that levels exclude are cut off the interval.

If single requests miss the SLO by the step-time model, those that decide are sent alone, and what
they measured sets the factor (unloaded_check.py).

Without a step-time model, the capacity lies between the highest rate that met the SLO and the
lowest that missed it. In both cases a rate is *confirmed* only if levels at that rate ran steadily
and long enough, and met the SLO.

Other processes only make answers later. A level that met the SLO beside them confirms its rate, and
the times of its steps count without what they took, so the estimate is that of the machine alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from crossover.loadtests.capacity.attainment_evidence import speed_by_attainment
from crossover.loadtests.capacity.capacity_text import common_rate
from crossover.loadtests.capacity.step_observation import (
    level_factor,
    two_speeds,
)
from crossover.loadtests.capacity.unloaded_check import CheckedSpeed, checked_speed
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
    QUICK_REQUESTS,
    Z_90,
    Demand,
    ServerModel,
    common_factor,
    sd_of,
)
from crossover.serving.capacity.slo import Slo, requests_to_hold
from crossover.serving.capacity.step_time_model import StepTimeModel

# What other processes do beside taking CPU time (caches, memory bandwidth): standard deviation of
# the logarithm of the corrected step times, per share of CPU time that they took.
TAKEN_SD = 0.3
MAX_TAKEN_SHARE = 0.9  # to estimate the capacity of the machine as busy as it was
# The rate of a confirming level, as a share of the estimated capacity. It is also near enough to
# the capacity to measure the factor of the step times.
CONFIRMING_SHARE = 0.8
# Levels above this many times the capacity do not count for the factor: they measure queues.
MAX_NEAR_SHARE = 1.4

# A level that confirms a rate lasts at least MIN_SECONDS, or twice as long below SLOW_RATE, where
# it takes that to measure the factor to 6 %. It also lasts so many TTFT limits that an overload of
# 1/30 exceeds the limit within it, and so many single-stream answers.
MIN_SECONDS = 60.0
SLOW_RATE = 3.0  # requests/s
CONFIRMING_TTFT_LIMITS = 30.0
CONFIRMING_ANSWERS = 20.0
# A measured window ends with its last request, so it may be this much shorter than it was to be.
WINDOW_TOLERANCE = 0.98
# A level that is too short to confirm a rate bounds the capacity from below if an overload of a
# tenth shows within it: of simulated levels at 1.1 x the capacity, 12 % met the SLO if they were
# ten times as long as the TTFT limit, and 85 % if they were 1.5 times as long.
MIN_BOUNDING_SECONDS = 15.0
BOUNDING_LIMITS = 10.0
# Minimum design effect where no step-time model says that the capacity is higher. All requests of a
# level of four minutes at the capacity, or of two minutes at 1.1 x the capacity, meet the SLO in 25
# to 30 % of cases by the luck of its arrivals. With this value, 2 to 7 % of the levels at 1.1 x the
# capacity confirm their rate; with MIN_DESIGN_EFFECT it would be 3 to 23 %.
LEVELS_DESIGN_EFFECT = 4.0
# A confirming level has enough requests to prove its rate even if its SLO attainment is only this
# part of the way from the target to 1.
EXPECTED_ATTAINMENT_MARGIN = 0.75
SAME_RATE = 1.1  # two rates whose ratio is at most this count as tries of the same rate
# A server start counts as missing the SLO unloaded only after so many single-stream requests, or
# after so many that missed it: with a target of 99 %, one slow request of five proves nothing.
MIN_UNLOADED_REQUESTS = 20
MIN_UNLOADED_MISSES = 5


class JudgedLevel(NamedTuple):
    """A level that counts, judged by an SLO."""

    level: Level
    judged: Judged
    rate: float  # requests/s; 0.0: it was not at a rate


def estimate(
    levels: Sequence[Level],
    slo: Slo,
    server: ServerModel | None = None,
    demand: Demand | None = None,
    *,
    min_level_seconds: float = MIN_SECONDS,
    unit_rate: float | None = None,
) -> Capacity:
    """Return the capacity by all finished levels of a cell, in any order. Bursts tell only how much
    other processes took.

    `server`: as it was calibrated; `demand`: the requests of the campaign. Without both, or with a
    step-time model that does not fit, the capacity follows from the levels alone.
    `min_level_seconds`: duration of the shortest level that can confirm a rate. `unit_rate`: the
    rate in whose unit the reason has its rates; None: that which suits the capacity.
    """
    checks = [level for level in levels if level.is_unloaded_check and level.counts]
    levels = [level for level in levels if not level.is_unloaded_check]
    judged_levels = _judged_levels([one for one in levels if not one.is_burst], slo)
    if (unloaded := _misses_unloaded(judged_levels, slo)) is not None:
        return _with_taken_share(unloaded, levels)
    loaded = _loaded(judged_levels)
    capacity = Capacity(state="not_confirmed")
    if server is not None and demand is not None and server.step_times.fits:
        checked = checked_speed(server, slo, checks[-1].undisturbed) if checks else None
        capacity = _by_step_times(server, demand, slo, loaded, checked)
        if (taken_share := _taken_share(levels)) is not None:
            capacity = _without_other_processes(capacity, taken_share, server, demand, slo)
        elif (accepted_share := _accepted_share(levels)) is not None:
            capacity = msgspec.structs.replace(
                capacity, taken_share=accepted_share, busy_rate=capacity.estimated_rate
            )
        if not capacity.estimated_rate and loaded:  # single requests contradicted the model
            capacity = msgspec.structs.replace(capacity, method="levels")
    capacity = _bounded_above(capacity, _lowest_missed(loaded))
    capacity = _with_confirmed_rate(capacity, judged_levels, slo, min_level_seconds, unit_rate)
    min_bounding_seconds = WINDOW_TOLERANCE * shortest_bounding_level(slo)
    capacity = _with_lower_bound(capacity, loaded, min_bounding_seconds, unit_rate)
    return _with_taken_share(capacity, levels)


def confirmed_rate(
    levels: Sequence[Level],
    slo: Slo,
    estimated_rate: float,
    min_level_seconds: float = MIN_SECONDS,
) -> float | None:
    """Return the rate that the levels confirm if this is the estimated capacity; None: none."""
    capacity = Capacity(state="not_confirmed", estimated_rate=estimated_rate)
    judged_levels = _judged_levels(levels, slo)
    return _with_confirmed_rate(capacity, judged_levels, slo, min_level_seconds).confirmed_rate


# The same levels are observed again for each estimate, which takes 0.1 s for 100 requests.
@functools.lru_cache(maxsize=64)
def _factor(step_times: StepTimeModel, level: Level, settings: SchedulerSettings) -> float | None:
    """Return the factor of a level's step times, without what other processes took of them."""
    factor = level_factor(step_times, level, settings)
    return None if factor is None else factor * (1 - level.taken_share)


@functools.lru_cache(maxsize=64)
def _speeds(
    step_times: StepTimeModel, level: Level, settings: SchedulerSettings
) -> tuple[float, ...]:
    """Return the two factors of a level within which the machine's speed changed; (): it did not,
    or other processes may have been the reason."""
    return () if level.taken_share else tuple(two_speeds(step_times, level, settings))


def judgment_of(level: Level, slo: Slo) -> Judged:
    """Return the judgment of a level; of a single stream, that of what it would have been without
    other processes."""
    return (level.undisturbed if level.is_single_stream else level).judge(slo)


def _judged_levels(levels: Sequence[Level], slo: Slo) -> list[JudgedLevel]:
    """Return the levels that count."""
    return [
        JudgedLevel(level, judgment_of(level, slo), level.rate or 0.0)
        for level in levels
        if level.counts
    ]


def _taken_share(levels: Sequence[Level]) -> float | None:
    """Return the mean share of its CPU time that the engine lost in levels at a rate, or else in
    single streams and bursts; None: no level was disturbed.

    Levels that were set aside are among them.
    """
    loaded = [level for level in levels if level.rate] or levels
    shares = [level.taken_share for level in loaded]
    return sum(shares) / len(shares) if any(shares) else None


def _accepted_share(levels: Sequence[Level]) -> float | None:
    """Return the mean share of its CPU time that the engine lost where the campaign accepts that;
    None: it does not, or no level was disturbed."""
    disturbances = [level.finished and level.finished.disturbance for level in levels]
    shares = [disturbance.share or 0.0 for disturbance in disturbances if disturbance]
    if not any(disturbance and disturbance.is_disturbed for disturbance in disturbances):
        return None
    return sum(shares) / len(shares)


def _with_taken_share(capacity: Capacity, levels: Sequence[Level]) -> Capacity:
    """Return the capacity with the share that other processes took, if it has none yet. Without a
    step-time model, rates are those of the machine as busy as it was."""
    shares = (capacity.taken_share, _taken_share(levels), _accepted_share(levels))
    taken_share = next((share for share in shares if share is not None), None)
    return msgspec.structs.replace(capacity, taken_share=taken_share)


def _loaded(judged_levels: Sequence[JudgedLevel]) -> list[JudgedLevel]:
    """Return the levels at a rate."""
    return [one for one in judged_levels if one.rate and one.judged.due]


def _lowest_missed(loaded: Sequence[JudgedLevel]) -> float:
    """Return the lowest rate with the verdict that it misses the SLO; inf: none."""
    missed = [one.rate for one in loaded if one.judged.verdict == "misses"]
    return min(missed, default=math.inf)


def confirming_seconds(
    slo: Slo,
    rate: float,
    answer_seconds: float | None = None,
    *,
    by_levels: bool = False,
    min_level_seconds: float = MIN_SECONDS,
) -> float:
    """Return the seconds of a window that is expected to confirm `rate`, and to measure the factor
    of the step times.

    `answer_seconds`: mean E2E of a single-stream request; None: not measured. `by_levels`: there is
    no step-time model. `min_level_seconds`: the minimum, whatever SLO and rate are.
    """
    # Wilson's lower bound of a share s reaches the target p at z^2 p (1 - p) / (s - p)^2 requests.
    # requests_to_hold has that number for s = 1.
    requests = requests_to_hold(slo) / EXPECTED_ATTAINMENT_MARGIN**2
    design_effect = LEVELS_DESIGN_EFFECT if by_levels else MIN_DESIGN_EFFECT
    return max(
        min_level_seconds * (2 if rate < SLOW_RATE else 1),
        shortest_level(slo, answer_seconds, min_level_seconds),
        design_effect * requests / rate,
    )


def shortest_level(slo: Slo, answer_seconds: float | None, min_level_seconds: float) -> float:
    """Return the seconds of the shortest window that can confirm a rate.

    `answer_seconds`: mean E2E of a single-stream request; None: not measured. `min_level_seconds`:
    the minimum, whatever the SLO is.
    """
    return max(
        min_level_seconds,
        CONFIRMING_TTFT_LIMITS * (slo.ttft_seconds or 0.0),
        CONFIRMING_ANSWERS * (answer_seconds or 0.0),
    )


def shortest_bounding_level(slo: Slo) -> float:
    """Return the seconds of the shortest window that can bound the capacity from below."""
    return max(MIN_BOUNDING_SECONDS, BOUNDING_LIMITS * (slo.shortest_queueing_limit or 0.0))


def _misses_unloaded(judged_levels: Sequence[JudgedLevel], slo: Slo) -> Capacity | None:
    """Return a capacity of 0.0 if single-stream requests miss the SLO on every start of the server.

    None: on some start they meet it or are too few to tell, none was sent, or a level under load
    meets the SLO.
    """
    # The number of the server's start -> its single-stream levels. The number is None for an
    # endpoint, which the campaign does not start.
    by_start: dict[int | None, list[Judged]] = {}
    for one in judged_levels:
        if one.level.is_single_stream:
            by_start.setdefault(one.level.started.start, []).append(one.judged)
    is_met_under_load = any(one.rate and one.judged.verdict == "meets" for one in judged_levels)
    if not by_start or is_met_under_load:
        return None
    if not all(_is_missed(levels, slo) for levels in by_start.values()):
        return None
    # Each level of an endpoint counts as a start, since the endpoint cannot be started again.
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
    are_enough = due >= MIN_UNLOADED_REQUESTS or missed >= MIN_UNLOADED_MISSES
    all_missed = good == 0 and due >= 2
    if not are_enough and not all_missed:
        return False
    _, upper_bound = wilson(good, due, slo.confidence)
    return upper_bound < slo.target


def _unloaded_reason(by_start: Mapping[int | None, Sequence[Judged]], starts: int) -> str:
    """Return `12 of 20 single-stream requests missed the SLO, on 2 starts`."""
    judged_levels = [judged for levels in by_start.values() for judged in levels]
    due = sum(judged.due for judged in judged_levels)
    missed = due - sum(judged.good for judged in judged_levels)
    unit = "level" if by_start.keys() == {None} else "start"
    where = f"one {unit}" if starts == 1 else f"{starts} {unit}s"
    return f"{missed} of {due} single-stream requests missed the SLO, on {where}"


def server_under_load(server: ServerModel, capacity: Capacity | None) -> ServerModel:
    """Return a calibrated server with step times as load levels showed them; None: there is no
    capacity of it yet."""
    if capacity is None:
        return server.slower(LOADED)
    return server.slower(capacity.factor or LOADED)


def _by_step_times(
    server: ServerModel,
    demand: Demand,
    slo: Slo,
    loaded: Sequence[JudgedLevel],
    checked: CheckedSpeed | None,
) -> Capacity:
    """Return the simulated capacity and its interval, with all step times scaled by one factor,
    which the levels near that capacity give.

    `checked`: where by the factor there is no capacity, that of these requests is taken if it is
    lower; None: none was sent.
    """
    step_times, settings = server.step_times, server.settings
    level_factors: list[tuple[float, float]] = []
    speed_factors: list[float] = []
    for one in loaded:
        if measured := _factor(step_times, one.level, settings):
            # Steps of a slowed machine have as many rows as those of the machine alone at a rate
            # that is higher by as much as it is faster.
            level_factors.append((one.rate / (1 - one.level.taken_share), measured))
        speed_factors += _speeds(step_times, one.level, settings)

    def quick_rate(factor: float) -> float:
        """Return the capacity by fewer requests, which is compared with others like it only."""
        return server.slower(factor).capacity(demand, slo, QUICK_REQUESTS).rate

    # By single requests that were sent alone; inf: none was.
    checked_factor = (checked and checked.factor) or math.inf
    factor = LOADED if quick_rate(LOADED) > 0 else min(LOADED, checked_factor)
    levels_worth = 0.0  # the number of levels that `factor` is worth
    near_factors: list[float] = []
    # Whatever the step-time model says, the capacity is not far above a rate whose SLO attainment
    # is below the target.
    missed_rates = [one.rate for one in loaded if one.judged.good < slo.target * one.judged.due]
    lowest_capacity = min(missed_rates, default=math.inf)
    for _ in range(3):  # another factor moves the capacity, and so the levels that are near it
        rate = quick_rate(factor) if loaded else 0.0
        lowest_capacity = min(lowest_capacity, rate)
        lowest, highest = MIN_TELLING * lowest_capacity, MAX_NEAR_SHARE * rate
        now_near = [measured for rate, measured in level_factors if lowest <= rate <= highest]
        if not now_near or now_near == near_factors:
            break
        near_factors = now_near
        factor, levels_worth = common_factor(near_factors)
    # If the machine's speed changed, the interval covers both speeds.
    factors = [factor, *near_factors, *speed_factors]
    if levels_worth == len(near_factors):  # the calibration was at another speed
        factors.append(LOADED)
    speed_change = max(factors) / min(factors) - 1
    if speed_change <= MOVED:
        factors = [factor]
    slowest, quickest = max(factors) / factor, min(factors) / factor
    sd = sd_of(levels_worth)
    if loaded:
        levels = [one.level for one in loaded]
        factor, sd = speed_by_attainment(server, slo, levels, factor, sd)
    simulated = server.slower(factor).capacity(demand, slo)
    if simulated.rate <= 0 and checked_factor < factor:
        factor = checked_factor
        simulated = server.slower(factor).capacity(demand, slo)
    checked_words = checked.words if checked is not None else ""
    if simulated.rate <= 0:
        attainment = share(simulated.unloaded_attainment, 2)
        reason = f"by the step-time model, SLO attainment unloaded is only {attainment}"
        return Capacity(
            state="not_confirmed",
            method="step_times",
            reason="; ".join(filter(None, (reason, checked_words))),
            checked=checked_words,
        )
    half_width = math.exp(Z_90 * sd)  # of the factor
    # Few and many requests may disagree whether there is a capacity, where there hardly is one.
    unit = simulated.rate / (quick_rate(factor) or simulated.rate)
    return Capacity(
        state="not_confirmed",
        estimated_rate=simulated.rate,
        low=unit * quick_rate(factor * slowest * half_width),
        high=max(simulated.rate, unit * quick_rate(factor * quickest / half_width)),
        method="step_times",
        steepness=simulated.steepness,
        factor=factor if near_factors or factor == checked_factor else None,
        users=simulated.users,
        speed_moved=speed_change if speed_change > MOVED else None,
        checked=checked_words,
    )


def _without_other_processes(
    capacity: Capacity, taken_share: float, server: ServerModel, demand: Demand, slo: Slo
) -> Capacity:
    """Return the capacity of the machine without other processes, with an interval that is wider by
    what they do beside taking CPU time, and with the capacity of the machine as busy as it was.

    `taken_share`: of the engine's CPU time that they took.
    """
    rate, low, high = capacity.estimated_rate, capacity.low, capacity.high
    if not (rate and low and high and capacity.steepness):
        return msgspec.structs.replace(capacity, taken_share=taken_share)
    taken_log = Z_90 * TAKEN_SD * taken_share * capacity.steepness
    wider = [math.exp(math.hypot(math.log(end / rate), taken_log)) for end in (low, high)]
    quiet = server_under_load(server, capacity)
    busy = quiet.slower(1 / (1 - min(taken_share, MAX_TAKEN_SHARE)))
    quiet_rate, busy_rate = (
        model.capacity(demand, slo, QUICK_REQUESTS).rate for model in (quiet, busy)
    )
    return msgspec.structs.replace(
        capacity,
        low=rate / wider[0],
        high=rate * wider[1],
        taken_share=taken_share,
        busy_rate=rate * min(1.0, busy_rate / quiet_rate) if quiet_rate else None,
    )


def _bounded_above(capacity: Capacity, missed_rate: float) -> Capacity:
    """Return the capacity with an upper end of at most `missed_rate`, which missed the SLO; inf:
    none did."""
    if missed_rate == math.inf or (capacity.high is not None and capacity.high <= missed_rate):
        return capacity
    low, rate = capacity.low, capacity.estimated_rate
    if low is not None and rate is not None:
        # If the estimate is above the rate that missed, the lower end is moved down with it, so
        # that it keeps its relative distance.
        low = min(low, missed_rate * low / rate)
        rate = min(rate, missed_rate)
    return msgspec.structs.replace(capacity, low=low, estimated_rate=rate, high=missed_rate)


def _with_confirmed_rate(
    capacity: Capacity,
    judged_levels: Sequence[JudgedLevel],
    slo: Slo,
    min_level_seconds: float,
    unit_rate: float | None = None,
) -> Capacity:
    """Return the capacity with the highest rate that levels confirm. If there is none, return it
    with the reason and the seconds of a level that would confirm one.

    A confirmed rate is below the lowest rate that missed the SLO. A level at a rate above the
    estimate confirms the estimated rate, which is lower. If it would confirm its own rate without
    any step-time model, it does so, and the estimate moves up to it.
    """
    loaded = _loaded(judged_levels)
    answer_seconds = _single_stream_answer_seconds(judged_levels)
    min_seconds = WINDOW_TOLERANCE * shortest_level(slo, answer_seconds, min_level_seconds)
    has_estimate = bool(capacity.estimated_rate)  # from step times
    max_rate = capacity.estimated_rate or math.inf
    lowest_missed = _lowest_missed(loaded)
    long_enough = [
        one for one in loaded if one.judged.steady and one.level.window_seconds >= min_seconds
    ]
    rates = {one.rate for one in long_enough if one.rate < lowest_missed}
    for rate in sorted(rates, reverse=True):
        at_rate = [one for one in long_enough if one.rate == rate]
        if rate > max_rate and _is_proven(at_rate, loaded, slo, has_estimate=False):
            return _raised_to(_confirmed_by(capacity, at_rate, has_estimate), capacity)
        if _is_proven(at_rate, loaded, slo, has_estimate):
            return _confirmed_by(capacity, at_rate, has_estimate, max_rate)
    # Of an estimate of 0.0 nothing can be confirmed.
    next_rate = CONFIRMING_SHARE * (capacity.estimated_rate or 0.0)
    if capacity.method == "levels" and answer_seconds:
        next_rate = 1 / answer_seconds
    confirm_seconds = None
    if next_rate:
        confirm_seconds = confirming_seconds(
            slo,
            next_rate,
            answer_seconds,
            by_levels=not has_estimate,
            min_level_seconds=min_level_seconds,
        )
    unit_rate = unit_rate or common_rate([capacity])
    why_not = _why_not_confirmed(loaded, slo, min_seconds, unit_rate)
    return msgspec.structs.replace(
        capacity,
        starts=len({one.level.started.start for one in judged_levels}),
        confirm_seconds=confirm_seconds,
        reason=capacity.reason or why_not,
    )


def _single_stream_answer_seconds(judged_levels: Sequence[JudgedLevel]) -> float | None:
    """Return the mean E2E of a single-stream request; None: none was answered."""
    single_streams = [one.level for one in judged_levels if one.level.is_single_stream]
    means = [level.mean(level.e2e) for level in single_streams]
    known = [seconds for seconds in means if seconds is not None]
    return sum(known) / len(known) if known else None


def _why_not_confirmed(
    loaded: Sequence[JudgedLevel], slo: Slo, min_seconds: float, unit_rate: float | None
) -> str:
    """Return why the levels confirm no rate: of those that met the target, why the one at the
    lowest rate does not.

    `min_seconds`: of the shortest level that confirms a rate. `unit_rate`: the rate in whose unit
    rates are written.
    """
    if not loaded:
        return "no valid level of open-loop load was measured"
    met = [one for one in loaded if one.judged.good >= slo.target * one.judged.due]
    if not met:
        return "no level at a rate reached the target of the SLO"
    one = min(met, key=lambda each: each.rate)
    rate = formatting.rate(one.level.offered_rate, like=unit_rate)
    words = f"at {rate}, {one.judged.good} of {one.judged.due} requests met the SLO, but "
    if one.rate >= _lowest_missed(loaded):
        return f"{words}a level at a rate that is not higher missed it"
    if one.level.window_seconds < min_seconds:
        shown, needed = map(formatting.duration, (one.level.window_seconds, min_seconds))
        return f"{words}a level of {shown} is too short: it takes {needed} to confirm a rate"
    if not one.judged.steady:
        return f"{words}the number of waiting requests grew"
    return f"{words}these are too few to prove {slo.target:.4g} of all requests"


def _raised_to(confirmed: Capacity, capacity: Capacity) -> Capacity:
    """Return a capacity whose confirmed rate is above the estimate in `capacity`, with the
    estimate and the upper end of its interval raised by the same factor."""
    rate, estimated = confirmed.confirmed_rate, capacity.estimated_rate
    if not rate or not estimated or rate <= estimated:
        return confirmed
    high = None if capacity.high is None else capacity.high * rate / estimated
    return msgspec.structs.replace(
        confirmed, estimated_rate=rate, high=high, contradicted_rate=estimated
    )


def _confirmed_by(
    capacity: Capacity,
    at_rate: Sequence[JudgedLevel],
    has_estimate: bool,
    max_rate: float = math.inf,
) -> Capacity:
    """Return the capacity with the rate of these levels, which are at one rate, confirmed, or with
    `max_rate` if that is lower."""
    seconds = sum(one.level.window_seconds for one in at_rate)
    due = sum(one.judged.due for one in at_rate)
    # The offered rate may be lower than the nominal one.
    confirmed = min(at_rate[0].rate, due / seconds, max_rate)
    estimated_rate = capacity.estimated_rate
    if not has_estimate and capacity.high is not None:
        estimated_rate = math.sqrt(confirmed * capacity.high)
    return msgspec.structs.replace(
        capacity,
        state="confirmed",
        confirmed_rate=confirmed,
        confirmed_seconds=seconds,
        confirmed_requests=due,
        confirmed_attainment=sum(one.judged.good for one in at_rate) / due,
        starts=len({one.level.started.start for one in at_rate}),
        estimated_rate=estimated_rate,
        method="step_times" if has_estimate else "levels",
        low=max(capacity.low or 0.0, confirmed),
        reason="" if capacity.high else "no measured rate missed the SLO",
    )


def _with_lower_bound(
    capacity: Capacity,
    loaded: Sequence[JudgedLevel],
    min_seconds: float,
    unit_rate: float | None,
) -> Capacity:
    """Return the capacity with the highest rate that met the SLO as its lower end, if there is no
    step-time model and no level was long enough to confirm a rate.

    `min_seconds`: duration of the shortest level that bounds the capacity. `unit_rate`: the rate in
    whose unit the reason has its rates; None: that which suits the bounds.
    """
    if capacity.is_confirmed or capacity.method != "levels":
        return capacity
    max_rate = capacity.high or math.inf
    met_rates = [
        min(one.rate, one.judged.due / one.level.window_seconds)
        for one in loaded
        if one.judged.verdict == "meets"
        and one.rate < max_rate
        and one.level.window_seconds >= min_seconds
    ]
    if not met_rates:
        return capacity
    low = max(met_rates)
    unit_rate = unit_rate or capacity.high or low
    words = f"levels met the SLO at {formatting.rate(low, rounded='down', like=unit_rate)}"
    if capacity.high is not None:
        words += f" and missed it at {formatting.rate(capacity.high, rounded='up', like=unit_rate)}"
    return msgspec.structs.replace(
        capacity, low=low, reason=f"{words}, but were too short to confirm a rate"
    )


def _is_proven(
    at_rate: Sequence[JudgedLevel],
    loaded: Sequence[JudgedLevel],
    slo: Slo,
    has_estimate: bool,
) -> bool:
    """Return whether the levels at one rate together prove that it meets the SLO.

    Wilson's lower bound of their SLO attainment, for their effective numbers of requests, must
    reach the target, and so must the plain SLO attainment of all levels at or below the rate.

    Of several levels just above the capacity, one may meet the SLO by chance. So if levels at
    nearly the same rate did not meet it, the error probability is divided by the number of tries
    (Bonferroni).
    """
    rate = at_rate[0].rate
    failed_tries = [
        one
        for one in loaded
        if one.rate != rate
        and 1 / SAME_RATE <= one.rate / rate <= SAME_RATE
        and one.judged.verdict != "meets"
    ]
    min_effect = MIN_DESIGN_EFFECT if has_estimate else LEVELS_DESIGN_EFFECT
    effective_due = effective_good = 0.0
    for one in at_rate:
        effective = min(one.judged.effective, one.judged.due / min_effect)
        effective_due += effective
        effective_good += effective * (one.judged.share or 0.0)
    confidence = 1 - (1 - slo.confidence) / (1 + len(failed_tries))
    lower_bound, _ = wilson(effective_good, effective_due, confidence)
    at_or_below = [one.judged for one in loaded if one.rate <= rate]
    good = sum(judged.good for judged in at_or_below)
    due = sum(judged.due for judged in at_or_below)
    return good / due >= slo.target and lower_bound >= slo.target
