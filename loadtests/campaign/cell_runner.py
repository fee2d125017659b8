"""Measures one cell: single-stream requests, calibration, then the levels of a search.

    capacities = run_cell(state, open_bench, part, progress, clock)     # None: on, in a later block

A Bench measures on a server that is ready; this module decides what is measured. Everything it
needs to go on after a kill is in `state`, which is read from the run folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from loadtests.campaign.bench import Bench, Level, OpenBench
from loadtests.campaign.campaign_file import Campaign
from loadtests.campaign.cells import seed_of
from loadtests.campaign.level import Measured
from loadtests.campaign.progress import Progress
from loadtests.campaign.run_state import CellState, aimed
from loadtests.capacity.estimate import estimate, never_quiet
from loadtests.capacity.search import Finished, Measure, next_step
from loadtests.capacity.search_config import SearchConfig
from loadtests.errors import BurstDisturbed, LevelFailed, LevelInterrupted, ServerFailed, ServerLost
from loadtests.metrics.disturbance import (
    MOST_SLIGHT_SHARE,
    in_words,
    is_quiet,
    is_slow,
    slow_in_words,
    who_of,
)
from loadtests.metrics.slo import Slo
from loadtests.records.events import (
    Calibrated,
    Capacity,
    CellStarted,
    Interrupted,
    LevelAbandoned,
    NeverQuiet,
    Waited,
)
from loadtests.records.schema import CoresSample, RequestRecord
from loadtests.simulation import calibration as calibrate
from loadtests.simulation.batching import Policy
from loadtests.simulation.prediction_error import error_scale, packaged_pairs, pairs_in
from loadtests.simulation.prediction_words import predicted_words
from loadtests.simulation.step_observations import observations_of
from models import formatting

MOST_ATTEMPTS = 5  # of one level in one sitting
MOST_SERVERS = 3  # of one cell in one sitting
LOOK_SECONDS = 1.0  # between two looks at the cores while waiting
QUIET_LOOKS = 2  # in a row
LEAST_WAIT_SECONDS = 1.0  # then twice as long each time: not all that disturbs can be seen
MOST_WAIT_SECONDS = 30.0  # until a level is tried again
BURST_TRIES = 2
PREFILL_TOKENS = 2048  # of a step, where the server does not say


@dataclass
class _Run:
    """A cell's part of a block in one sitting, on one bench."""

    state: CellState
    part: CellStarted
    bench: Bench
    progress: Progress
    clock: Callable[[], float]

    @property
    def patience_seconds(self) -> float:
        """For disturbed levels and waiting since the first block, besides the budget."""
        state = self.state
        most = min(state.campaign.wait_seconds, budget_of(state, self.part))
        return most * self.part.block / state.blocks

    @property
    def is_patient(self) -> bool:
        return self.state.lost_seconds < self.patience_seconds


class PatienceUsedUp(Exception):
    """The machine was disturbed by much for as long as the campaign waits; the message says by
    whom."""


def run_cell(
    state: CellState,
    open_bench: OpenBench,
    part: CellStarted,
    progress: Progress,
    clock: Callable[[], float],
) -> dict[str, Capacity] | None:
    """The capacity under each SLO, by its name; None where a later block goes on with the search.

    A server that is lost is started again. Raises ServerFailed, LevelFailed, LoadError.
    """
    for number in range(1, MOST_SERVERS + 1):
        try:
            with open_bench(state) as bench:
                return _search(_Run(state, part, bench, progress, clock))
        except ServerLost as problem:
            state.run.event(Interrupted(cell=state.key, reason=str(problem)))
            progress.say(f"  {problem}", style="yellow")
            if number == MOST_SERVERS:
                raise ServerFailed(
                    f"lost {MOST_SERVERS} servers; the last one: {problem}"
                ) from problem
    raise AssertionError("not reached")


def already_decided(state: CellState, budget_seconds: float) -> dict[str, Capacity] | None:
    """The capacities of a cell on which nothing is left to measure; None where something is."""
    found: dict[str, Capacity] = {}
    for slo in state.campaign.all_slos:
        config = _aimed(state, slo, budget_seconds)
        step = next_step(state.levels(slo), config, slo, state.spent_seconds, _start_of(state))
        if not isinstance(step, Finished):
            return None
        found[slo.name] = step.capacity
    return found


def _start_of(state: CellState) -> int | None:
    return state.starts if state.blocks > 1 else None


def budget_of(state: CellState, part: CellStarted) -> float:
    """Seconds of measuring, of all parts of the cell."""
    given = part.budget_seconds
    return state.campaign.search.budget_seconds if given is None else given


def _search(run: _Run) -> dict[str, Capacity] | None:
    """Levels for one SLO after the other; the next ones have what one leaves of its share."""
    state, part = run.state, run.part
    slos = state.campaign.all_slos
    is_last = part.block >= state.blocks
    found: dict[str, Capacity] = {}
    by: str | None = None
    for position, slo in enumerate(slos):
        spent, to_come = state.spent_seconds, len(slos) - position
        budget = budget_of(state, part)
        until = budget if part.until_seconds is None else part.until_seconds
        until = spent + max(0.0, until - spent) / to_come
        whole = spent + max(0.0, budget - spent) / (to_come if is_last else len(slos))
        try:
            ended = _one_slo(run, slo, max(whole, 1e-3), until)
        except PatienceUsedUp as problem:
            by = str(problem)
            break
        if ended is not None:
            found[slo.name] = ended
    unfinished = [slo.name for slo in slos if slo.name not in found]
    if unfinished and not is_last:
        return None
    if len(slos) > 1 or unfinished:  # levels of later SLOs say something about the earlier ones
        for slo in slos:
            config = _aimed(state, slo)
            found[slo.name] = estimate(state.levels(slo), config, slo)
    if by is not None:
        state.run.event(NeverQuiet(cell=state.key, reason=by, slos=unfinished))
        found |= {name: never_quiet(found[name], by) for name in unfinished}
    return found


def _aimed(state: CellState, slo: Slo, budget_seconds: float | None = None) -> SearchConfig:
    """The search for one SLO, from the predicted rate on where there is one."""
    config = state.campaign.of(state.cell, slo).search
    if budget_seconds is not None:
        config = msgspec.structs.replace(config, budget_seconds=budget_seconds)
    return aimed(config, state.prediction, slo)


def _one_slo(run: _Run, slo: Slo, budget_seconds: float, until_seconds: float) -> Capacity | None:
    """Levels until the search has ended; None where this start is over before."""
    state = run.state
    config = _aimed(state, slo, budget_seconds)
    start = _start_of(state)
    is_last = run.part.block >= state.blocks
    is_asked = state.campaign.repeats is not None
    while isinstance(
        step := next_step(state.levels(slo), config, slo, state.spent_seconds, start), Measure
    ):
        if step.rate is not None and state.campaign.repeats is not None and not config.rates:
            return estimate(state.levels(slo), config, slo)  # only single-stream is repeated
        if not is_last and state.spent_seconds >= until_seconds:
            return None
        is_first = not any(level.rate is not None for level in state.levels(slo))
        wants = step.rate is not None and not config.rates and state.prediction is None
        if wants and is_first and not is_asked:
            is_asked = True
            config = aimed(config, _calibrate(run, config), slo)
            continue
        measured = _level(run, step, state.campaign.of(state.cell, slo))
        run.progress.say(f"  {measured.in_words}")
        _settle(run, measured)
    return step.capacity if is_last or isinstance(step, Finished) else None


def _level(run: _Run, step: Measure, campaign: Campaign) -> Measured:
    """One level, measured again where it was disturbed, save where it counts all the same. Once the
    patience is used up, a slightly disturbed one counts.

    Raises LevelFailed, PatienceUsedUp.
    """
    waits = 0
    while True:
        _wait_for_probe(run, campaign)
        is_patient = run.is_patient
        measured = _undisturbed_or_not(run, step, campaign, is_patient)
        found = measured.disturbance
        if found is None or not found.is_disturbed or found.counts or measured.level.is_valid:
            return measured
        run.progress.say(f"  {measured.in_words}", style="yellow")
        _settle(run, measured)
        waits += 1
        _wait(run, in_words(found), min(LEAST_WAIT_SECONDS * 2**waits, MOST_WAIT_SECONDS))
        if not is_patient:
            raise PatienceUsedUp(in_words(found))
        if not run.is_patient:
            most = f"{MOST_SLIGHT_SHARE:.0%}"
            run.progress.say(f"  not quiet so far: levels with at most {most} taken count now")


def _settle(run: _Run, measured: Measured) -> None:
    """Until the server has done with the requests that the client ended; not for ever."""
    if not measured.gave_up:
        return
    try:
        run.bench.settle()
    except LevelInterrupted as problem:
        run.state.run.event(Interrupted(cell=run.state.key, reason=str(problem)))
        run.progress.say(f"  {problem}", style="yellow")
        run.bench.recover()


def _wait_for_probe(run: _Run, campaign: Campaign) -> None:
    """Until a short request takes no longer than usual. Raises PatienceUsedUp."""
    seconds = LEAST_WAIT_SECONDS
    while (probe := run.bench.probe()) is not None and is_slow(probe):
        if campaign.disturbance == "ignore":
            return
        by = slow_in_words(probe)
        seen = run.bench.look()
        if seen is not None and not is_quiet(seen):
            beside = who_of(seen.strangers, seen.strangers_seconds or 0.0, seen.seconds)
            by = f"{by} beside {beside}"
        is_patient = run.is_patient
        _wait(run, by, seconds)
        if not is_patient:
            raise PatienceUsedUp(by)
        seconds = min(2 * seconds, MOST_WAIT_SECONDS)


def _wait(run: _Run, by: str, least_seconds: float) -> None:
    """Until the engine's cores are quiet, but `least_seconds`: not all that disturbs can be seen.

    And no longer than MOST_WAIT_SECONDS: not all that can be seen disturbs, and a level that is
    disturbed is soon cut short. It costs the cell's patience, not its budget.
    """
    state, began = run.state, run.clock()
    left = run.patience_seconds - state.lost_seconds
    last: CoresSample | None = None
    now = by
    quiet = 0
    waited = 0.0
    if left > 0:
        most = formatting.duration(left)
        run.progress.say(
            f"  disturbed: {by}; waiting for a quiet machine, at most {most}", style="yellow"
        )
    while waited < min(left, MOST_WAIT_SECONDS) and not (
        quiet >= QUIET_LOOKS and waited >= least_seconds
    ):
        run.bench.rest(LOOK_SECONDS)
        waited = run.clock() - began
        seen = run.bench.look()
        if seen is not None and not is_quiet(seen):
            quiet = 0
            now = who_of(seen.strangers, seen.strangers_seconds or 0.0, seen.seconds)
        elif seen is None or seen is not last:
            quiet += 1
        last = seen
        told = formatting.duration(waited)
        run.progress.tick(f"disturbed by {now}: waiting for a quiet machine, {told}")
    spent, is_quiet_now = round(waited, 3), quiet >= QUIET_LOOKS
    state.run.event(
        Waited(cell=state.key, reason=by, spent_seconds=spent, became_quiet=is_quiet_now)
    )
    if waited >= left:
        return
    how = "quiet" if is_quiet_now else f"not quiet ({now})"
    run.progress.say(f"  {how} after {formatting.duration(waited)}: measuring again")


def _undisturbed_or_not(run: _Run, step: Measure, campaign: Campaign, is_patient: bool) -> Measured:
    """One level, measured again where it was interrupted. Raises LevelFailed."""
    state = run.state
    number, tried = state.next_level()
    for attempt in range(tried + 1, tried + 1 + MOST_ATTEMPTS):
        name = f"{state.key}#{number}.{attempt}"
        seed = seed_of(campaign.seed, state.cell, name)
        if attempt == 1:
            seed = campaign.repeated_seed(state.cell, number) or seed
        began = run.clock()
        try:
            return run.bench.measure(Level(step, campaign, name, seed, attempt, is_patient))
        except LevelInterrupted as problem:
            reason, spent = str(problem), round(run.clock() - began, 3)
            state.run.event(
                LevelAbandoned(cell=state.key, level=name, reason=reason, spent_seconds=spent)
            )
            state.run.event(Interrupted(cell=state.key, level=name, reason=reason))
            run.progress.say(f"  {name}: {reason}; measuring it again", style="yellow")
            run.bench.recover()
    raise LevelFailed(f"level {number} was interrupted {MOST_ATTEMPTS} times")


def _calibrate(run: _Run, config: SearchConfig) -> calibrate.Prediction | None:
    """A prediction of the capacities, on record; None where the budget has no time for one."""
    state = run.state
    campaign = state.campaign.of(state.cell)
    budget = config.budget_seconds * len(campaign.all_slos)
    seconds = calibrate.time_box(budget, config.calibration_seconds)
    if seconds <= 0:
        return None
    began = run.clock()
    policy = run.bench.policy
    numbers = iter(range(1, 1000))

    def ask(burst: calibrate.Burst) -> list[RequestRecord]:
        """A burst that is disturbed is sent again once, then left out: []."""
        for _ in range(BURST_TRIES):
            number = next(numbers)
            run.progress.tick(f"{state.key}: calibrating, {burst.streams} at a time")
            seed = seed_of(campaign.seed, state.cell, f"{state.key}#calibration.{number}")
            try:
                return run.bench.burst(burst, number, seed)
            except BurstDisturbed as problem:
                reason = f"calibration, {burst.streams} streams at once: {problem}"
                state.run.event(Interrupted(cell=state.key, reason=reason))
                run.progress.say(f"  disturbed: {reason}", style="yellow")
        return []

    run.progress.tick(f"{state.key}: calibrating for at most {formatting.duration(seconds)}")
    try:
        seen, slots = calibrate.calibrate(
            ask,
            state.single_stream,
            campaign.workload,
            policy.slots if policy is not None else None,
            seconds,
            run.clock,
        )
    except LevelInterrupted as problem:
        state.run.event(Interrupted(cell=state.key, reason=f"calibration: {problem}"))
        run.bench.recover()
        return None
    made = calibrate.prediction(
        [*observations_of(state.single_stream), *seen],
        policy or Policy(slots=slots or calibrate.UNKNOWN_SLOTS, prefill_tokens=PREFILL_TOKENS),
        campaign.workload,
        campaign.arrivals,
        campaign.all_slos,
        campaign.seed,
        error_scale([*packaged_pairs(), *pairs_in(state.run.events)]),
    )
    spent = round(run.clock() - began, 3)
    made = msgspec.structs.replace(made, slots=slots, spent_seconds=spent)
    fields = msgspec.to_builtins(made) | {"rates": made.rates}
    state.run.event(Calibrated(cell=state.key, **fields))
    rates = [f"{predicted_words(rate)} for {name}" for name, rate in made.rates.items()]
    said = f"predicted {', '.join(rates)}" if rates else f"no prediction ({made.reason})"
    run.progress.say(f"  calibrated in {made.spent_seconds:.0f} s: {said}")
    return made
