"""Measures one configuration: single streams, two bursts, a step-time model, an estimate, and the
load level that confirms it.

    capacity = CellRun(state, part, progress, clock).run(open_bench)

    start -> single streams -> bursts -> step-time model -> estimated capacity Y -> a level at 0.8 Y
    -> a correction factor from its steps -> Y again. Done if the level met the SLO and Y is at most
    1.4 times its rate; otherwise one more level.

`next_step` is decided from the journal alone: everything that is needed to continue after a kill is
in `state`, which is read from the run folder. A Bench measures on a server that is ready. If no
step-time model fits, levels alone find the capacity: the rate doubles while levels meet the SLO and
halves while they miss it; then come the middles of the two, until they are within a factor of
NARROW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from crossover.loadtests.campaign.campaign_file import Campaign
from crossover.loadtests.campaign.level_runner import LevelSpec, OpenBench, ServerBench, level_text
from crossover.loadtests.campaign.progress import Progress
from crossover.loadtests.campaign.resume_state import CellRecord, CellState, seed_of
from crossover.loadtests.capacity import capacity_text
from crossover.loadtests.capacity.calibration_bursts import Burst, calibrate
from crossover.loadtests.capacity.capacity_estimate import (
    AS_ONE_BY_LEVELS,
    CONFIRMING_SHARE,
    confirming_seconds,
    estimate,
)
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
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import (
    LOADED,
    QUICK_REQUESTS,
    PrefixReuse,
    capacity,
    lengths_of,
)
from crossover.serving.capacity.slo import LIMITS, requests_to_hold
from crossover.serving.workload.conversations import session_seconds
from crossover.serving.workload.request_lengths import Workload

ENOUGH = 1.4  # a limit that is higher above the confirmed rate is worth one more level
MAX_LEVELS = 2  # at a start: a level at 0.8 Y, and one more
MAX_TRIES = 4  # levels while none has held
MAX_ALONE = 4  # levels of single streams, where a few slow requests do not tell yet
NEAR = 0.5  # of the limit: lower levels do not count as tries
CALIBRATION_SECONDS, MIN_CALIBRATION_SECONDS = 30.0, 5.0
MIN_WARMUP_SECONDS, MAX_WARMUP_SECONDS = 5.0, 20.0
MAX_SESSION_SECONDS = 300.0  # of warm-up, for conversations
NARROW = 1.25  # between the highest rate that held and the lowest that failed
LOWEST = 1 / 50  # of the first rate that is tried: below it requests hardly ever meet
LOWER = 0.85  # of a rate that did not hold: where the next level is put at the highest

VLLM_STEP_TOKENS = 2048
MAX_SERVERS = 4  # starts for one cell in one block and sitting
MAX_WAIT_SECONDS = 30.0  # until a disturbed level is tried again: 2, 4, 8 ... so many
BURST_TRIES = 2


class Calibrate(NamedTuple):
    """Bursts, within so many seconds; then the step-time model."""

    seconds: float


RESTART: Literal["restart"] = "restart"  # the server, and ask again
# None: nothing is left to measure, or to pay for
Step = LevelSpec | Calibrate | Literal["restart"] | None


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
        self.search = state.campaign.search
        self.to_confirm = to_confirm

    def run(self, open_bench: OpenBench) -> journal.Capacity:
        """The capacity after all that this block pays for. Where a level is interrupted, or the
        server lost, it is started again. Raises LoadError.
        """
        state, lost = self.state, 0
        for _ in range(MAX_SERVERS):
            if state.levels and self.next_step() is None:
                break  # decided: no server is started
            try:
                with open_bench(state) as self.bench:
                    if self._measure():
                        break
                self.progress.say(
                    "  the SLO is missed even without load; restarting the server to verify"
                )
            except (LevelInterrupted, ServerLost) as problem:
                lost += 1
                state.event(journal.Interrupted(cell=state.key, reason=str(problem)))
                self.progress.say(f"  {problem}; measuring it again", style="yellow")
                if lost == MAX_SERVERS:
                    raise LoadError(f"interrupted {lost} times; the last time: {problem}") from None
        return self._advised(capacity_of(state))

    def _advised(self, found: journal.Capacity) -> journal.Capacity:
        """With the SLO that would be sharper, where the SLO itself makes the interval wide."""
        made = self.state.calibrated
        if made is None or made.step_times is None or made.policy is None:
            return found
        text = advice(
            found,
            made.step_times,
            made.policy,
            self.campaign.workload,
            self.slo,
            arrivals=self.campaign.arrivals,
            reused_share=made.reused_share,
            reuse=made.reuse,
            reasoning_share=made.reasoning_share,
        )
        without = rate_without_reuse(found, made, self.campaign)
        return msgspec.structs.replace(found, advice=text, estimated_rate_without_reuse=without)

    # What to measure next.

    def next_step(self) -> Step:
        """By all that is in the journal."""
        state = self.state
        self.alone = [level for level in state.counted if level.is_single_stream]
        self.loaded = [level for level in state.counted if level.rate is not None]
        known = [seconds for one in self.alone if (seconds := one.mean(one.e2e)) is not None]
        # of a single-stream request, in the mean; None where none ended
        self.alone_seconds = sum(known) / len(known) if known else None
        self.left_seconds = self.part.until_seconds - state.spent_seconds
        # two answers of an idle server: its queue has to fill first
        warmup = max(MIN_WARMUP_SECONDS, 2 * (self.alone_seconds or 0.0))
        warmup = min(warmup, MAX_WARMUP_SECONDS)
        # Of conversations: until late turns come as often as first ones.
        talking = session_seconds(self.campaign.workload, self.alone_seconds or 0.0)
        self.warmup_seconds = round(max(warmup, min(talking, MAX_SESSION_SECONDS)), 1)
        single = LevelSpec(
            requests=self.search.single_stream_requests,
            window_seconds=self.search.single_stream_seconds_on(state.device),
        )
        if not self.alone:
            return single
        if rates := self.search.rates:
            if len(self.loaded) >= len(rates):
                return None
            return self._ask(rates[len(self.loaded)], state.level_seconds)
        self.found = found = capacity_of(state)
        # of the server that serves now, from 1; None: it cannot be started again
        self.start = None if state.cell.url is not None else state.starts
        if found.state == "misses_slo_unloaded":
            if self.start is None:  # what cannot be started again must say so in a second level
                is_again = len(self.alone) < 2 and self.left_seconds > 0
                return single if is_again else None
            if found.starts >= 2:
                return None
            if all(a.started.start != self.start for a in self.alone):
                return single
            return RESTART
        fails_alone = self._verdict(self.alone[-1]) == "misses"
        if fails_alone and self.left_seconds > 0 and len(self.alone) < MAX_ALONE:
            return single  # too few to say so
        # Without a limit of latency a step-time model tells nothing.
        has_limit = any(getattr(self.slo, name) is not None for name in LIMITS.values())
        seconds = min(CALIBRATION_SECONDS, self.left_seconds)
        if has_limit and state.calibrated is None and seconds >= MIN_CALIBRATION_SECONDS:
            return Calibrate(seconds)
        if not self.to_confirm or fails_alone:
            return None
        if found.method == "step_times" and has_limit:
            return self._confirming(found.estimated_rate) if found.estimated_rate else None
        return self._searching()

    def _verdict(self, level: Level) -> str:
        return level.judge(self.slo).verdict

    def _confirming(self, limit: float) -> LevelSpec | None:
        """The level that confirms 0.8 of the estimate: one, and one more where that did not hold or
        the limit is far above it; more only while nothing holds, each lower, and the budget pays.
        """
        found = self.found
        held = [one.rate or 0.0 for one in self.loaded if self._verdict(one) == "meets"]
        asked = max(held, default=0.0)  # what came may be a little less
        block = min(self.part.block, self.search.starts)
        is_near = bool(found.confirmed_rate) and limit <= ENOUGH * asked
        if is_near and found.starts >= block:
            return None
        here = [one for one in self.loaded if self.start in (None, one.started.start)]
        tries = [one for one in here if (one.rate or 0.0) >= NEAR * limit]
        if len(tries) >= (MAX_LEVELS if found.confirmed_rate else MAX_TRIES):
            return None
        if block > 1 and is_near:
            return self._level(asked)
        failed = [one.rate or 0.0 for one in self.loaded if self._verdict(one) == "misses"]
        rate = CONFIRMING_SHARE * min([limit, *failed])
        if self.loaded and not found.confirmed_rate:
            rate = min(rate, LOWER * (self.loaded[-1].rate or 0.0))
        return self._level(rate)

    def _searching(self) -> LevelSpec | None:
        """By levels alone: the rate that narrows, then the level that confirms the low side."""
        tried = []
        for level in self.loaded:
            told = level.judge(self.slo)
            is_open = told.verdict == "unresolved" and told.steady is not False
            is_up = is_open and (told.share or 0.0) >= self.slo.target
            tried.append((level.rate or 0.0, told.verdict == "meets" or is_up))
        start = self.found.estimated_rate or (
            1 / self.alone_seconds if self.alone_seconds else None
        )
        rate = None if start is None else next_rate(tried, start)
        if rate is None:
            return None
        again = sum(level.rate == rate for level in self.loaded)
        if again and not any(self._verdict(one) == "misses" for one in self.loaded):
            rate = NARROW * min(at for at, is_up in tried if not is_up)  # it bounds nothing yet
        elif again > MAX_LEVELS or (again and self.found.is_confirmed):
            return None
        return self._level(rate, by_levels=True)

    def _level(self, rate: float, *, by_levels: bool = False) -> LevelSpec | None:
        """A level as long as it takes to tell, as far as the budget pays; None: it does not.

        By levels alone, one in which not even all requests good would prove the rate tells nothing.
        """
        rate, alone, least = float(f"{rate:.3g}"), self.alone_seconds, self.state.level_seconds
        affordable = self.left_seconds - self.warmup_seconds - 2 * (alone or 0.0)
        proves = AS_ONE_BY_LEVELS * requests_to_hold(self.slo) / rate if by_levels else 0.0
        if affordable < max(least, proves):
            return None
        wanted = confirming_seconds(self.slo, rate, alone, by_levels=by_levels, least_seconds=least)
        return self._ask(rate, round(min(wanted, affordable), 1))

    def _ask(self, rate: float, seconds: float) -> LevelSpec:
        return LevelSpec(rate=rate, window_seconds=seconds, warmup_seconds=self.warmup_seconds)

    # Doing it.

    def _measure(self) -> bool:
        """Steps until nothing is left to measure in this block; False: on this server."""
        while (step := self.next_step()) is not None:
            if step == RESTART:
                return False
            if isinstance(step, Calibrate):
                self._calibrate(step.seconds)
                continue
            level = self._level_that_counts(step)
            if level is None:
                break
            found = capacity_of(self.state)
            like = capacity_text.common_rate([found])
            self.progress.detail(f"  {level_text(level, self.slo, like)}")
            if level.rate and not self.search.rates:
                words = capacity_text.in_words(found)
                self.progress.found(self.state.key, words)
                self.progress.detail(f"  so far: {words}")
        return True

    def _calibrate(self, seconds: float) -> None:
        """Bursts, the step-time model and the first estimate, on record. Those of the journal are
        not sent again. A burst that is disturbed is sent again once, then left out.
        """
        state, began, spent_before = self.state, self.clock(), self.state.spent_seconds
        sent = [one for one in state.levels if one.started.is_burst and not one.is_set_aside]
        before = {one.name.rpartition(".")[0]: one for one in sent}
        number = 0

        def ask(burst: Burst) -> Level | None:
            nonlocal number
            number += 1
            if (known := before.get(f"{state.key}#burst.{number}")) is not None:
                return known
            for _ in range(BURST_TRIES):
                self.progress.tick(f"{state.key}: calibrating, {burst.streams} at a time")
                asked = LevelSpec(
                    burst=burst, window_seconds=CALIBRATION_SECONDS, counts_slight=True
                )
                level = self._attempt(asked, f"burst.{number}")
                if not level.is_set_aside:
                    return level
            return None

        policy, workload = self.bench.policy, self.campaign.workload
        single = [one for one in state.counted if one.is_single_stream]
        slots = self.bench.slots if policy is None else policy.slots
        spec = state.cell.spec
        experts = spec.experts.routing if spec is not None and spec.experts is not None else None
        found = calibrate(ask, workload, slots, seconds, single, experts)
        if policy is None and found.slots is not None:  # a server that does not say its settings
            policy = settings_of_another(found.slots, workload, self.bench.kv_tokens)
        took = self.clock() - began
        # The bursts' own time is on record with each: here is what the rest took.
        spent = took - (state.spent_seconds - spent_before)
        made = journal.Calibrated(
            cell=state.key,
            spent_seconds=round(max(0.0, spent), 3),
            step_times=found.step_times,
            policy=policy,
            reused_share=measured_reuse(workload, single) if policy is not None else 0.0,
            reuse=self._measured_history_reuse(single) if workload.has_sessions else None,
            reasoning_share=measured_reasoning_share(single),
            reason=found.reason,
        )
        state.event(made)
        limit = capacity_text.in_words(capacity_of(state))
        words = limit if found.step_times is not None else f"no step-time model, {found.reason}"
        self.progress.say(f"  calibrated in {formatting.duration(took)}: {words}")

    def _measured_history_reuse(self, single: Sequence[Level]) -> PrefixReuse:
        """What the server saved of histories, with the way that it says it does."""
        said = self.state.ready.info.prefix_reuse if self.state.ready is not None else None
        is_checkpointed = said is not None and said.startswith("from checkpoints")
        return measured_history_reuse(single, "checkpoints" if is_checkpointed else "any prefix")

    def _level_that_counts(self, asked: LevelSpec) -> Level | None:
        """One level, measured again after a pause where it was disturbed: that costs the cell's
        patience, not its budget. None: it is used up. Raises LevelInterrupted, LoadError.
        """
        state, say, pauses = self.state, self.progress.say, 0
        patience = min(self.campaign.wait_seconds, self.part.until_seconds)
        while True:
            is_patient = patience > state.lost_seconds
            asked = msgspec.structs.replace(asked, counts_slight=not is_patient)
            level = self._attempt(asked, str(len(state.counted) + 1))
            taken = level.finished and level.finished.disturbance
            if not taken or not taken.is_set_aside:
                return level
            say(f"  {level_text(level, self.slo)}", style="yellow")
            by = in_words(taken)
            if not is_patient:
                state.event(journal.NeverQuiet(cell=state.key, reason=by))
                say(f"  the machine was never idle: {by}; measuring nothing more", style="yellow")
                return None
            pauses += 1
            left = max(0.0, patience - state.lost_seconds)
            pause = round(min(2.0**pauses, MAX_WAIT_SECONDS, left), 3)
            took = formatting.duration(pause)
            say(f"  disturbed: {by}; waiting for an idle machine, {took}", style="yellow")
            self.bench.rest(pause)
            state.event(journal.Waited(cell=state.key, reason=by, spent_seconds=pause))

    def _attempt(self, asked: LevelSpec, number: str) -> Level:
        """One attempt under a name of its own; an interruption is on record.

        Raises LevelInterrupted, ServerFailed.
        """
        state, began = self.state, self.clock()
        name = state.next_name(number)
        seed = seed_of(self.campaign.seed, state.cell, name)
        try:
            return self.bench.measure(msgspec.structs.replace(asked, name=name, seed=seed))
        except LevelInterrupted as problem:
            spent = round(self.clock() - began, 3)
            state.event(
                journal.LevelAbandoned(
                    cell=state.key, level=name, reason=str(problem), spent_seconds=spent
                )
            )
            raise


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
        capacity(
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


def next_rate(tried: Sequence[tuple[float, bool]], start: float) -> float | None:
    """Requests/s after these, of which a level met the SLO so far or not; once both sides of the
    limit are known and near enough, the low one. None: no rate is left to try.

    `start`: where to begin: the rate of one stream, or what a rough step-time model says.
    """
    high = min((rate for rate, is_up in tried if not is_up), default=math.inf)
    low = max((rate for rate, is_up in tried if is_up and rate < high), default=0.0)
    if not tried:
        return start
    if high == math.inf:
        return 2 * low
    if not low:
        return high / 2 if high / 2 >= LOWEST * start else None
    return low if high / low <= NARROW * 1.001 else math.sqrt(low * high)
