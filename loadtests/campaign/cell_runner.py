"""Measures one cell: single streams, bursts, a law, an estimate, and the level that confirms it.

    capacities = run_cell(state, open_bench, part, progress, clock)     # None: on, in a later block

    start -> single streams -> bursts -> law -> estimate Y -> a level at 0.8 Y -> its steps give one
    factor -> Y again -> held and Y not above 1.4 x the rate: done; else one more, at most

`next_step` is pure: from what is in the journal to what is to be measured next. A Bench measures
on a server that is ready. Everything needed to go on after a kill is in `state`, which is read from
the run folder. Where the law does not fit, rate_search.py says which rate is next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import msgspec

from loadtests.analysis import capacity_text
from loadtests.analysis.capacity_estimate import CONFIRMING_SHARE, confirming_seconds, estimate
from loadtests.analysis.disturbance import MOST_SLIGHT_SHARE, in_words, is_quiet, who_of
from loadtests.analysis.level import Level
from loadtests.analysis.slo import Slo
from loadtests.campaign.campaign_file import RepeatedLevel, Search
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


class SingleStream(msgspec.Struct, frozen=True):
    """Requests one at a time, as many as go into so many seconds."""

    requests: int
    seconds: float


class Calibrate(msgspec.Struct, frozen=True):
    """Bursts, within so many seconds; then the law."""

    seconds: float


class RunLevel(msgspec.Struct, frozen=True):
    """A level at a rate."""

    rate: float
    window_seconds: float
    warmup_seconds: float
    number: int | None = None  # of a repeated level, whose seed it has


class Restart(msgspec.Struct, frozen=True):
    """Start the server again, and ask again."""

    reason: str


class Done(msgspec.Struct, frozen=True):
    """Nothing is left to measure, or to pay for, in this block."""


Step = SingleStream | Calibrate | RunLevel | Restart | Done


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a cell when the next step is to be chosen."""

    search: Search
    slos: tuple[Slo, ...]
    levels: list[Level]  # that count: single streams and loaded ones, in order
    is_calibrated: bool  # bursts were sent, whatever came of them
    capacity: Callable[[Slo], Capacity]  # by all that was measured so far
    left_seconds: float  # of the budget, in this block
    start: int | None  # of the server that serves now, from 1; None: it cannot be started again
    block: int = 1
    to_confirm: bool = True
    asked: list[RepeatedLevel] | None = None  # levels to measure in place of a search

    @property
    def alone(self) -> list[Level]:
        return [level for level in self.levels if level.is_single_stream]

    @property
    def loaded(self) -> list[Level]:
        return [level for level in self.levels if level.rate is not None]

    @property
    def alone_seconds(self) -> float | None:
        """Mean time of a single-stream request; None where none ended."""
        known = [seconds for one in self.alone if (seconds := one.mean(one.e2e)) is not None]
        return sum(known) / len(known) if known else None


def next_step(seen: Seen) -> Step:
    """What to measure next, given all that is in the journal."""
    if seen.asked is not None:
        return _next_asked(seen, seen.asked)
    if not seen.alone:
        return _single_stream(seen.search)
    for slo in seen.slos:
        step = _next_for(seen, slo)
        if step is not None:
            return step
    return Done()


def _single_stream(search: Search) -> SingleStream:
    return SingleStream(search.single_stream_requests, search.single_stream_seconds)


def _next_asked(seen: Seen, asked: Sequence[RepeatedLevel]) -> Step:
    """Levels of a repeat, or at given rates, one after the other; none is left out."""
    done = len(seen.levels)
    if done >= len(asked):
        return Done()
    one = asked[done]
    if one.rate is None:
        return SingleStream(seen.search.single_stream_requests, one.seconds)
    return RunLevel(one.rate, one.seconds, _warmup_seconds(seen), done + 1)


def _next_for(seen: Seen, slo: Slo) -> Step | None:
    """The next step of the search for one SLO; None: nothing is left to do for it."""
    is_alone_here = any(one.started.start == seen.start for one in seen.alone)
    fails_alone = seen.alone[-1].judge(slo).verdict == "fails"
    found = seen.capacity(slo)
    if found.state == "not_even_alone":
        if found.starts >= 2:
            return None
        if seen.start is None or not is_alone_here:
            return _single_stream(seen.search)
        return Restart("requests one at a time miss the SLO: a second start must say so too")
    if fails_alone and seen.left_seconds > 0 and len(seen.alone) < MOST_ALONE:
        return _single_stream(seen.search)  # too few to say so
    if _has_law(seen, slo) and not seen.is_calibrated:
        seconds = min(CALIBRATION_SECONDS, seen.left_seconds)
        if seconds >= LEAST_CALIBRATION_SECONDS:
            return Calibrate(seconds)
    if not seen.to_confirm or fails_alone:
        return None
    if found.method == "law" and _has_law(seen, slo):
        return _confirming(seen, slo, found) if found.limit else None
    return _searching(seen, slo)


def _has_law(seen: Seen, slo: Slo) -> bool:
    """Whether a law is asked: without a limit of latency it tells nothing."""
    has_limit = slo.ttft_seconds is not None or slo.tpot_seconds is not None
    return seen.search.method == "law" and has_limit


def _confirming(seen: Seen, slo: Slo, found: Capacity) -> RunLevel | None:
    """The level that confirms 0.8 of the estimate: one, and one more where that did not hold or the
    limit is far above it; more only while nothing holds, each lower, and the budget pays.
    """
    limit, asked = found.limit or 0.0, _asked(seen, slo)
    if found.held and limit <= ENOUGH * asked and found.starts >= seen.block:
        return None
    here = [one for one in seen.loaded if seen.start is None or one.started.start == seen.start]
    tries = [one for one in here if (one.rate or 0.0) >= NEAR * limit]
    if len(tries) >= (MOST_LEVELS if found.held else MOST_TRIES):
        return None
    rate = CONFIRMING_SHARE * limit
    if seen.block > 1 and found.held and limit <= ENOUGH * asked:
        return _level(seen, slo, asked)
    failed = [one.rate or 0.0 for one in seen.loaded if one.judge(slo).verdict == "fails"]
    if failed:
        rate = min(rate, CONFIRMING_SHARE * min(failed))
    last = seen.loaded[-1] if seen.loaded and not found.held else None
    if last is not None and (last.rate or 0.0) * LOWER < rate:
        # Levels at one rate count together: what nearly told is measured there again.
        more = _seconds_to_prove(seen, slo, last.rate or 0.0)
        if more is not None:
            return _level(seen, slo, last.rate or 0.0, more)
        rate = LOWER * (last.rate or 0.0)
    return _level(seen, slo, rate)


def _seconds_to_prove(seen: Seen, slo: Slo, rate: float) -> float | None:
    """So many more, at the share of good requests seen there; None: a lower rate is quicker.

    Wilson's lower bound reaches p where n = z^2 p (1 - p) / (share - p)^2 (score test).
    """
    told = [(one.window_seconds, one.judge(slo)) for one in seen.loaded if one.rate == rate]
    seconds, target = sum(window for window, _ in told), slo.target
    count = sum(one.effective for _, one in told)
    good = sum(one.effective * (one.share or 0.0) for _, one in told)
    bad = any(one.verdict == "fails" or one.steady is False for _, one in told)
    if bad or good <= target * count:
        return None
    z = NormalDist().inv_cdf(slo.confidence)
    needed = z * z * target * (1 - target) / (good / count - target) ** 2
    more = seconds * (needed / count - 1)
    least = seen.search.level_seconds
    usual = confirming_seconds(slo, rate, seen.alone_seconds, least_seconds=least)
    return max(MORE * more, least) if MORE * more <= 2 * usual else None


def _asked(seen: Seen, slo: Slo) -> float:
    """The highest rate that was asked for and held: what came may be a little less."""
    held = [one.rate or 0.0 for one in seen.loaded if one.judge(slo).verdict == "holds"]
    return max(held, default=0.0)


def _searching(seen: Seen, slo: Slo) -> RunLevel | None:
    """By levels alone: the rate that narrows, then the level that confirms the low side."""
    tried = []
    for level in seen.loaded:
        told = level.judge(slo)
        is_up = told.verdict == "holds" or (
            told.verdict == "unresolved"
            and told.steady is not False
            and (told.share or 0.0) >= slo.target
        )
        tried.append(Tried(level.rate or 0.0, is_up))
    alone = seen.alone_seconds
    start = seen.capacity(slo).limit or (1.0 / alone if alone else None)
    if start is None:
        return None
    rate = next_rate(tried, start)
    low, high = sides(tried)
    has_failed = any(one.judge(slo).verdict == "fails" for one in seen.loaded)
    if rate is None and low is not None and high is not None and not has_failed:
        rate = NARROW * high  # what nearly held bounds nothing
    if rate is None:
        again = sum(level.rate == low for level in seen.loaded)
        if low is None or again > MOST_LEVELS or seen.capacity(slo).holds:
            return None
        rate = low
    return _level(seen, slo, rate, by_levels=True)


def _level(
    seen: Seen, slo: Slo, rate: float, seconds: float | None = None, *, by_levels: bool = False
) -> RunLevel | None:
    """A level as long as it takes to tell, as far as the budget pays; None where it does not."""
    rate = float(f"{rate:.3g}")
    warmup = _warmup_seconds(seen)
    affordable = seen.left_seconds - warmup - 2 * (seen.alone_seconds or 0.0)
    if affordable < seen.search.level_seconds:
        return None
    least = seen.search.level_seconds
    alone = seen.alone_seconds
    wanted = seconds or confirming_seconds(
        slo, rate, alone, by_levels=by_levels, least_seconds=least
    )
    return RunLevel(rate, round(min(wanted, affordable), 1), warmup)


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
        """For disturbed levels and waiting, besides the budget."""
        return min(self.state.campaign.wait_seconds, self.part.budget_seconds or float("inf"))

    @property
    def is_patient(self) -> bool:
        return self.state.lost_seconds < self.patience_seconds


def run_cell(
    state: CellState,
    open_bench: OpenBench,
    part: CellStarted,
    progress: Progress,
    clock: Callable[[], float],
    *,
    to_confirm: bool = True,
) -> dict[str, Capacity]:
    """The capacity under each SLO, by its name, after all that this block pays for.

    A server that is lost is started again. Raises ServerFailed, LevelFailed, LoadError.
    """
    lost = 0
    for _ in range(MOST_SERVERS):
        try:
            with open_bench(state) as bench:
                again = _measure(_Sitting(state, part, bench, progress, clock, to_confirm))
                if again is None:
                    return capacities(state)
                progress.say(f"  {again.reason}")
        except ServerLost as problem:
            lost += 1
            state.event(Interrupted(cell=state.key, reason=str(problem)))
            progress.say(f"  {problem}", style="yellow")
            reason = f"lost {lost} servers; the last one: {problem}"
    if lost:
        raise ServerFailed(reason)
    return capacities(state)


def capacities(state: CellState) -> dict[str, Capacity]:
    """What all levels so far say of each SLO, by its name."""
    return {slo.name: capacity_of(state, slo) for slo in state.campaign.all_slos}


def capacity_of(state: CellState, slo: Slo) -> Capacity:
    """By the law, where calibration gave one that fits, else by levels alone."""
    made = state.calibrated
    law, policy = None, None
    if made is not None and made.law is not None and state.campaign.search.method == "law":
        law = msgspec.convert(made.law, StepLaw)
        policy = msgspec.convert(made.policy, SchedulingPolicy)
        for level in state.counted:
            if level.rate is not None and level.name not in state.factors:
                state.factors[level.name] = level_factor(law, level, policy)
    return estimate(
        state.counted,
        slo,
        law=law,
        policy=policy,
        workload=state.campaign.workload_of(state.cell),
        arrivals=state.campaign.arrivals,
        factors=state.factors,
        least_seconds=state.campaign.search.level_seconds,
    )


def seen_of(state: CellState, part: CellStarted, *, to_confirm: bool) -> Seen:
    """What the journal says of a cell."""
    known: dict[tuple[str, int], Capacity] = {}

    def capacity(slo: Slo) -> Capacity:
        at = (slo.name, len(state.levels))
        if at not in known:
            known[at] = capacity_of(state, slo)
        return known[at]

    return Seen(
        search=state.campaign.search,
        slos=state.campaign.all_slos,
        levels=state.counted,
        is_calibrated=state.calibrated is not None,
        capacity=capacity,
        left_seconds=(part.until_seconds or 0.0) - state.spent_seconds,
        start=None if state.cell.url is not None else state.starts,
        block=min(part.block, state.campaign.search.starts),
        to_confirm=to_confirm,
        asked=state.campaign.asked_levels(state.cell),
    )


def _measure(run: _Sitting) -> Restart | None:
    """Steps until nothing is left to measure in this block; Restart: on a new server."""
    state = run.state
    while True:
        step = next_step(seen_of(state, run.part, to_confirm=run.to_confirm))
        try:
            match step:
                case Done():
                    return None
                case Restart():
                    return step
                case Calibrate():
                    _calibrate(run, step.seconds)
                case SingleStream() | RunLevel():
                    level = _level_that_counts(run, step)
                    _say(run, level)
        except PatienceUsedUp as problem:
            names = [slo.name for slo in state.campaign.all_slos]
            state.event(NeverQuiet(cell=state.key, reason=str(problem), slos=names))
            run.progress.say(f"  never quiet: {problem}; nothing more is measured", style="yellow")
            return None


def _say(run: _Sitting, level: Level) -> None:
    """What a level showed, and what is known of the capacity now."""
    state, slo = run.state, run.state.campaign.slo
    run.progress.detail(f"  {level_text(level, slo)}")
    if level.rate is not None and state.campaign.asked_levels(state.cell) is None:
        run.progress.found(state.key, capacity_text.in_words(capacity_of(state, slo)))


def _calibrate(run: _Sitting, seconds: float) -> None:
    """Bursts, the law and the first estimate, on record. Bursts of the journal are not sent again.

    A burst that is disturbed is sent again once, then left out.
    """
    state, began = run.state, run.clock()
    campaign = state.campaign
    sent = [one for one in state.levels if one.started.purpose is LevelPurpose.CALIBRATION]
    before = list(sent)
    number = 0
    spent_before = state.spent_seconds

    def ask(burst: Burst) -> Level | None:
        nonlocal number
        number += 1
        if before:
            return before.pop(0)
        for _ in range(BURST_TRIES):
            attempt = state.next_attempt(f"burst.{number}")
            name = f"{state.key}#burst.{number}.{attempt}"
            run.progress.tick(f"{state.key}: calibrating, {burst.streams} at a time")
            level = _attempt(
                run,
                LevelAsk(
                    name=name,
                    attempt=attempt,
                    seed=seed_of(campaign.seed, state.cell, name),
                    purpose=LevelPurpose.CALIBRATION,
                    burst=burst,
                    window_seconds=CALIBRATION_SECONDS,
                ),
            )
            if level.finished is None or not is_set_aside(level.finished):
                return level
        return None

    run.progress.tick(f"{state.key}: calibrating for at most {formatting.duration(seconds)}")
    policy = run.bench.policy
    single = [one for one in state.counted if one.is_single_stream]
    slots = None if policy is None else policy.slots
    try:
        found = calibrate(ask, campaign.workload_of(state.cell), slots, seconds, single)
    except LevelInterrupted as problem:
        state.event(Interrupted(cell=state.key, reason=f"calibration: {problem}"))
        run.bench.recover()
        return
    policy = policy or foreign_policy(found.slots)
    if policy is not None:
        reused = measured_reuse(campaign.workload_of(state.cell), single)
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
    limits = capacities(state)
    state.event(msgspec.structs.replace(made, limits=limits))
    took = formatting.duration(run.clock() - began)
    if found.law is None:
        run.progress.say(f"  calibrated in {took}: no law, {found.reason}")
        return
    told = [f"{capacity_text.in_words(one)}{_for(name, limits)}" for name, one in limits.items()]
    run.progress.say(f"  calibrated in {took}: {'; '.join(told)}")


def foreign_policy(slots: int | None) -> SchedulingPolicy | None:
    """What is supposed of a server that does not say its settings."""
    return None if slots is None else SchedulingPolicy(slots=slots, prefill_tokens=PREFILL_TOKENS)


def _for(name: str, limits: dict[str, Capacity]) -> str:
    return f" for {name}" if len(limits) > 1 else ""


def _level_that_counts(run: _Sitting, step: SingleStream | RunLevel) -> Level:
    """One level, measured again where it was interrupted or disturbed.

    Raises LevelFailed, PatienceUsedUp.
    """
    state = run.state
    waits = 0
    interrupted = 0
    while True:
        is_patient = run.is_patient
        attempt = state.next_attempt()
        name = f"{state.key}#{state.next_number}.{attempt}"
        try:
            level = _attempt(run, _ask_for(run, step, name, attempt, not is_patient))
        except LevelInterrupted as problem:
            interrupted += 1
            run.progress.say(f"  {name}: {problem}; measuring it again", style="yellow")
            if interrupted >= MOST_ATTEMPTS:
                raise LevelFailed(f"{name} was the last of {MOST_ATTEMPTS} tries") from problem
            run.bench.recover()
            continue
        assert level.finished is not None
        if not is_set_aside(level.finished):
            return level
        found = level.finished.disturbance
        assert found is not None
        run.progress.say(f"  {level_text(level, state.campaign.slo)}", style="yellow")
        waits += 1
        _wait(run, in_words(found), min(LEAST_WAIT_SECONDS * 2**waits, MOST_WAIT_SECONDS))
        if not is_patient:
            raise PatienceUsedUp(in_words(found))
        if not run.is_patient:
            most = f"{MOST_SLIGHT_SHARE:.0%}"
            run.progress.say(f"  not quiet so far: levels with at most {most} taken count now")


def _ask_for(
    run: _Sitting, step: SingleStream | RunLevel, name: str, attempt: int, counts_slight: bool
) -> LevelAsk:
    state = run.state
    campaign = state.campaign
    seed = seed_of(campaign.seed, state.cell, name)
    asked = campaign.asked_levels(state.cell)
    if asked is not None and attempt == 1:
        seed = asked[len(state.counted)].seed or seed
    who: dict[str, Any] = {"name": name, "attempt": attempt, "seed": seed}
    if isinstance(step, SingleStream):
        return LevelAsk(
            purpose=LevelPurpose.SINGLE_STREAM,
            requests=step.requests,
            window_seconds=step.seconds,
            counts_slight=counts_slight,
            **who,
        )
    return LevelAsk(
        purpose=LevelPurpose.SEARCH,
        rate=step.rate,
        window_seconds=step.window_seconds,
        warmup_seconds=step.warmup_seconds,
        counts_slight=counts_slight,
        **who,
    )


def _attempt(run: _Sitting, asked: LevelAsk) -> Level:
    """One attempt; an interruption is on record. Raises LevelInterrupted, ServerFailed."""
    state, began = run.state, run.clock()
    try:
        return run.bench.measure(asked)
    except LevelInterrupted as problem:
        spent = round(run.clock() - began, 3)
        state.event(
            LevelAbandoned(
                cell=state.key, level=asked.name, reason=str(problem), spent_seconds=spent
            )
        )
        raise


def _wait(run: _Sitting, by: str, least_seconds: float) -> None:
    """Until the engine's cores are quiet, but `least_seconds`: not all that disturbs can be seen.

    And no longer than MOST_WAIT_SECONDS: not all that can be seen disturbs, and a level that is
    disturbed is soon cut short. It costs the cell's patience, not its budget.
    """
    state, began = run.state, run.clock()
    left = run.patience_seconds - state.lost_seconds
    last: CoresSample | None = None
    now, quiet, waited = by, 0, 0.0
    if left > 0:
        most = formatting.duration(left)
        said = f"  disturbed: {by}; waiting for a quiet machine, at most {most}"
        run.progress.say(said, style="yellow")
    while waited < min(left, MOST_WAIT_SECONDS) and not (
        quiet >= QUIET_LOOKS and waited >= least_seconds
    ):
        run.bench.rest(LOOK_SECONDS)
        waited = run.clock() - began
        seen = run.bench.look()
        if seen is not None and not is_quiet(seen):
            quiet = 0
            now = who_of(seen)
        elif seen is None or seen is not last:
            quiet += 1
        last = seen
        told = formatting.duration(waited)
        run.progress.tick(f"disturbed by {now}: waiting for a quiet machine, {told}")
    spent, is_quiet_now = round(waited, 3), quiet >= QUIET_LOOKS
    state.event(Waited(cell=state.key, reason=by, spent_seconds=spent, became_quiet=is_quiet_now))
    if waited < left:
        how = "quiet" if is_quiet_now else f"not quiet ({now})"
        run.progress.say(f"  {how} after {formatting.duration(waited)}: measuring again")
