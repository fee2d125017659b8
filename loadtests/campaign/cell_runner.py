"""Measures one configuration: single streams, two bursts, a step-time model, an estimate, and the
load level that confirms it.

    capacity = CellRun(state, cell_block, progress, clock).run(open_bench)

next_measurement.py decides what comes next from what is recorded; here it is measured and recorded.
Everything that is needed to continue after a kill is in `state`, which is read from the run folder.
A ServerBench measures on a server that is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from crossover.loadtests.campaign.campaign_file import Campaign
from crossover.loadtests.campaign.level_runner import OpenBench, ServerBench, level_text
from crossover.loadtests.campaign.next_measurement import (
    CALIBRATION_SECONDS,
    MAX_DISTURBED,
    Calibrate,
    CellProgress,
    RestartServer,
    StopMeasuring,
    next_measurement,
)
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.resume_state import CellRecord, CellState, seed_of
from crossover.loadtests.capacity import capacity_text
from crossover.loadtests.capacity.calibration_bursts import calibrate, request_seconds
from crossover.loadtests.capacity.capacity_estimate import estimate, server_under_load
from crossover.loadtests.capacity.prefix_reuse import (
    measured_history_reuse,
    measured_reasoning_share,
    measured_reuse,
    measured_template_tokens,
)
from crossover.loadtests.capacity.sharper_slo import advice, what_single_requests_meet
from crossover.loadtests.capacity.unloaded_check import requests_to_check
from crossover.loadtests.errors import LevelInterrupted, LoadError, ServerLost
from crossover.loadtests.levels.disturbance import MAX_SLIGHT_SHARE, disturbance_in_words
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records import journal_events as journal
from crossover.loadtests.records.level_plan import Burst, LevelPlan
from crossover.models import formatting
from crossover.serving.backends.backend_table import spec_of
from crossover.serving.capacity.batching_simulator import Reuse
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    LOADED,
    QUICK_REQUESTS,
    Demand,
    PrefixReuse,
    ServerModel,
    SimulatedCapacity,
    lengths_of,
)
from crossover.serving.capacity.slo import Slo
from crossover.serving.capacity.slot_count import best_slots, with_slots
from crossover.serving.workload.request_lengths import Workload

VLLM_STEP_TOKENS = 2048  # vLLM's default of max_num_batched_tokens for an online server
MAX_SERVER_STARTS = 4  # for one cell, in one block, until the campaign is stopped and resumed
RECALIBRATION_SECONDS = 10.0  # least time for the bursts after a restart with other slots


class CellRun:
    """Measures a cell in one block, until the block ends or the campaign is stopped."""

    bench: ServerBench  # while the server runs

    def __init__(
        self,
        state: CellState,
        cell_block: journal.CellStarted,
        progress: Progress,
        clock: Callable[[], float],
        *,
        confirms: bool = True,
        max_slots: int | None = None,
    ) -> None:
        """`confirms`: False if the cell is only to be estimated. `max_slots`: those that its memory
        has room for; None: its slots are not chosen here."""
        self.state = state
        self.cell_block = cell_block
        self.progress = progress
        self.clock = clock
        self.campaign = state.campaign
        self.slo = state.campaign.slo
        self.confirms = confirms
        self.max_slots = max_slots

    def run(self, open_bench: OpenBench) -> journal.Capacity:
        """Return the capacity after everything that this block pays for.

        Where a level is interrupted or the server is lost, the server is started again. Raises
        LoadError.
        """
        state, interruptions = self.state, 0
        for _ in range(MAX_SERVER_STARTS):
            if state.levels and isinstance(next_measurement(self._recorded()), StopMeasuring):
                break  # no server is started
            try:
                with open_bench(state) as self.bench:
                    last = self._measure()
                if isinstance(last, StopMeasuring):
                    break
                self.progress.say(f"  {last.reason}")
            except (LevelInterrupted, ServerLost) as problem:
                interruptions += 1
                state.record(journal.Interrupted(cell=state.key, reason=str(problem)))
                self.progress.say(f"  {problem}; measuring it again", style="yellow")
                if interruptions == MAX_SERVER_STARTS:
                    raise LoadError(
                        f"interrupted {interruptions} times; the last time: {problem}"
                    ) from None
        calculating_since = self.clock()
        self.progress.tick(f"{state.key}: simulating the capacity")
        capacity = self._with_advice(estimate_of(state))
        self.state.record_elapsed(self.clock() - calculating_since)
        return capacity

    def _with_advice(self, capacity: journal.Capacity) -> journal.Capacity:
        """Return the capacity with the estimates for less prefix caching and, if the SLO makes
        the interval wide or there is no capacity, advice about another SLO."""
        server, demand = self.state.server, demand_of(self.campaign)
        if server is None:
            if not capacity.is_none:
                return capacity
            single_streams = [
                level.undisturbed
                for level in self.state.counted_levels
                if level.is_single_stream and level.counts
            ]
            words = what_single_requests_meet(single_streams, self.slo)
            return msgspec.structs.replace(capacity, advice=words)
        return msgspec.structs.replace(
            with_less_reuse(capacity, server, demand, self.slo),
            advice=advice(capacity, server, demand, self.slo, self.state.unit_rate),
        )

    def _recorded(self) -> CellProgress:
        """Return what decides the next measurement. It is from the journal alone, so that a resumed
        campaign continues where it stopped."""
        return cell_progress(self.state, self.cell_block, confirms=self.confirms)

    def _measure(self) -> RestartServer | StopMeasuring:
        """Measure until this server has nothing left to measure; return the decision that ended
        it."""
        while True:
            spent_before, since = self.state.spent_seconds, self.clock()
            self.progress.tick(f"{self.state.key}: simulating the capacity")
            recorded = self._recorded()
            self._keep_unit(recorded.capacity)
            measurement = next_measurement(recorded)
            match measurement:
                case RestartServer():
                    return measurement
                case StopMeasuring(reason):
                    self.progress.log(f"  nothing more is measured: {reason}")
                    return measurement
                case Calibrate(seconds):
                    self._calibrate(seconds)
                case LevelPlan():
                    self._measure_level(measurement, recorded.capacity)
            measured_seconds = self.state.spent_seconds - spent_before
            self.state.record_elapsed(self.clock() - since - measured_seconds)

    def _measure_level(self, plan: LevelPlan, before: journal.Capacity) -> None:
        """Measure a level once, and print what it shows. `before`: the capacity without it."""
        state = self.state
        # By the step times, the undisturbed machine misses the SLO at such a rate too.
        is_missed_anyway = bool(plan.rate and before.high and plan.rate > before.high)
        self._keep_unit(before, plan.rate)
        number = "check" if plan.is_unloaded_check else str(len(state.counted_levels) + 1)
        level = self._attempt(plan, number, counts_disturbed=is_missed_anyway)
        capacity = estimate_of(state)
        unit_rate = self._keep_unit(capacity)
        disturbance = level.finished and level.finished.disturbance
        if disturbance and disturbance.is_set_aside:
            self.progress.say(f"  {level_text(level, self.slo, unit_rate)}", style="yellow")
            self._set_aside(level, disturbance)
            return
        self.progress.log(f"  {level_text(level, self.slo, unit_rate)}")
        if disturbance and disturbance.is_disturbed:
            self.progress.say(f"  {disturbance_in_words(disturbance)}", style="yellow")
        if level.rate and not self.campaign.search.rates:
            words = capacity_text.capacity_in_words(capacity, unit_rate)
            self.progress.set_status(state.key, words)
            self.progress.log(f"  so far: {words}")

    def _set_aside(self, level: Level, disturbance: journal.Disturbance) -> None:
        """Wait before a disturbed level that missed the SLO is repeated, or say why it is not."""
        state, say = self.state, self.progress.say
        cause = disturbance_in_words(disturbance)
        attempts = sum(other.rate == level.rate for other in state.set_aside_levels)
        if attempts % MAX_DISTURBED == 0:
            state.record(journal.NeverQuiet(cell=state.key, reason=cause))
            say(f"  disturbed again: {cause}; whether an idle machine meets the SLO is not known")
            return
        if isinstance(following := next_measurement(self._recorded()), StopMeasuring):
            say(f"  disturbed: {cause}; not repeated: {following.reason}", "yellow")
            return
        left_seconds = max(0.0, self.cell_block.until_seconds - state.spent_seconds)
        pause = round(min(self.campaign.wait_seconds, left_seconds), 3)
        say(f"  disturbed: {cause}; repeating it once after {formatting.duration(pause)}", "yellow")
        self.progress.tick(f"{state.key}: waiting for an idle machine")
        self.bench.wait(pause)
        state.record(journal.Waited(cell=state.key, reason=cause, spent_seconds=pause))

    def _keep_unit(
        self, capacity: journal.Capacity, level_rate: float | None = None
    ) -> float | None:
        """Return the rate in whose unit all rates of this cell are written. Without an estimate it
        is that of the levels; None: none is planned."""
        state, rates = self.state, capacity_text.rates_of([capacity])
        if not any(rates):
            rates = [*self.campaign.search.rates, level_rate or 0.0]
        state.unit_rate = self.progress.rate_units.keep(state.device, rates)
        return state.unit_rate

    def _calibrate(self, seconds: float) -> None:
        """Send the bursts, fit the step-time model and record it.

        Bursts that are in the journal are not sent again. A burst of which much was taken is sent
        again once if there is time, unless much was taken from the single streams too: then the
        other process is there to stay. Of disturbed ones, the undisturbed times count.
        """
        state, started_at, spent_before = self.state, self.clock(), self.state.spent_seconds
        recorded_bursts = {  # by their names without the number of the attempt: the least disturbed
            level.name.rpartition(".")[0]: level
            for level in sorted(state.bursts, key=lambda one: one.taken_share, reverse=True)
        }
        until_seconds = self.cell_block.until_seconds
        kind = f"burst-{state.cell.slots}-slots" if state.slots_choice is not None else "burst"
        # What the server took with fewer slots, for steps with few rows.
        earlier_bursts = [
            level.undisturbed
            for name, level in recorded_bursts.items()
            if not name.startswith(f"{state.key}#{kind}.")
        ]
        single_streams = [
            level.undisturbed for level in state.counted_levels if level.is_single_stream
        ]
        taken_share = max((level.taken_share for level in single_streams), default=0.0)
        is_busy_machine = taken_share > MAX_SLIGHT_SHARE
        number = 0

        def send(burst: Burst) -> Level:
            nonlocal number
            number += 1
            name = f"{kind}.{number}"
            if (recorded := recorded_bursts.get(f"{state.key}#{name}")) is not None:
                return recorded.undisturbed
            self.progress.tick(f"{state.key}: calibrating, {burst.streams} at a time")
            plan = LevelPlan(burst=burst, window_seconds=CALIBRATION_SECONDS)
            sent_at = state.spent_seconds
            level = self._attempt(plan, name, counts_disturbed=True)
            has_time = 2 * state.spent_seconds - sent_at <= until_seconds
            if level.taken_share > MAX_SLIGHT_SHARE and has_time and not is_busy_machine:
                again = self._attempt(plan, name, counts_disturbed=True)
                level = min(level, again, key=lambda one: one.taken_share)
            return level.undisturbed

        policy, workload = self.bench.policy, self.campaign.workload
        # Of all engines, so that a burst fills the slots of each.
        slots = self.bench.slots if policy is None else policy.slots * policy.engines
        model = state.cell.spec
        experts = model.experts.routing if model is not None and model.experts is not None else None
        known_levels = [*single_streams, *earlier_bursts]
        # The calibration counts undisturbed times: on a busy machine, its bursts take longer.
        undisturbed_seconds = seconds * (1 - taken_share)
        calibration = calibrate(send, workload, slots, undisturbed_seconds, known_levels, experts)
        if policy is None and calibration.slots is not None:
            # A server that does not say its settings.
            policy = assumed_settings(calibration.slots, workload, self.bench.kv_tokens)
        server: ServerModel | None = None
        if calibration.step_times is not None and policy is not None:
            outside_seconds = request_seconds(calibration.step_times, policy, single_streams)
            server = ServerModel(
                msgspec.structs.replace(calibration.step_times, request_seconds=outside_seconds),
                policy,
                prefix_share=measured_reuse(workload, single_streams),
                template_tokens=measured_template_tokens(workload, single_streams),
                reuse=self._history_reuse(single_streams) if workload.has_sessions else None,
                reasoning_share=measured_reasoning_share(single_streams),
            )
        duration = self.clock() - started_at
        # Without the time of the bursts, which is recorded with each of them.
        own_seconds = duration - (state.spent_seconds - spent_before)
        state.record(
            journal.Calibrated(
                cell=state.key,
                spent_seconds=round(max(0.0, own_seconds), 3),
                server=server,
                reason=calibration.reason,
            )
        )
        if calibration.step_times is not None:
            capacity = estimate_of(state)
            words = capacity_text.capacity_in_words(capacity, self._keep_unit(capacity))
        else:
            words = f"no step-time model, {calibration.reason}"
        self.progress.say(f"  calibrated in {formatting.duration(duration)}: {words}")
        self._choose_slots()

    def _choose_slots(self) -> None:
        """Record the best number of slots by the calibration. If another number would be better,
        and the time that is left does not pay for starting the server and calibrating again,
        nothing is recorded."""
        state, server = self.state, self.state.server
        if server is None or self.max_slots is None or state.slots_choice is not None:
            return
        if estimate_of(state).state == "misses_slo_unloaded":
            return
        self.progress.tick(f"{state.key}: simulating other numbers of slots")
        choice = best_slots(
            server.slower(LOADED).simulated(demand_of(self.campaign)),
            self.slo,
            max_slots=self.max_slots,
            doubling_cost=spec_of(state.cell.backend).slot_doubling_cost,
        )
        is_change = choice.is_worth_a_restart
        has_fewer = choice.slots < choice.present_slots
        left_seconds = self.cell_block.until_seconds - state.spent_seconds
        load_seconds = (state.ready and state.ready.load_seconds) or 0.0
        calibration_seconds = 0.0 if has_fewer else RECALIBRATION_SECONDS
        if is_change and left_seconds < load_seconds + calibration_seconds:
            return
        state.record(
            journal.SlotsChosen(
                cell=state.key,
                slots=choice.slots if is_change else choice.present_slots,
                rate=choice.rate if is_change else choice.present_rate,
                previous_slots=choice.present_slots,
                previous_rate=choice.present_rate,
            )
        )
        if is_change and has_fewer:  # the bursts had more rows than its steps will have
            settings = with_slots(server.settings, choice.slots)
            server = msgspec.structs.replace(server, settings=settings)
            state.record(journal.Calibrated(cell=state.key, spent_seconds=0.0, server=server))

    def _history_reuse(self, single_streams: Sequence[Level]) -> PrefixReuse:
        """Return how much of the histories of conversations the server found in its cache, and in
        which way its engine reuses prefixes."""
        ready = self.state.ready
        reuse = ready.info.prefix_reuse if ready is not None else None
        is_checkpointed = reuse is not None and reuse.startswith("from checkpoints")
        kind: Reuse = "checkpoints" if is_checkpointed else "any prefix"
        return measured_history_reuse(single_streams, kind)

    def _attempt(self, plan: LevelPlan, number: str, *, counts_disturbed: bool) -> Level:
        """Make one attempt at a level, under a name of its own, and record it if it is interrupted.

        Raises LevelInterrupted, ServerFailed.
        """
        state, started_at = self.state, self.clock()
        name = state.next_level_name(number)
        seed = seed_of(self.campaign.seed, state.cell, name)
        try:
            plan = msgspec.structs.replace(plan, seed=seed)
            return self.bench.measure(name, plan, counts_disturbed=counts_disturbed)
        except LevelInterrupted as problem:
            spent = round(self.clock() - started_at, 3)
            state.record(
                journal.LevelAbandoned(
                    cell=state.key, level=name, reason=str(problem), spent_seconds=spent
                )
            )
            raise


def cell_progress(
    record: CellRecord, cell_block: journal.CellStarted, *, confirms: bool
) -> CellProgress:
    """Return what is recorded about a cell, as far as the next measurement depends on it."""
    campaign = record.campaign
    is_calibrated = record.calibrated is not None
    has_no_model = is_calibrated and record.server is None
    capacity = estimate_of(record)
    left_seconds = cell_block.until_seconds - record.spent_seconds
    return CellProgress(
        slo=campaign.slo,
        workload=campaign.workload,
        search=campaign.search,
        levels=record.counted_levels,
        set_aside=record.set_aside_levels,
        capacity=capacity,
        is_calibrated=is_calibrated,
        burst_rate=burst_rate(record.levels, campaign.workload) if has_no_model else None,
        server_start=None if record.cell.url is not None else record.starts,
        block=cell_block.block,
        left_seconds=left_seconds,
        min_level_seconds=record.min_level_seconds,
        max_single_stream_seconds=campaign.search.single_stream_seconds_on(record.device),
        confirms=confirms,
        slots_choice=record.slots_choice,
        unit_rate=record.unit_rate,
        needs_restart=record.needs_restart,
        to_check=_requests_to_check(record, capacity, left_seconds),
    )


def _requests_to_check(
    record: CellRecord, capacity: journal.Capacity, seconds: float
) -> Burst | None:
    """Return the requests that are sent alone within `seconds` because they miss the SLO by the
    step-time model; None: there is a capacity, or they were sent already."""
    if record.server is None or record.unloaded_checks or not capacity.is_none:
        return None
    demand = demand_of(record.campaign)
    return requests_to_check(record.server, demand, record.campaign.slo, seconds)


def burst_rate(levels: Sequence[Level], workload: Workload) -> float | None:
    """Return the requests/s that the fastest burst suggests: its output tokens per second, divided
    by the mean output tokens of the workload's requests. None: no burst was answered.

    This is a rough figure: a burst's prompts may be shorter than the workload's, and its slots
    become empty one after the other.
    """
    speeds = [
        float(np.nansum(level.requested_output_tokens) / np.nanmax(level.last))
        for level in levels
        if level.is_burst and not level.is_set_aside and np.isfinite(level.last).any()
    ]
    if not speeds:
        return None
    return max(speeds) / float(lengths_of(workload, 400, 1).output.mean())


def estimate_of(record: CellRecord) -> journal.Capacity:
    """Return the capacity of a cell by all its levels so far: from the step-time model if the
    calibration gave one that fits, otherwise from the levels alone."""
    levels = [*record.counted_levels, *record.set_aside_levels]
    return estimate(
        [*levels, *record.unloaded_checks, *record.bursts],
        record.campaign.slo,
        record.server,
        demand_of(record.campaign),
        min_level_seconds=record.min_level_seconds,
        unit_rate=record.unit_rate,
    )


def demand_of(campaign: Campaign) -> Demand:
    return Demand(campaign.workload, campaign.arrivals)


def assumed_settings(
    slots: int, workload: Workload, kv_tokens: int | None = None
) -> SchedulerSettings:
    """Return the scheduler settings to assume of a server of which only the slots are known: vLLM's
    default number of tokens per step, and no target for the duration of a step.

    `kv_tokens`: None for a KV cache that is never full.
    """
    lengths = lengths_of(workload, 1000, 1)
    return SchedulerSettings(
        slots=slots,
        context_tokens=int((lengths.prompt + lengths.output).max()),
        kv_tokens=kv_tokens,
        prefill_tokens=VLLM_STEP_TOKENS,
        step_tokens=VLLM_STEP_TOKENS,
        step_seconds_target=None,
    )


def with_less_reuse(
    capacity: journal.Capacity, server: ServerModel, demand: Demand, slo: Slo
) -> journal.Capacity:
    """Return the capacity with what it would be if the server computed each conversation's history
    again, and if it kept histories only in its slots. It is unchanged if the server reuses no
    histories, if there are no conversations, or if nothing is estimated.

    The estimate is multiplied by the ratio of two simulated capacities, so that both differ in
    nothing but the reuse.
    """
    if server.reuse is None or server.reuse.kind == "none":
        return capacity
    if not capacity.estimated_rate or capacity.method != "step_times":
        return capacity
    loaded = server_under_load(server, capacity)
    own = loaded.capacity(demand, slo, QUICK_REQUESTS)
    if not own.rate:
        return capacity

    def users_of(other: SimulatedCapacity) -> float | None:
        if capacity.users is None or not own.users:
            return None
        return capacity.users * (other.users or 0.0) / own.users

    without_reuse = loaded.without_reuse().capacity(demand, slo, QUICK_REQUESTS)
    capacity = msgspec.structs.replace(
        capacity,
        estimated_rate_without_reuse=capacity.estimated_rate * without_reuse.rate / own.rate,
        users_without_reuse=users_of(without_reuse),
    )
    if not server.settings.stored_tokens:
        return capacity
    without_cache = loaded.without_prompt_cache().capacity(demand, slo, QUICK_REQUESTS)
    return msgspec.structs.replace(capacity, users_without_prompt_cache=users_of(without_cache))
