"""Measures one cell: single streams, bursts, a law, an estimate, and the level that confirms it.

    capacity = run_cell(state, open_bench, part, progress, clock)

    start -> single streams -> bursts -> law -> estimate Y -> a level at 0.8 Y -> its steps give one
    factor -> Y again -> held and Y not above 1.4 x the rate: done; else one more, at most

`next_step` is pure: from what is in the journal to what is to be measured next. A Bench measures
on a server that is ready. Everything needed to go on after a kill is in `state`, which is read from
the run folder. Where the law does not fit, rate_search.py says which rate is next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import msgspec

from loadtests.analysis import capacity_text
from loadtests.analysis.capacity_estimate import CONFIRMING_SHARE, confirming_seconds, estimate
from loadtests.analysis.disturbance import MOST_SLIGHT_SHARE, in_words, is_quiet, who_of
from loadtests.analysis.level import Level
from loadtests.campaign.level_runner import Bench, LevelAsk, OpenBench, level_text
from loadtests.campaign.progress import Progress
from loadtests.campaign.rate_search import NARROW, Tried, next_rate, sides
from loadtests.campaign.run_state import CellState, is_set_aside, seed_of
from loadtests.errors import LevelFailed, LevelInterrupted, ServerFailed, ServerLost
from loadtests.records.resource_sample import CoresSample
from loadtests.records.run_journal import (
    Calibrated,
    Capacity,
    CellStarted,
    Interrupted,
    LevelAbandoned,
    LevelPurpose,
    NeverQuiet,
    Waited,
)
from loadtests.simulation.batching_simulator import SchedulingPolicy
from loadtests.simulation.calibration_bursts import Burst, calibrate
from loadtests.simulation.simulated_capacity import measured_reuse
from loadtests.simulation.step_law import StepLaw
from loadtests.simulation.step_observation import level_factor
from models import formatting

ENOUGH = 1.4  # a limit that is higher above the confirmed rate is worth one more level
MOST_LEVELS = 2  # at a start, for one SLO: a level at 0.8 Y, and one more
MOST_ALONE = 4  # levels of single streams, where a few slow requests do not tell yet
NEAR = 0.5  # of the limit: lower levels do not count as tries
CALIBRATION_SECONDS = 30.0
LEAST_CALIBRATION_SECONDS = 5.0
LEAST_WARMUP_SECONDS, MOST_WARMUP_SECONDS = 5.0, 20.0
MOST_TRIES = 4  # levels while none has held
MORE = 1.2  # times the seconds that would just prove a rate: the share may turn out lower
LOWER = 0.85  # of a rate that did not hold: where the next level is put at the highest

MOST_ATTEMPTS = 5  # of one level in one sitting
MOST_SERVERS = 4  # of one cell in one sitting
LOOK_SECONDS = 1.0  # between two looks at the cores while waiting
QUIET_LOOKS = 2  # in a row
LEAST_WAIT_SECONDS = 1.0  # then twice as long each time: not all that disturbs can be seen
MOST_WAIT_SECONDS = 30.0  # until a level is tried again
BURST_TRIES = 2
PREFILL_TOKENS = 2048  # of a step, where the server does not say


class Calibrate(msgspec.Struct, frozen=True):
    """Bursts, within so many seconds; then the law."""

    seconds: float


class Restart(msgspec.Struct, frozen=True):
    """Start the server again, and ask again."""

    reason: str


Step = LevelAsk | Calibrate | Restart | None  # None: nothing is left to measure, or to pay for


@dataclass(frozen=True)
class Seen:
    """What is known of a cell when the next step is to be chosen; made anew for each step."""

    state: CellState
    part: CellStarted
    to_confirm: bool = True

    @cached_property
    def levels(self) -> list[Level]:
        """Those that count: single streams and loaded ones, in order."""
        return self.state.counted

    @cached_property
    def alone(self) -> list[Level]:
        return [level for level in self.levels if level.is_single_stream]

    @cached_property
    def loaded(self) -> list[Level]:
        return [level for level in self.levels if level.rate is not None]

    @cached_property
    def alone_seconds(self) -> float | None:
        """Mean time of a single-stream request; None where none ended."""
        known = [seconds for one in self.alone if (seconds := one.mean(one.e2e)) is not None]
        return sum(known) / len(known) if known else None

    @cached_property
    def capacity(self) -> Capacity:
        return capacity_of(self.state)

    @property
    def left_seconds(self) -> float:
        """Of the budget, in this block."""
        return (self.part.until_seconds or 0.0) - self.state.spent_seconds

    @property
    def start(self) -> int | None:
        """Of the server that serves now, from 1; None: it cannot be started again."""
        return None if self.state.cell.url is not None else self.state.starts

    def verdict(self, level: Level) -> str:
        return level.judge(self.state.campaign.slo).verdict


def next_step(seen: Seen) -> Step:
    """What to measure next, given all that is in the journal."""
    state, slo, search = seen.state, seen.state.campaign.slo, seen.state.campaign.search
    single = LevelAsk(
        requests=search.single_stream_requests, window_seconds=search.single_stream_seconds
    )
    asked = state.campaign.asked_levels(state.cell)
    if asked is not None:  # at given rates, or of a repeat: none is left out
        if len(seen.levels) >= len(asked):
            return None
        one = asked[len(seen.levels)]
        if one.rate is None:
            return msgspec.structs.replace(single, window_seconds=one.seconds)
        return LevelAsk(
            rate=one.rate, window_seconds=one.seconds, warmup_seconds=_warmup_seconds(seen)
        )
    if not seen.alone:
        return single
    found = seen.capacity
    fails_alone = seen.verdict(seen.alone[-1]) == "fails"
    if found.state == "not_even_alone":
        if found.starts >= 2:
            return None
        if seen.start is None or all(one.started.start != seen.start for one in seen.alone):
            return single
        return Restart("requests one at a time miss the SLO: a second start must say so too")
    if fails_alone and seen.left_seconds > 0 and len(seen.alone) < MOST_ALONE:
        return single  # too few to say so
    has_limit = slo.ttft_seconds is not None or slo.tpot_seconds is not None
    has_law = search.method == "law" and has_limit  # without a limit of latency it tells nothing
    if has_law and state.calibrated is None:
        seconds = min(CALIBRATION_SECONDS, seen.left_seconds)
        if seconds >= LEAST_CALIBRATION_SECONDS:
            return Calibrate(seconds)
    if not seen.to_confirm or fails_alone:
        return None
    if found.method == "law" and has_law:
        return _confirming(seen, found.limit) if found.limit else None
    return _searching(seen)


def _confirming(seen: Seen, limit: float) -> LevelAsk | None:
    """The level that confirms 0.8 of the estimate: one, and one more where that did not hold or the
    limit is far above it; more only while nothing holds, each lower, and the budget pays.
    """
    found, search = seen.capacity, seen.state.campaign.search
    held = [one.rate or 0.0 for one in seen.loaded if seen.verdict(one) == "holds"]
    asked = max(held, default=0.0)  # what came may be a little less
    block = min(seen.part.block, search.starts)
    is_near = bool(found.held) and limit <= ENOUGH * asked
    if is_near and found.starts >= block:
        return None
    here = [one for one in seen.loaded if seen.start is None or one.started.start == seen.start]
    tries = [one for one in here if (one.rate or 0.0) >= NEAR * limit]
    if len(tries) >= (MOST_LEVELS if found.held else MOST_TRIES):
        return None
    if block > 1 and is_near:
        return _level(seen, asked)
    rate = CONFIRMING_SHARE * limit
    failed = [one.rate or 0.0 for one in seen.loaded if seen.verdict(one) == "fails"]
    if failed:
        rate = min(rate, CONFIRMING_SHARE * min(failed))
    last = (seen.loaded[-1].rate or 0.0) if seen.loaded and not found.held else None
    if last is not None and last * LOWER < rate:
        # Levels at one rate count together: what nearly told is measured there again.
        more = _seconds_to_prove(seen, last)
        return _level(seen, LOWER * last) if more is None else _level(seen, last, more)
    return _level(seen, rate)


def _seconds_to_prove(seen: Seen, rate: float) -> float | None:
    """So many more, at the share of good requests seen there; None: a lower rate is quicker.

    Wilson's lower bound reaches p where n = z^2 p (1 - p) / (share - p)^2 (score test).
    """
    slo, least = seen.state.campaign.slo, seen.state.campaign.search.level_seconds
    told = [(one.window_seconds, one.judge(slo)) for one in seen.loaded if one.rate == rate]
    seconds, target = sum(window for window, _ in told), slo.target
    count = sum(one.effective for _, one in told)
    good = sum(one.effective * (one.share or 0.0) for _, one in told)
    bad = any(one.verdict == "fails" or one.steady is False for _, one in told)
    if bad or good <= target * count:
        return None
    z = NormalDist().inv_cdf(slo.confidence)
    needed = z * z * target * (1 - target) / (good / count - target) ** 2
    more = MORE * seconds * (needed / count - 1)
    usual = confirming_seconds(slo, rate, seen.alone_seconds, least_seconds=least)
    return max(more, least) if more <= 2 * usual else None


def _searching(seen: Seen) -> LevelAsk | None:
    """By levels alone: the rate that narrows, then the level that confirms the low side."""
    slo, tried = seen.state.campaign.slo, []
    for level in seen.loaded:
        told = level.judge(slo)
        is_open = told.verdict == "unresolved" and told.steady is not False
        is_up = told.verdict == "holds" or is_open and (told.share or 0.0) >= slo.target
        tried.append(Tried(level.rate or 0.0, is_up))
    start = seen.capacity.limit or (1.0 / seen.alone_seconds if seen.alone_seconds else None)
    if start is None:
        return None
    rate = next_rate(tried, start)
    low, high = sides(tried)
    has_failed = any(seen.verdict(one) == "fails" for one in seen.loaded)
    if rate is None and low is not None and high is not None and not has_failed:
        rate = NARROW * high  # what nearly held bounds nothing
    if rate is None:
        again = sum(level.rate == low for level in seen.loaded)
        if low is None or again > MOST_LEVELS or seen.capacity.holds:
            return None
        rate = low
    return _level(seen, rate, by_levels=True)


def _level(
    seen: Seen, rate: float, seconds: float | None = None, *, by_levels: bool = False
) -> LevelAsk | None:
    """A level as long as it takes to tell, as far as the budget pays; None where it does not."""
    slo, least = seen.state.campaign.slo, seen.state.campaign.search.level_seconds
    rate, warmup, alone = float(f"{rate:.3g}"), _warmup_seconds(seen), seen.alone_seconds
    affordable = seen.left_seconds - warmup - 2 * (alone or 0.0)
    if affordable < least:
        return None
    wanted = seconds or confirming_seconds(
        slo, rate, alone, by_levels=by_levels, least_seconds=least
    )
    return LevelAsk(
        rate=rate, window_seconds=round(min(wanted, affordable), 1), warmup_seconds=warmup
    )


def _warmup_seconds(seen: Seen) -> float:
    """Two answers of an idle server: its queue has to fill first."""
    answers = 2 * (seen.alone_seconds or 0.0)
    return round(min(max(LEAST_WARMUP_SECONDS, answers), MOST_WARMUP_SECONDS), 1)


# Doing it.


class PatienceUsedUp(Exception):
    """The machine was disturbed for as long as the campaign waits; the message says by whom."""


@dataclass
class _Sitting:
    """A cell's part of a block in one sitting, on one bench."""

    state: CellState
    part: CellStarted
    bench: Bench
    progress: Progress
    clock: Callable[[], float]
    to_confirm: bool

    @property
    def patience_seconds(self) -> float:
        """What is left of it for disturbed levels and waiting, besides the budget."""
        most = min(self.state.campaign.wait_seconds, self.part.budget_seconds or float("inf"))
        return most - self.state.lost_seconds


def run_cell(
    state: CellState,
    open_bench: OpenBench,
    part: CellStarted,
    progress: Progress,
    clock: Callable[[], float],
    *,
    to_confirm: bool = True,
) -> Capacity:
    """The capacity after all that this block pays for. A server that is lost is started again.

    Raises ServerFailed, LevelFailed, LoadError.
    """
    lost = 0
    for _ in range(MOST_SERVERS):
        try:
            with open_bench(state) as bench:
                again = _measure(_Sitting(state, part, bench, progress, clock, to_confirm))
                if again is None:
                    return capacity_of(state)
                progress.say(f"  {again.reason}")
        except ServerLost as problem:
            lost += 1
            state.event(Interrupted(cell=state.key, reason=str(problem)))
            progress.say(f"  {problem}", style="yellow")
            reason = f"lost {lost} servers; the last one: {problem}"
    if lost:
        raise ServerFailed(reason)
    return capacity_of(state)


def capacity_of(state: CellState) -> Capacity:
    """What all levels so far say: by the law, where calibration gave one that fits, else by levels
    alone.
    """
    made, campaign = state.calibrated, state.campaign
    law, policy = None, None
    if made is not None and made.law is not None and campaign.search.method == "law":
        law = msgspec.convert(made.law, StepLaw)
        policy = msgspec.convert(made.policy, SchedulingPolicy)
        for level in state.counted:
            if level.rate is not None and level.name not in state.factors:
                state.factors[level.name] = level_factor(law, level, policy)
    return estimate(
        state.counted,
        campaign.slo,
        law=law,
        policy=policy,
        workload=campaign.workload_of(state.cell),
        arrivals=campaign.arrivals,
        factors=state.factors,
        least_seconds=campaign.search.level_seconds,
    )


def _measure(run: _Sitting) -> Restart | None:
    """Steps until nothing is left to measure in this block; Restart: on a new server."""
    state, slo = run.state, run.state.campaign.slo
    while True:
        step = next_step(Seen(state, run.part, run.to_confirm))
        try:
            match step:
                case None | Restart():
                    return step
                case Calibrate():
                    _calibrate(run, step.seconds)
                case LevelAsk():
                    level = _level_that_counts(run, step)
                    run.progress.detail(f"  {level_text(level, slo)}")
                    if level.rate is not None and state.campaign.asked_levels(state.cell) is None:
                        words = capacity_text.in_words(capacity_of(state))
                        run.progress.found(state.key, words)
        except PatienceUsedUp as problem:
            state.event(NeverQuiet(cell=state.key, reason=str(problem), slos=[slo.name]))
            run.progress.say(f"  never quiet: {problem}; nothing more is measured", style="yellow")
            return None


def _calibrate(run: _Sitting, seconds: float) -> None:
    """Bursts, the law and the first estimate, on record. Bursts of the journal are not sent again.

    A burst that is disturbed is sent again once, then left out.
    """
    state, began, spent_before = run.state, run.clock(), run.state.spent_seconds
    before = [one for one in state.levels if one.started.purpose is LevelPurpose.CALIBRATION]
    number = 0

    def ask(burst: Burst) -> Level | None:
        nonlocal number
        number += 1
        if before:
            return before.pop(0)
        for _ in range(BURST_TRIES):
            run.progress.tick(f"{state.key}: calibrating, {burst.streams} at a time")
            asked = LevelAsk(burst=burst, window_seconds=CALIBRATION_SECONDS)
            level = _attempt(run, asked, f"burst.{number}")
            if level.finished is None or not is_set_aside(level.finished):
                return level
        return None

    run.progress.tick(f"{state.key}: calibrating for at most {formatting.duration(seconds)}")
    policy, workload = run.bench.policy, state.campaign.workload_of(state.cell)
    single = [one for one in state.counted if one.is_single_stream]
    slots = None if policy is None else policy.slots
    try:
        found = calibrate(ask, workload, slots, seconds, single)
    except LevelInterrupted as problem:
        state.event(Interrupted(cell=state.key, reason=f"calibration: {problem}"))
        run.bench.recover()
        return
    if policy is None and found.slots is not None:  # a server that does not say its settings
        policy = SchedulingPolicy(slots=found.slots, prefill_tokens=PREFILL_TOKENS)
    if policy is not None:
        reused = measured_reuse(workload, single)
        policy = msgspec.structs.replace(policy, reused_share=reused)
    # The bursts' own time is on record with each: here is what the rest took.
    spent = run.clock() - began - (state.spent_seconds - spent_before)
    made = Calibrated(
        cell=state.key,
        spent_seconds=round(max(0.0, spent), 3),
        law=None if found.law is None else msgspec.to_builtins(found.law),
        policy=None if policy is None else msgspec.to_builtins(policy),
        observations=[msgspec.to_builtins(one) for one in found.observations],
        slots=found.slots,
        start=state.starts or None,
        reason=found.reason,
    )
    state.calibrated = made  # the estimate asks for it
    limit = capacity_of(state)
    state.event(msgspec.structs.replace(made, limits={state.campaign.slo.name: limit}))
    words = f"no law, {found.reason}" if found.law is None else capacity_text.in_words(limit)
    run.progress.say(f"  calibrated in {formatting.duration(run.clock() - began)}: {words}")


def _level_that_counts(run: _Sitting, asked: LevelAsk) -> Level:
    """One level, measured again where it was interrupted or disturbed.

    Raises LevelFailed, PatienceUsedUp.
    """
    state, waits, interrupted = run.state, 0, 0
    while True:
        is_patient = run.patience_seconds > 0
        asked = msgspec.structs.replace(asked, counts_slight=not is_patient)
        try:
            level = _attempt(run, asked, state.next_number)
        except LevelInterrupted as problem:
            interrupted += 1
            run.progress.say(f"  {problem}; measuring it again", style="yellow")
            if interrupted >= MOST_ATTEMPTS:
                raise LevelFailed(f"this was the last of {MOST_ATTEMPTS} tries") from problem
            run.bench.recover()
            continue
        if level.finished is None or not is_set_aside(level.finished):
            return level
        found = level.finished.disturbance
        by = "" if found is None else in_words(found)
        run.progress.say(f"  {level_text(level, state.campaign.slo)}", style="yellow")
        waits += 1
        _wait(run, by, min(LEAST_WAIT_SECONDS * 2**waits, MOST_WAIT_SECONDS))
        if not is_patient:
            raise PatienceUsedUp(by)
        if run.patience_seconds <= 0:
            most = f"{MOST_SLIGHT_SHARE:.0%}"
            run.progress.say(f"  not quiet so far: levels with at most {most} taken count now")


def _attempt(run: _Sitting, asked: LevelAsk, number: str) -> Level:
    """One attempt under a name of its own; an interruption is on record.

    Raises LevelInterrupted, ServerFailed.
    """
    state, began = run.state, run.clock()
    attempt = state.next_attempt(number)
    name = f"{state.key}#{number}.{attempt}"
    seed = seed_of(state.campaign.seed, state.cell, name)
    given = state.campaign.asked_levels(state.cell)
    if given is not None and attempt == 1:
        seed = given[len(state.counted)].seed or seed
    try:
        return run.bench.measure(
            msgspec.structs.replace(asked, name=name, attempt=attempt, seed=seed)
        )
    except LevelInterrupted as problem:
        spent = round(run.clock() - began, 3)
        state.event(
            LevelAbandoned(cell=state.key, level=name, reason=str(problem), spent_seconds=spent)
        )
        raise


def _wait(run: _Sitting, by: str, least_seconds: float) -> None:
    """Until the engine's cores are quiet, but `least_seconds`: not all that disturbs can be seen.

    And no longer than MOST_WAIT_SECONDS: not all that can be seen disturbs, and a level that is
    disturbed is soon cut short. It costs the cell's patience, not its budget.
    """
    state, began = run.state, run.clock()
    left = run.patience_seconds
    last: CoresSample | None = None
    now, quiet, waited = by, 0, 0.0
    if left > 0:
        most = formatting.duration(left)
        said = f"  disturbed: {by}; waiting for a quiet machine, at most {most}"
        run.progress.say(said, style="yellow")
    while waited < min(left, MOST_WAIT_SECONDS) and (quiet < QUIET_LOOKS or waited < least_seconds):
        run.bench.rest(LOOK_SECONDS)
        waited = run.clock() - began
        seen = run.bench.look()
        if seen is not None and not is_quiet(seen):
            quiet, now = 0, who_of(seen)
        elif seen is None or seen is not last:
            quiet += 1
        last = seen
        told = formatting.duration(waited)
        run.progress.tick(f"disturbed by {now}: waiting for a quiet machine, {told}")
    became_quiet = quiet >= QUIET_LOOKS
    spent = round(waited, 3)
    state.event(Waited(cell=state.key, reason=by, spent_seconds=spent, became_quiet=became_quiet))
    if waited < left:
        how = "quiet" if became_quiet else f"not quiet ({now})"
        run.progress.say(f"  {how} after {formatting.duration(waited)}: measuring again")
