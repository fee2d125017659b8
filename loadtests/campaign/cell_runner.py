"""Measures one configuration: single streams, two bursts, a step-time model, an estimate, and the
load level that confirms it.

    capacity = CellRun(state, part, progress, clock).run(open_bench)

What comes next is decided by next_measurement.py from what is on record, and is carried out and
recorded here. Everything that is needed to continue after a kill is in `state`, which is read from
the run folder. A ServerBench measures on a server that is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from crossover.loadtests.campaign.campaign_file import Campaign
from crossover.loadtests.campaign.level_runner import LevelSpec, OpenBench, ServerBench, level_text
from crossover.loadtests.campaign.next_measurement import (
    CALIBRATION_SECONDS,
    Calibrate,
    CellProgress,
    Measurement,
    RestartServer,
    RunLevel,
    SingleStream,
    Stop,
    next_measurement,
)
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.resume_state import CellRecord, CellState, seed_of
from crossover.loadtests.capacity import capacity_text
from crossover.loadtests.capacity.calibration_bursts import Burst, calibrate, request_seconds
from crossover.loadtests.capacity.capacity_estimate import estimate
from crossover.loadtests.capacity.prefix_reuse import (
    measured_history_reuse,
    measured_reasoning_share,
    measured_reuse,
)
from crossover.loadtests.capacity.sharper_slo import advice
from crossover.loadtests.errors import LevelInterrupted, LoadError, ServerLost
from crossover.loadtests.levels.disturbance import in_words
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.records import journal_events as journal
from crossover.models import formatting
from crossover.serving.capacity.batching_simulator import Reuse
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    LOADED,
    QUICK_REQUESTS,
    PrefixReuse,
    lengths_of,
)
from crossover.serving.capacity.simulated_capacity import capacity as simulate_capacity
from crossover.serving.workload.request_lengths import Workload

VLLM_STEP_TOKENS = 2048
MAX_SERVERS = 4  # starts for one cell in one block and sitting
MAX_WAIT_SECONDS = 30.0  # until a disturbed level is tried again: 2, 4, 8 ... so many
BURST_TRIES = 2


class CellRun:
    """A cell's part of a block in one sitting."""

    bench: ServerBench  # while it serves

    def __init__(
        self,
        state: CellState,
        part: journal.CellStarted,
        progress: Progress,
        clock: Callable[[], float],
        *,
        to_confirm: bool = True,
    ) -> None:
        self.state, self.part, self.progress, self.clock = state, part, progress, clock
        self.campaign, self.slo = state.campaign, state.campaign.slo
        self.to_confirm = to_confirm

    def run(self, open_bench: OpenBench) -> journal.Capacity:
        """Return the capacity after everything that this block pays for.

        Where a level is interrupted or the server is lost, the server is started again. Raises
        LoadError.
        """
        state, interruptions = self.state, 0
        for _ in range(MAX_SERVERS):
            if state.levels and isinstance(self.next_measurement(), Stop):
                break  # no server is started
            try:
                with open_bench(state) as self.bench:
                    last = self._measure()
                if not isinstance(last, RestartServer):
                    break
                self.progress.say(f"  {last.reason}")
            except (LevelInterrupted, ServerLost) as problem:
                interruptions += 1
                state.event(journal.Interrupted(cell=state.key, reason=str(problem)))
                self.progress.say(f"  {problem}; measuring it again", style="yellow")
                if interruptions == MAX_SERVERS:
                    raise LoadError(
                        f"interrupted {interruptions} times; the last time: {problem}"
                    ) from None
        return self._with_advice(capacity_of(state))

    def _with_advice(self, capacity: journal.Capacity) -> journal.Capacity:
        """With the SLO that would be sharper, where the SLO itself makes the interval wide, and
        with the estimate without prefix caching."""
        calibrated = self.state.calibrated
        if calibrated is None or calibrated.step_times is None or calibrated.policy is None:
            return capacity
        text = advice(
            capacity,
            calibrated.step_times,
            calibrated.policy,
            self.campaign.workload,
            self.slo,
            arrivals=self.campaign.arrivals,
            reused_share=calibrated.reused_share,
            reuse=calibrated.reuse,
            reasoning_share=calibrated.reasoning_share,
        )
        without_reuse = rate_without_reuse(capacity, calibrated, self.campaign)
        return msgspec.structs.replace(
            capacity, advice=text, estimated_rate_without_reuse=without_reuse
        )

    def next_measurement(self) -> Measurement:
        """Decided from the journal alone, so that a resumed campaign continues where it stopped."""
        return next_measurement(cell_progress(self.state, self.part, confirms=self.to_confirm))

    def _measure(self) -> RestartServer | Stop | None:
        """Measure until this server has nothing left to measure; return the decision that ended it.

        None: the machine was never idle.
        """
        while True:
            measurement = self.next_measurement()
            match measurement:
                case RestartServer():
                    return measurement
                case Stop(reason):
                    self.progress.detail(f"  nothing more is measured: {reason}")
                    return measurement
                case Calibrate(seconds):
                    self._calibrate(seconds)
                case SingleStream(requests, seconds):
                    spec = LevelSpec(requests=requests, window_seconds=seconds)
                    if not self._measure_level(spec):
                        return None
                case RunLevel(rate, seconds, warmup_seconds):
                    spec = LevelSpec(
                        rate=rate, window_seconds=seconds, warmup_seconds=warmup_seconds
                    )
                    if not self._measure_level(spec):
                        return None

    def _measure_level(self, spec: LevelSpec) -> bool:
        """Measure a level and print what it shows; False: the machine was never idle."""
        level = self._level_that_counts(spec)
        if level is None:
            return False
        capacity = capacity_of(self.state)
        unit_rate = capacity_text.common_rate([capacity])
        self.progress.detail(f"  {level_text(level, self.slo, unit_rate)}")
        if level.rate and not self.campaign.search.rates:
            words = capacity_text.in_words(capacity)
            self.progress.found(self.state.key, words)
            self.progress.detail(f"  so far: {words}")
        return True

    def _calibrate(self, seconds: float) -> None:
        """Send the bursts, fit the step-time model and record it.

        Bursts that are in the journal are not sent again. A disturbed burst is sent again once,
        then left out.
        """
        state, started_at, spent_before = self.state, self.clock(), self.state.spent_seconds
        recorded = {
            level.name.rpartition(".")[0]: level
            for level in state.levels
            if level.started.is_burst and not level.is_set_aside
        }
        number = 0

        def send(burst: Burst) -> Level | None:
            nonlocal number
            number += 1
            name = f"burst.{number}"
            if (level := recorded.get(f"{state.key}#{name}")) is not None:
                return level
            for _ in range(BURST_TRIES):
                self.progress.tick(f"{state.key}: calibrating, {burst.streams} at a time")
                spec = LevelSpec(
                    burst=burst, window_seconds=CALIBRATION_SECONDS, counts_slight=True
                )
                level = self._attempt(spec, name)
                if not level.is_set_aside:
                    return level
            return None

        policy, workload = self.bench.policy, self.campaign.workload
        single_streams = [level for level in state.counted if level.is_single_stream]
        slots = self.bench.slots if policy is None else policy.slots
        model = state.cell.spec
        experts = model.experts.routing if model is not None and model.experts is not None else None
        calibration = calibrate(send, workload, slots, seconds, single_streams, experts)
        if policy is None and calibration.slots is not None:
            # A server that does not say its settings.
            policy = settings_of_another(calibration.slots, workload, self.bench.kv_tokens)
        step_times = calibration.step_times
        if step_times is not None and policy is not None:
            step_times = msgspec.structs.replace(
                step_times, request_seconds=request_seconds(step_times, policy, single_streams)
            )
        took = self.clock() - started_at
        # The bursts' own time is on record with each of them: this is the rest.
        spent = took - (state.spent_seconds - spent_before)
        state.event(
            journal.Calibrated(
                cell=state.key,
                spent_seconds=round(max(0.0, spent), 3),
                step_times=step_times,
                policy=policy,
                reused_share=measured_reuse(workload, single_streams) if policy else 0.0,
                reuse=self._history_reuse(single_streams) if workload.has_sessions else None,
                reasoning_share=measured_reasoning_share(single_streams),
                reason=calibration.reason,
            )
        )
        if calibration.step_times is not None:
            words = capacity_text.in_words(capacity_of(state))
        else:
            words = f"no step-time model, {calibration.reason}"
        self.progress.say(f"  calibrated in {formatting.duration(took)}: {words}")

    def _history_reuse(self, single_streams: Sequence[Level]) -> PrefixReuse:
        """What the server saved of conversations' histories, and how it says that it does."""
        ready = self.state.ready
        reuse = ready.info.prefix_reuse if ready is not None else None
        is_checkpointed = reuse is not None and reuse.startswith("from checkpoints")
        kind: Reuse = "checkpoints" if is_checkpointed else "any prefix"
        return measured_history_reuse(single_streams, kind)

    def _level_that_counts(self, spec: LevelSpec) -> Level | None:
        """One level, measured again after a pause while it is disturbed; None: patience is used up.

        Disturbed levels and pauses cost the cell's patience, not its budget. Raises
        LevelInterrupted, LoadError.
        """
        state, say, pauses = self.state, self.progress.say, 0
        patience = min(self.campaign.wait_seconds, self.part.until_seconds)
        while True:
            is_patient = patience > state.lost_seconds
            spec = msgspec.structs.replace(spec, counts_slight=not is_patient)
            level = self._attempt(spec, str(len(state.counted) + 1))
            disturbance = level.finished and level.finished.disturbance
            if not disturbance or not disturbance.is_set_aside:
                return level
            say(f"  {level_text(level, self.slo)}", style="yellow")
            cause = in_words(disturbance)
            if not is_patient:
                state.event(journal.NeverQuiet(cell=state.key, reason=cause))
                say(f"  the machine was never idle: {cause}; measuring nothing more", "yellow")
                return None
            pauses += 1
            patience_left = max(0.0, patience - state.lost_seconds)
            pause = round(min(2.0**pauses, MAX_WAIT_SECONDS, patience_left), 3)
            pause_words = formatting.duration(pause)
            say(f"  disturbed: {cause}; waiting for an idle machine, {pause_words}", "yellow")
            self.bench.rest(pause)
            state.event(journal.Waited(cell=state.key, reason=cause, spent_seconds=pause))

    def _attempt(self, spec: LevelSpec, number: str) -> Level:
        """One attempt at a level, under a name of its own; an interruption is recorded.

        Raises LevelInterrupted, ServerFailed.
        """
        state, started_at = self.state, self.clock()
        name = state.next_name(number)
        seed = seed_of(self.campaign.seed, state.cell, name)
        try:
            return self.bench.measure(msgspec.structs.replace(spec, name=name, seed=seed))
        except LevelInterrupted as problem:
            spent = round(self.clock() - started_at, 3)
            state.event(
                journal.LevelAbandoned(
                    cell=state.key, level=name, reason=str(problem), spent_seconds=spent
                )
            )
            raise


def cell_progress(state: CellRecord, part: journal.CellStarted, *, confirms: bool) -> CellProgress:
    """What is on record of a cell, as far as the next measurement depends on it."""
    campaign, calibrated = state.campaign, state.calibrated
    has_no_model = calibrated is not None and calibrated.step_times is None
    return CellProgress(
        slo=campaign.slo,
        workload=campaign.workload,
        search=campaign.search,
        levels=state.counted,
        capacity=capacity_of(state),
        is_calibrated=calibrated is not None,
        burst_rate=burst_rate(state.levels, campaign.workload) if has_no_model else None,
        server_start=None if state.cell.url is not None else state.starts,
        block=part.block,
        left_seconds=part.until_seconds - state.spent_seconds,
        min_level_seconds=state.level_seconds,
        max_single_stream_seconds=campaign.search.single_stream_seconds_on(state.device),
        confirms=confirms,
    )


def burst_rate(levels: Sequence[Level], workload: Workload) -> float | None:
    """Return the requests/s that the fastest burst suggests: its output tokens per second, in mean
    answers of the workload. None: no burst was answered.

    It is rough, since a burst's prompts may be shorter and its slots empty one after the other.
    """
    speeds = [
        float(np.nansum(level.requested_output_tokens) / np.nanmax(level.last))
        for level in levels
        if level.started.is_burst and not level.is_set_aside and np.isfinite(level.last).any()
    ]
    if not speeds:
        return None
    return max(speeds) / float(lengths_of(workload, 400, 1).output.mean())


def capacity_of(state: CellRecord) -> journal.Capacity:
    """What all levels so far say: by the step-time model, where calibration gave one that fits,
    else by levels alone.
    """
    made, campaign = state.calibrated, state.campaign
    return estimate(
        state.counted,
        campaign.slo,
        step_times=None if made is None else made.step_times,
        policy=None if made is None else made.policy,
        reused_share=0.0 if made is None else made.reused_share,
        reuse=None if made is None else made.reuse,
        reasoning_share=0.0 if made is None else made.reasoning_share,
        workload=campaign.workload,
        arrivals=campaign.arrivals,
        least_seconds=state.level_seconds,
    )


def settings_of_another(
    slots: int, workload: Workload, kv_tokens: int | None = None
) -> SchedulerSettings:
    """Return the settings of a server that only says or shows its slots: tokens of a step as vLLM's
    server has them by default, and no target for a step's time. `kv_tokens` None: a KV cache that
    is never full."""
    lengths = lengths_of(workload, 1000, 1)
    return SchedulerSettings(
        slots=slots,
        context_tokens=int((lengths.prompt + lengths.output).max()),
        kv_tokens=kv_tokens,
        prefill_tokens=VLLM_STEP_TOKENS,
        step_tokens=VLLM_STEP_TOKENS,
        step_seconds_target=None,
    )


def rate_without_reuse(
    found: journal.Capacity, made: journal.Calibrated, campaign: Campaign
) -> float | None:
    """The estimated capacity if the server computed each conversation's history again; None: it
    does, there are no conversations, or nothing is estimated."""
    reuse, step_times, policy = made.reuse, made.step_times, made.policy
    is_told = (
        reuse is not None and reuse.kind != "none" and step_times is not None and policy is not None
    )
    if not is_told or not found.estimated_rate or found.method != "step_times":
        return None
    assert reuse is not None and step_times is not None and policy is not None
    nothing = msgspec.structs.replace(reuse, kind="none")
    with_reuse, without = (
        simulate_capacity(
            step_times.slower(found.factor or LOADED),
            policy,
            campaign.workload,
            campaign.slo,
            arrivals=campaign.arrivals,
            reuse=one,
            reasoning_share=made.reasoning_share,
            requests=QUICK_REQUESTS,
        ).rate
        for one in (reuse, nothing)
    )
    return found.estimated_rate * without / with_reuse if with_reuse > 0 else None
