"""Decides what to measure next in one cell, from the levels that are recorded. Pure.

    measurement = next_measurement(progress)

    single streams -> calibration -> a level at 0.8 of the estimated capacity, which confirms it ->
    one more level where that one did not confirm a rate near the estimate

If single requests miss the SLO by the step-time model, those that decide are sent alone before that
is said (unloaded_check.py).

If the calibration shows that another number of slots gives a higher capacity, the server is started
again with it and calibrated again.

Where no step-time model fits, levels alone find the capacity: the rate doubles while levels meet
the SLO and halves while they miss it. Then come rates in the middle, until the highest rate that
met the SLO and the lowest that missed it are within a factor of NARROW, and a long level confirms
the lower one. If the time that is left does not pay for such levels, shorter ones bound the
capacity: they confirm no rate, but they show one that met the SLO and one that missed it.

A level that missed the SLO while other processes took CPU time is repeated once. If it misses it
again, a lower rate is next.

The decision depends on no clock and no file, so a campaign that was killed makes the same decision
again from its journal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from crossover.loadtests.campaign.campaign_file import Search
from crossover.loadtests.capacity.capacity_estimate import (
    CONFIRMING_SHARE,
    EXPECTED_ATTAINMENT_MARGIN,
    LEVELS_DESIGN_EFFECT,
    confirming_seconds,
    judgment_of,
    shortest_bounding_level,
    shortest_level,
)
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.levels.slo_attainment import MIN_DESIGN_EFFECT
from crossover.loadtests.records.journal_events import Capacity, SlotsChosen
from crossover.loadtests.records.level_plan import Burst, LevelPlan
from crossover.models import formatting
from crossover.serving.capacity.slo import Slo, Verdict, requests_to_hold
from crossover.serving.workload.conversations import session_seconds
from crossover.serving.workload.request_lengths import Workload

# An estimate more than this factor above the confirmed rate is worth one more level.
NEAR_FACTOR = 1.4
MAX_LEVELS = 2  # on one server start: a level at 0.8 of the estimate, and one more
MAX_TRIES = 4  # levels while no rate is confirmed
MAX_SINGLE_STREAM_LEVELS = 4  # a few slow requests alone do not prove that the SLO is missed
MIN_TRY_SHARE = 0.5  # of the estimate: levels at lower rates do not count as tries
MAX_DISTURBED = (
    2  # levels at one rate that missed the SLO while disturbed: the first and its repeat
)
CALIBRATION_SECONDS, MIN_CALIBRATION_SECONDS = 30.0, 5.0
LEAST_CALIBRATION_STEPS = 100  # decode steps of the shortest bursts
MIN_WARMUP_SECONDS, MAX_WARMUP_SECONDS = 5.0, 20.0
MAX_SESSION_WARMUP_SECONDS = 300.0  # for conversations
NARROW = 1.25  # factor between the highest rate that met the SLO and the lowest that missed it
MIN_RATE_SHARE = 1 / 50  # of the first rate: lower rates are not tried
RETRY_SHARE = 0.85  # of a rate that was not confirmed: the next rate is at most this
# A level just long enough for a verdict gets this much more time, since arrivals are random.
VERDICT_MARGIN = 1.05


class Calibrate(NamedTuple):
    """Send bursts within `seconds`, and fit the step-time model to them."""

    seconds: float


class RestartServer(NamedTuple):
    """Restart the server, to see whether another start gives the same result."""

    reason: str


class StopMeasuring(NamedTuple):
    """Measure nothing more in this block."""

    reason: str


Measurement = LevelPlan | Calibrate | RestartServer | StopMeasuring


@dataclass(frozen=True, kw_only=True)
class CellProgress:
    """What is recorded about a cell in one block, as far as the next measurement depends on it."""

    slo: Slo
    workload: Workload
    search: Search
    levels: Sequence[Level]  # finished and not set aside; no bursts
    set_aside: Sequence[Level] = ()  # at a rate: they missed the SLO while they were disturbed
    capacity: Capacity  # by these levels and the calibration
    is_calibrated: bool  # a calibration is recorded, even if no step-time model fits
    burst_rate: float | None  # requests/s that bursts suggest; None: no burst, or not needed
    server_start: int | None  # number of the present start, from 1; None: it cannot be restarted
    block: int  # from 1
    left_seconds: float  # of the measuring time that this block pays for
    min_level_seconds: float  # of the shortest level that confirms a rate
    max_single_stream_seconds: float
    confirms: bool  # False: this cell is only estimated
    slots_choice: SlotsChosen | None = None  # by its first calibration; None: its slots stay
    unit_rate: float | None = None  # the rate in whose unit rates are written
    needs_restart: bool = False  # the server still runs with the slots of before that choice
    # Requests that miss the SLO unloaded by the step-time model, to be sent alone. None: there is
    # no such model, they were sent already, or they are turns of conversations.
    to_check: Burst | None = None

    @cached_property
    def single_streams(self) -> list[Level]:
        return [level for level in self.levels if level.is_single_stream]

    @cached_property
    def loaded(self) -> list[Level]:
        """The levels at a rate, in the order in which they were measured."""
        return [level for level in self.levels if level.rate is not None]

    @cached_property
    def disturbed_rates(self) -> list[float]:
        """The rates at which a level and its repetition were set aside, in the order of measuring,
        one for each such pair. They are not tried again, unless the campaign lists one twice."""
        counts = Counter(level.rate or 0.0 for level in self.set_aside)
        return [rate for rate, count in counts.items() for _ in range(count // MAX_DISTURBED)]

    @cached_property
    def answer_seconds(self) -> float | None:
        """Mean E2E of a single-stream request; None: none was answered."""
        means = [level.mean(level.e2e) for level in self.single_streams]
        known = [seconds for seconds in means if seconds is not None]
        return sum(known) / len(known) if known else None

    @cached_property
    def warmup_seconds(self) -> float:
        """Duration of a level's warm-up.

        It is the time of two single-stream answers, in which the slots of an idle server fill. With
        conversations it is as long as a conversation, so that late turns are as frequent as they
        will remain.
        """
        answer_seconds = self.answer_seconds or 0.0
        filling = min(max(MIN_WARMUP_SECONDS, 2 * answer_seconds), MAX_WARMUP_SECONDS)
        conversation = session_seconds(self.workload, answer_seconds)
        return round(max(filling, min(conversation, MAX_SESSION_WARMUP_SECONDS)), 1)

    @property
    def affordable_seconds(self) -> float:
        """Longest window that the time left pays for, besides its warm-up and the last answers."""
        return self.left_seconds - self.warmup_seconds - 2 * (self.answer_seconds or 0.0)

    @property
    def has_latency_limit(self) -> bool:
        """Whether the SLO limits a latency. Otherwise step times do not tell whether it is met."""
        return bool(self.slo.limits)

    def verdict(self, level: Level) -> Verdict:
        return judgment_of(level, self.slo).verdict

    def rates_with(self, verdict: Verdict) -> list[float]:
        """Return the rates of the levels with this verdict, requests/s."""
        return [level.rate or 0.0 for level in self.loaded if self.verdict(level) == verdict]


class TriedRate(NamedTuple):
    """A rate at which a level ran, and what the level suggests about the capacity."""

    rate: float  # requests/s
    seems_met: bool  # the capacity seems to be above this rate


def next_measurement(progress: CellProgress) -> Measurement:
    """Return what to measure next, or why nothing more is measured."""
    search, capacity = progress.search, progress.capacity
    single_stream_seconds = progress.max_single_stream_seconds
    if progress.single_streams:  # further ones take no more than the time that is left
        left_seconds = max(1.0, round(progress.left_seconds, 1))
        single_stream_seconds = min(single_stream_seconds, left_seconds)
    single_stream = LevelPlan(
        concurrency=1,
        requests=search.single_stream_requests,
        window_seconds=single_stream_seconds,
    )
    if not progress.single_streams:
        return single_stream
    if progress.needs_restart and progress.slots_choice is not None:
        return RestartServer(slots_words(progress.slots_choice, progress.unit_rate))
    if search.rates:
        return _given_rate(progress)
    if capacity.state == "misses_slo_unloaded":
        return _verify_unloaded(progress, single_stream)
    misses_unloaded = progress.verdict(progress.single_streams[-1]) == "misses"
    count = len(progress.single_streams)
    if misses_unloaded and progress.left_seconds > 0 and count < MAX_SINGLE_STREAM_LEVELS:
        return single_stream
    if progress.has_latency_limit and not progress.is_calibrated:
        seconds = min(CALIBRATION_SECONDS, progress.left_seconds)
        if progress.slots_choice is not None:  # the calibration of before no longer holds
            seconds = max(seconds, MIN_CALIBRATION_SECONDS)
        if seconds >= MIN_CALIBRATION_SECONDS:
            return Calibrate(seconds)
    if capacity.is_none and progress.left_seconds > 0:
        # What the model says is missed is sent before it is called missed.
        if progress.to_check is not None:
            return LevelPlan(
                concurrency=1,
                burst=progress.to_check,
                requests=progress.to_check.streams,
                window_seconds=round(progress.left_seconds, 1),
            )
        if progress.workload.has_sessions and count < MAX_SINGLE_STREAM_LEVELS:
            return single_stream
    if not progress.confirms:
        return StopMeasuring("this configuration is only estimated")
    if misses_unloaded:
        return StopMeasuring("single-stream requests miss the SLO, in too few requests to be sure")
    if capacity.is_none and capacity.checked:
        return StopMeasuring("single requests miss the SLO, as the step-time model says")
    if capacity.method == "step_times" and progress.has_latency_limit:
        return _confirm_estimate(progress)
    return _search_by_levels(progress)


def slots_words(choice: SlotsChosen, unit_rate: float | None) -> str:
    """Return why the server is started again with another number of slots."""
    unit_rate = unit_rate or choice.previous_rate or choice.rate
    rate = formatting.requests(choice.rate, like=unit_rate)
    previous_words = (
        f"in place of {formatting.rate(choice.previous_rate, like=unit_rate)}"
        if choice.previous_rate
        else "where it would miss the SLO"
    )
    return (
        f"by the step times it carries {rate} with {choice.slots} slots, {previous_words} with "
        f"{choice.previous_slots}; restarting the server with {choice.slots}"
    )


def _given_rate(progress: CellProgress) -> LevelPlan | StopMeasuring:
    """Return a level at the next of the rates that the campaign lists."""
    rates = progress.search.rates
    measured = len(progress.loaded) + len(progress.disturbed_rates)
    if measured >= len(rates):
        return StopMeasuring("all rates of the campaign are measured")
    return _open_loop(progress, rates[measured], progress.min_level_seconds)


def _verify_unloaded(
    progress: CellProgress, single_stream: LevelPlan
) -> LevelPlan | Calibrate | RestartServer | StopMeasuring:
    """Return what verifies that the SLO is missed unloaded: a second start of the server, or a
    second level if it cannot be restarted. A calibration, by which it can be said with which SLO
    there would be a capacity, comes after the second start, or before the second level."""
    start = progress.server_start
    if start is None:
        if (calibrate := _calibrate_for_advice(progress)) is not None:
            return calibrate
        if len(progress.single_streams) < 2 and progress.left_seconds > 0:
            return single_stream
        return StopMeasuring("the SLO is missed even without load")
    if progress.capacity.starts >= 2:
        return _calibrate_for_advice(progress) or StopMeasuring(
            "the SLO is missed even without load, on two starts"
        )
    if all(level.started.start != start for level in progress.single_streams):
        return single_stream
    if progress.left_seconds <= 0:
        return StopMeasuring("the SLO is missed even without load; no time is left to verify it")
    return RestartServer("the SLO is missed even without load; restarting the server to verify")


def _calibrate_for_advice(progress: CellProgress) -> Calibrate | None:
    """Return a calibration if there is time for it; None: there is not, or it has been done."""
    if progress.is_calibrated or not progress.has_latency_limit:
        return None
    tpot = [level.mean(level.tpot) or 0.0 for level in progress.single_streams]
    least_seconds = max(MIN_CALIBRATION_SECONDS, LEAST_CALIBRATION_STEPS * max(tpot))
    if progress.left_seconds < least_seconds:
        return None
    return Calibrate(min(CALIBRATION_SECONDS, progress.left_seconds))


def _confirm_estimate(progress: CellProgress) -> LevelPlan | StopMeasuring:
    """Return a level at 0.8 of the estimate, and then one more if that one did not meet the SLO or
    if the estimate is far above it.

    While no rate is confirmed, more levels follow, each at a lower rate, if the time left is enough
    for a verdict there.
    """
    capacity, loaded, start = progress.capacity, progress.loaded, progress.server_start
    estimate = capacity.estimated_rate
    if not estimate:  # the single requests contradict the model
        return _search_by_levels(progress)
    # The nominal rate, as the estimate is one; a little less may have been offered.
    highest_met = max(progress.rates_with("meets"), default=0.0)
    needed_starts = min(progress.block, progress.search.starts)
    # Of the machine as busy as it is: a level at a higher rate would miss the SLO.
    reachable = estimate if capacity.busy_rate is None else min(estimate, capacity.busy_rate)
    is_near = bool(capacity.confirmed_rate) and reachable <= NEAR_FACTOR * highest_met
    if is_near and capacity.starts >= needed_starts:
        return StopMeasuring("the confirmed rate is near the estimated capacity")
    on_this_start = [level for level in loaded if start in (None, level.started.start)]
    min_rate = MIN_TRY_SHARE * reachable
    tried_rates = [level.rate or 0.0 for level in on_this_start] + progress.disturbed_rates
    tries = sum(rate >= min_rate for rate in tried_rates)
    if tries >= (MAX_LEVELS if capacity.confirmed_rate else MAX_TRIES):
        return StopMeasuring(f"{tries} levels near the estimated capacity are enough on one start")
    if is_near and needed_starts > 1:  # this start must confirm the same rate
        return _confirming_level(progress, highest_met)
    missed_rates = progress.rates_with("misses")
    rate = CONFIRMING_SHARE * min([reachable, *missed_rates])
    verdict_rate = _min_rate_for_verdict(progress)
    if rate < verdict_rate:
        # The level would have no verdict. At a higher rate it may have one.
        rate = max(rate, min(verdict_rate, CONFIRMING_SHARE * min([estimate, *missed_rates])))
    # A level that was set aside once is repeated, though its step times have moved the estimate.
    decided_rates = {*progress.disturbed_rates, *(level.rate for level in loaded)}
    for level in progress.set_aside:
        if level.rate and level.rate not in decided_rates:
            return _confirming_level(progress, level.rate)
    last_rates = [level.rate or 0.0 for level in loaded[-1:]] + progress.disturbed_rates
    if last_rates and not capacity.confirmed_rate:
        rate = min(rate, RETRY_SHARE * min(last_rates))
        if _rounded(rate) < verdict_rate:  # a level that cannot confirm a rate did run already
            return _too_little_time(progress)
    return _confirming_level(progress, rate)


def _search_by_levels(progress: CellProgress) -> LevelPlan | StopMeasuring:
    """Return the level that narrows the bounds of the capacity, and once they are close, the one
    that confirms the lower bound. Used if no step-time model fits."""
    first_rate = progress.capacity.estimated_rate or _single_stream_rate(progress)
    tried = _tried_rates(progress)
    rate = None if first_rate is None else next_rate(tried, first_rate)
    if rate is None:
        return StopMeasuring("no rate is left to try")
    repeats = sum(level.rate == rate for level in progress.loaded)
    if repeats and not progress.rates_with("misses"):
        # Some level seemed to miss the SLO, but none has proved an upper bound of the capacity.
        _, lowest_missed = _bounds(tried)
        rate = NARROW * lowest_missed
    elif repeats > MAX_LEVELS or (repeats and progress.capacity.is_confirmed):
        return StopMeasuring("the capacity is bounded closely enough")
    level = _confirming_level(progress, rate, is_search=True)
    return _bounding_level(progress) if isinstance(level, StopMeasuring) else level


def _single_stream_rate(progress: CellProgress) -> float | None:
    """Return the requests/s of one client that sends the next request after each answer."""
    return 1 / progress.answer_seconds if progress.answer_seconds else None


def _tried_rates(progress: CellProgress) -> list[TriedRate]:
    """Return the rate of each level. Where a level was too short for a verdict, its SLO attainment
    tells on which side of the capacity its rate seems to be."""
    tried = []
    for level in progress.loaded:
        judged = judgment_of(level, progress.slo)
        seems_met = judged.verdict == "meets"
        if judged.verdict == "unresolved" and judged.steady is not False:
            seems_met = (judged.share or 0.0) >= progress.slo.target
        tried.append(TriedRate(level.rate or 0.0, seems_met))
    return tried + [TriedRate(rate, False) for rate in progress.disturbed_rates]


def _bounds(tried: Sequence[TriedRate]) -> tuple[float, float]:
    """Return the highest rate that seems to be below the capacity (0.0: none) and the lowest that
    seems to be above it (inf: none)."""
    missed = min((one.rate for one in tried if not one.seems_met), default=math.inf)
    met = max((one.rate for one in tried if one.seems_met and one.rate < missed), default=0.0)
    return met, missed


def _confirming_level(
    progress: CellProgress, rate: float, *, is_search: bool = False
) -> LevelPlan | StopMeasuring:
    """Return a level that is long enough to confirm the rate, or as long as the time left allows.

    `is_search`: there is no step-time model. Then it takes more requests to confirm a rate, and a
    level that could not confirm it even if all its requests met the SLO is not run.
    """
    rate, slo, answer_seconds = _rounded(rate), progress.slo, progress.answer_seconds
    affordable, min_seconds = progress.affordable_seconds, progress.min_level_seconds
    if is_search:
        min_requests = LEVELS_DESIGN_EFFECT * requests_to_hold(slo)
        min_seconds = max(shortest_level(slo, answer_seconds, min_seconds), min_requests / rate)
    if affordable < min_seconds:
        return _too_little_time(progress)
    seconds = confirming_seconds(
        slo,
        rate,
        answer_seconds,
        by_levels=is_search,
        min_level_seconds=progress.min_level_seconds,
    )
    return _open_loop(progress, rate, round(min(seconds, affordable), 1))


def _bounding_level(progress: CellProgress) -> LevelPlan | StopMeasuring:
    """Return a level that is too short to confirm a rate, but long enough to bound the capacity.

    It takes at most half of the time left if that is enough for a verdict, so that a second level
    can bound the other side. A rate that is too low for a verdict within the time left is raised.
    """
    capacity, affordable = progress.capacity, progress.affordable_seconds
    if capacity.is_confirmed and capacity.high is not None:
        return _too_little_time(progress)
    tried, min_seconds = _tried_rates(progress), shortest_bounding_level(progress.slo)
    rate = _bounding_rate(progress, tried)
    if rate is None or affordable < min_seconds:
        return _too_little_time(progress)
    rate = _rounded(max(rate, _min_rate_for_verdict(progress)))
    met, missed = _bounds(tried)
    if not met < rate < missed:
        return _too_little_time(progress)
    min_requests = _min_requests_for_verdict(progress)
    min_seconds = max(min_seconds, VERDICT_MARGIN * min_requests / rate)
    # With this many requests some may miss the SLO; confirming_seconds has the formula.
    enough_seconds = min_requests / EXPECTED_ATTAINMENT_MARGIN**2 / rate
    seconds = min(affordable, max(min_seconds, min(enough_seconds, affordable / 2)))
    return _open_loop(progress, rate, round(seconds, 1))


def _min_requests_for_verdict(progress: CellProgress) -> float:
    """Return how many requests give the verdict "meets" if all of them meet the SLO."""
    return MIN_DESIGN_EFFECT * requests_to_hold(progress.slo)


def _min_rate_for_verdict(progress: CellProgress) -> float:
    """Return the lowest rate, requests/s, at which the time left gives enough requests for a
    verdict; inf: no time is left."""
    seconds = progress.affordable_seconds
    return (
        VERDICT_MARGIN * _min_requests_for_verdict(progress) / seconds if seconds > 0 else math.inf
    )


def _bounding_rate(progress: CellProgress, tried: Sequence[TriedRate]) -> float | None:
    """Return the rate of the next level that bounds the capacity; None: no request was answered, or
    no rate is left to try.

    First comes a rate just above what the bursts suggest, then the rate of a single stream, then
    rates between the two: a level far from the capacity has a verdict sooner than one near it.
    """
    lowest = _single_stream_rate(progress)
    if lowest is None:
        return None
    highest = max(lowest, NARROW * (progress.burst_rate or 0.0))
    met, missed = _bounds(tried)
    if missed == math.inf and highest > NARROW * met:  # not already tried, to within NARROW
        return highest
    if not met and missed > NARROW * lowest:  # not already tried, to within NARROW
        return lowest
    return next_rate(tried, lowest)


def _open_loop(progress: CellProgress, rate: float, window_seconds: float) -> LevelPlan:
    return LevelPlan(
        rate=rate, warmup_seconds=progress.warmup_seconds, window_seconds=window_seconds
    )


def _too_little_time(progress: CellProgress) -> StopMeasuring:
    left = formatting.duration(max(0.0, progress.left_seconds))
    return StopMeasuring(f"the {left} left are too short for another level")


def _rounded(rate: float) -> float:
    """Return the rate with three significant digits."""
    return float(f"{rate:.3g}")


def next_rate(tried: Sequence[TriedRate], first_rate: float) -> float | None:
    """Return the rate to try next, in requests/s; None: no rate is left to try.

    This is a bisection on a logarithmic scale, which begins at `first_rate`. Once the bounds of the
    capacity are within a factor of NARROW, the lower bound is tried again, to confirm it.
    """
    if not tried:
        return first_rate
    met, missed = _bounds(tried)
    if missed == math.inf:
        return 2 * met
    if not met:
        return missed / 2 if missed / 2 >= MIN_RATE_SHARE * first_rate else None
    is_narrow = missed / met <= NARROW * 1.001  # rates are rounded to three digits
    return met if is_narrow else math.sqrt(met * missed)
