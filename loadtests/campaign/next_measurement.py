"""Decides what to measure next in one cell, from what is on record of it. Pure.

    measurement = next_measurement(progress)

    single streams -> calibration -> a level at 0.8 of the estimated capacity, which confirms it ->
    one more level where that one did not confirm a rate near the estimate

Where no step-time model fits, levels alone find the capacity: the rate doubles while levels meet
the SLO and halves while they miss it. Then come rates in the middle, until the highest rate that
met the SLO and the lowest that missed it are within a factor of NARROW, and a long level confirms
the lower one. If the time that is left does not pay for such levels, shorter ones bound the
capacity: they confirm no rate, but they show one that met the SLO and one that missed it.

The decision reads no clock and no file, so a campaign that was killed decides the same again from
its journal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from crossover.loadtests.campaign.campaign_file import Search
from crossover.loadtests.capacity.capacity_estimate import (
    AS_ONE_BY_LEVELS,
    CONFIRMING_SHARE,
    confirming_seconds,
    shortest_bounding_level,
    shortest_level,
)
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.levels.slo_attainment import MIN_DESIGN_EFFECT
from crossover.loadtests.records.journal_events import Capacity
from crossover.models import formatting
from crossover.serving.capacity.slo import LIMITS, Slo, Verdict, requests_to_hold
from crossover.serving.workload.conversations import session_seconds
from crossover.serving.workload.request_lengths import Workload

ENOUGH = 1.4  # an estimate further above the confirmed rate than this is worth one more level
MAX_LEVELS = 2  # on one server start: a level at 0.8 of the estimate, and one more
MAX_TRIES = 4  # levels while no rate is confirmed
MAX_SINGLE_STREAM_LEVELS = 4  # a few slow requests alone do not prove that the SLO is missed
MIN_TRY_SHARE = 0.5  # of the estimate: levels at lower rates do not count as tries
CALIBRATION_SECONDS, MIN_CALIBRATION_SECONDS = 30.0, 5.0
MIN_WARMUP_SECONDS, MAX_WARMUP_SECONDS = 5.0, 20.0
MAX_SESSION_SECONDS = 300.0  # of warm-up, for conversations
NARROW = 1.25  # between the highest rate that met the SLO and the lowest that missed it
LOWEST = 1 / 50  # of the first rate that is tried: below it requests hardly ever meet
LOWER = 0.85  # of a rate that was not confirmed: the next level is at most there


class SingleStream(NamedTuple):
    """Requests one at a time: at most so many, sent within so many seconds."""

    requests: int
    seconds: float


class Calibrate(NamedTuple):
    """Bursts within so many seconds, and the step-time model that is fitted to them."""

    seconds: float


class RunLevel(NamedTuple):
    """A load level at a rate."""

    rate: float  # requests/s
    seconds: float  # of its window, after the warm-up
    warmup_seconds: float


class RestartServer(NamedTuple):
    """A new start of the server, which must show the same."""

    reason: str


class Stop(NamedTuple):
    """Nothing more is measured in this block."""

    reason: str


Measurement = SingleStream | Calibrate | RunLevel | RestartServer | Stop


@dataclass(frozen=True, kw_only=True)
class CellProgress:
    """What is on record of a cell in one block, as far as the next measurement depends on it."""

    slo: Slo
    workload: Workload
    search: Search
    levels: Sequence[Level]  # finished and not set aside; no bursts
    capacity: Capacity  # what these levels and the calibration say
    is_calibrated: bool  # with a step-time model or without one
    burst_rate: float | None  # requests/s that bursts suggest; None: no burst, or not needed
    server_start: int | None  # number of the present start, from 1; None: it cannot be restarted
    block: int  # from 1
    left_seconds: float  # of the measuring time that this block pays for
    min_level_seconds: float  # of the shortest level that confirms a rate
    max_single_stream_seconds: float
    confirms: bool  # False: this cell is only estimated

    @cached_property
    def single_streams(self) -> list[Level]:
        return [level for level in self.levels if level.is_single_stream]

    @cached_property
    def loaded(self) -> list[Level]:
        """The levels at a rate."""
        return [level for level in self.levels if level.rate is not None]

    @cached_property
    def answer_seconds(self) -> float | None:
        """Mean E2E of a single-stream request; None: none was answered."""
        means = [
            seconds
            for level in self.single_streams
            if (seconds := level.mean(level.e2e)) is not None
        ]
        return sum(means) / len(means) if means else None

    @cached_property
    def warmup_seconds(self) -> float:
        """Two answers of an idle server, whose queue has to fill first; of conversations, until
        late turns come as often as first ones."""
        answer_seconds = self.answer_seconds or 0.0
        filling = min(max(MIN_WARMUP_SECONDS, 2 * answer_seconds), MAX_WARMUP_SECONDS)
        talking = min(session_seconds(self.workload, answer_seconds), MAX_SESSION_SECONDS)
        return round(max(filling, talking), 1)

    @property
    def affordable_seconds(self) -> float:
        """Longest window that the time left pays for, with its warm-up and the last answers."""
        return self.left_seconds - self.warmup_seconds - 2 * (self.answer_seconds or 0.0)

    @property
    def has_latency_limit(self) -> bool:
        """Without one a step-time model tells nothing about the SLO."""
        return any(getattr(self.slo, name) is not None for name in LIMITS.values())

    def verdict(self, level: Level) -> Verdict:
        return level.judge(self.slo).verdict

    def rates(self, verdict: Verdict) -> list[float]:
        """Rates of the levels with this verdict, requests/s."""
        return [level.rate or 0.0 for level in self.loaded if self.verdict(level) == verdict]


def next_measurement(progress: CellProgress) -> Measurement:
    """Return what to measure next, or why nothing more is measured."""
    search, capacity = progress.search, progress.capacity
    single_stream = SingleStream(search.single_stream_requests, progress.max_single_stream_seconds)
    if not progress.single_streams:
        return single_stream
    if search.rates:
        return _given_rate(progress)
    if capacity.state == "misses_slo_unloaded":
        return _verify_unloaded(progress, single_stream)
    misses_unloaded = progress.verdict(progress.single_streams[-1]) == "misses"
    count = len(progress.single_streams)
    if misses_unloaded and progress.left_seconds > 0 and count < MAX_SINGLE_STREAM_LEVELS:
        return single_stream
    seconds = min(CALIBRATION_SECONDS, progress.left_seconds)
    is_due = progress.has_latency_limit and not progress.is_calibrated
    if is_due and seconds >= MIN_CALIBRATION_SECONDS:
        return Calibrate(seconds)
    if not progress.confirms:
        return Stop("this configuration is only estimated")
    if misses_unloaded:
        return Stop("single-stream requests miss the SLO, in too few requests to be sure")
    if capacity.method == "step_times" and progress.has_latency_limit:
        return _confirm_estimate(progress)
    return _search_by_levels(progress)


def _given_rate(progress: CellProgress) -> RunLevel | Stop:
    """The next of the rates that the campaign lists."""
    rates, measured = progress.search.rates, len(progress.loaded)
    if measured >= len(rates):
        return Stop("all rates of the campaign are measured")
    return RunLevel(rates[measured], progress.min_level_seconds, progress.warmup_seconds)


def _verify_unloaded(
    progress: CellProgress, single_stream: SingleStream
) -> SingleStream | RestartServer | Stop:
    """A second start must miss the SLO unloaded too; a server that cannot be restarted must do so
    in a second level."""
    start = progress.server_start
    if start is None:
        if len(progress.single_streams) < 2 and progress.left_seconds > 0:
            return single_stream
        return Stop("the SLO is missed even without load")
    if progress.capacity.starts >= 2:
        return Stop("the SLO is missed even without load, on two starts")
    if all(level.started.start != start for level in progress.single_streams):
        return single_stream
    return RestartServer("the SLO is missed even without load; restarting the server to verify")


def _confirm_estimate(progress: CellProgress) -> RunLevel | Stop:
    """A level at 0.8 of the estimate, and one more where it did not meet the SLO or where the
    estimate is far above it. While no rate is confirmed more follow, each at a lower rate."""
    capacity, loaded, start = progress.capacity, progress.loaded, progress.server_start
    estimate = capacity.estimated_rate
    if not estimate:
        return Stop("by the step-time model no rate meets the SLO")
    # As offered: a little less may have been achieved.
    highest_met = max(progress.rates("meets"), default=0.0)
    block = min(progress.block, progress.search.starts)
    is_near = bool(capacity.confirmed_rate) and estimate <= ENOUGH * highest_met
    if is_near and capacity.starts >= block:
        return Stop("the confirmed rate is near the estimated capacity")
    tries = [
        level
        for level in loaded
        if start in (None, level.started.start) and (level.rate or 0.0) >= MIN_TRY_SHARE * estimate
    ]
    if len(tries) >= (MAX_LEVELS if capacity.confirmed_rate else MAX_TRIES):
        return Stop(f"{len(tries)} levels near the estimated capacity are enough on one start")
    if block > 1 and is_near:
        return _confirming_level(progress, highest_met)
    rate = CONFIRMING_SHARE * min([estimate, *progress.rates("misses")])
    if loaded and not capacity.confirmed_rate:
        rate = min(rate, LOWER * (loaded[-1].rate or 0.0))
    return _confirming_level(progress, rate)


def _search_by_levels(progress: CellProgress) -> RunLevel | Stop:
    """Without a step-time model: the rate that narrows the bounds, then the level that confirms the
    lower one."""
    start = progress.capacity.estimated_rate or _single_stream_rate(progress)
    outcomes = _outcomes(progress)
    _, lowest_missed = _bounds(outcomes)
    rate = None if start is None else next_rate(outcomes, start)
    if rate is None:
        return Stop("no rate is left to try")
    repeats = sum(level.rate == rate for level in progress.loaded)
    if repeats and not progress.rates("misses"):
        # What seemed to miss the SLO proves no upper bound yet.
        rate = NARROW * lowest_missed
    elif repeats > MAX_LEVELS or (repeats and progress.capacity.is_confirmed):
        return Stop("the capacity is bounded closely enough")
    level = _confirming_level(progress, rate, is_search=True)
    return _bounding_level(progress) if isinstance(level, Stop) else level


def _single_stream_rate(progress: CellProgress) -> float | None:
    """Requests/s of one client that sends the next request after each answer."""
    return 1 / progress.answer_seconds if progress.answer_seconds else None


def _outcomes(progress: CellProgress) -> list[tuple[float, bool]]:
    """Each level's rate, and whether the capacity seems to be above it."""
    outcomes = []
    for level in progress.loaded:
        judged = level.judge(progress.slo)
        is_open = judged.verdict == "unresolved" and judged.steady is not False
        seems_met = is_open and (judged.share or 0.0) >= progress.slo.target
        outcomes.append((level.rate or 0.0, judged.verdict == "meets" or seems_met))
    return outcomes


def _bounds(outcomes: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """The highest rate below the capacity (0.0: none), and the lowest above it (inf: none)."""
    missed = min((rate for rate, is_below in outcomes if not is_below), default=math.inf)
    met = max((rate for rate, is_below in outcomes if is_below and rate < missed), default=0.0)
    return met, missed


def _confirming_level(
    progress: CellProgress, rate: float, *, is_search: bool = False
) -> RunLevel | Stop:
    """A level as long as proof takes, as far as the time left pays for it.

    `is_search`: there is no step-time model, so it takes more requests to prove a rate; a level
    that is too short to prove it, even if all its requests meet the SLO, is not run.
    """
    rate, slo, answer_seconds = _rounded(rate), progress.slo, progress.answer_seconds
    affordable, needed = progress.affordable_seconds, progress.min_level_seconds
    if is_search:
        requests = AS_ONE_BY_LEVELS * requests_to_hold(slo)
        needed = max(shortest_level(slo, answer_seconds, needed), requests / rate)
    if affordable < needed:
        return _too_little_time(progress)
    wanted = confirming_seconds(
        slo,
        rate,
        answer_seconds,
        by_levels=is_search,
        least_seconds=progress.min_level_seconds,
    )
    return RunLevel(rate, round(min(wanted, affordable), 1), progress.warmup_seconds)


def _bounding_level(progress: CellProgress) -> RunLevel | Stop:
    """A level that is too short to confirm a rate, and long enough to bound the capacity.

    Each takes at most half of the time left, where that is enough for a verdict; a rate that is too
    low for a verdict in all of the time left is raised.
    """
    capacity, affordable = progress.capacity, progress.affordable_seconds
    if capacity.is_confirmed and capacity.high is not None:
        return _too_little_time(progress)
    outcomes, shortest = _outcomes(progress), shortest_bounding_level(progress.slo)
    rate = _bounding_rate(progress, outcomes)
    if rate is None or affordable < shortest:
        return _too_little_time(progress)
    requests = MIN_DESIGN_EFFECT * requests_to_hold(progress.slo)  # all of which would meet the SLO
    rate = _rounded(max(rate, 1.05 * requests / affordable))
    met, missed = _bounds(outcomes)
    if not met < rate < missed:
        return _too_little_time(progress)
    shortest = max(shortest, 1.05 * requests / rate)
    # With so many requests some may miss the SLO, as in confirming_seconds.
    wanted = requests / 0.75**2 / rate
    seconds = min(affordable, max(shortest, min(wanted, affordable / 2)))
    return RunLevel(rate, round(seconds, 1), progress.warmup_seconds)


def _bounding_rate(progress: CellProgress, outcomes: list[tuple[float, bool]]) -> float | None:
    """Just above what the bursts suggest, then what one client reaches, then the middle.

    A level far from the capacity has a verdict sooner than one near it. None: nothing is known.
    """
    lowest = _single_stream_rate(progress)
    if lowest is None:
        return None
    highest = max(lowest, NARROW * (progress.burst_rate or 0.0))
    met, missed = _bounds(outcomes)
    if missed == math.inf and highest > NARROW * met:
        return highest
    if not met and missed > NARROW * lowest:
        return lowest
    return next_rate(outcomes, lowest)


def _too_little_time(progress: CellProgress) -> Stop:
    left = formatting.duration(max(0.0, progress.left_seconds))
    return Stop(f"the {left} left are too short for another level")


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def next_rate(outcomes: Sequence[tuple[float, bool]], start: float) -> float | None:
    """Return the requests/s to try after these; None: no rate is left to try.

    `outcomes`: each rate that was tried, and whether the capacity seems to be above it. Once both
    sides of the capacity are known and near enough, it is the lower one again. `start`: where to
    begin: the rate of a single stream, or what a rough step-time model says.
    """
    met, missed = _bounds(outcomes)
    if not outcomes:
        return start
    if missed == math.inf:
        return 2 * met
    if not met:
        return missed / 2 if missed / 2 >= LOWEST * start else None
    return met if missed / met <= NARROW * 1.001 else math.sqrt(met * missed)
