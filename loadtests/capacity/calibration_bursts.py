"""Calibration: some 20 s of requests out of which the step-time model is fitted.

    calibration = calibrate(send_burst, workload, 8, 20.0, [single_stream_level])
    calibration.step_times, calibration.reason     # the step-time model, or why there is none

Single streams tell what a prompt and one decode row cost. Then come two bursts: streams that are
sent at one moment and end one after the other, so that each tells a step's time at several numbers
of decode rows, and at its beginning what several prompts in one step cost. The first has short
prompts, the second the workload's own lengths: that tells what context costs. Where an endpoint
does not say its slots, bursts of 2, 4, 8 ... find them.

Where the step-time model does not fit, either something else ran beside the bursts or no step-time
model describes the engine. So the bursts are asked again once, and those count whose steps the
step-time model fits better.

What is asked depends on lengths and on what was seen, not on a clock, so a calibration that is
taken up again asks the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from crossover.loadtests.capacity.step_observation import merged_steps, observed_steps
from crossover.loadtests.levels.level_columns import Level
from crossover.models.model_spec import Routing
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import Lengths, Server, lengths_of
from crossover.serving.capacity.step_time_model import (
    FITS,
    MIN_OBSERVATIONS,
    StepObservation,
    StepTimeModel,
    fit_step_times,
)
from crossover.serving.errors import WorkloadError
from crossover.serving.workload.request_lengths import Workload

SHORT_PROMPT = 16
MAX_STREAMS = 64
MAX_SLOTS = 64  # that are looked for
LADDER = (1.0, 0.75, 0.5, 0.375, 0.25)  # of the streams, the decode rows to visit
PAIRS = 2  # of bursts, where steps are off the step-time model after the first
STEPS = (4, 32)  # at each number of rows, at least and at most
SCALING = 0.8  # power of rows by which a step is expected to grow before several were seen
PROMPTS_SHARE = 0.4  # of a burst's time
MIN_CONTEXT = 0.5  # of the mean prompt: shorter contexts do not tell what a token costs
AHEAD = 4  # steps, and an eighth of the streams: that the first stream starts before the last
PIECE = 256  # prompt tokens that are expected to share a step with decode rows


class Burst(msgspec.Struct, frozen=True):
    """Streams that are sent at one moment, in this order: tokens of each prompt and answer."""

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]

    @property
    def streams(self) -> int:
        return len(self.output_tokens)


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration found."""

    slots: int | None  # as served, or as found; None: not found
    step_times: StepTimeModel | None
    reason: str  # why there is no step-time model


# Sends a burst and waits for its end; None: it tells nothing.
SendBurst = Callable[[Burst], Level | None]


def calibrate(
    ask: SendBurst,
    workload: Workload,
    slots: int | None,
    seconds: float,
    alone: Sequence[Level],
    experts: Routing | None = None,
) -> Calibration:
    """Two bursts beside `alone`, the single streams, and the step-time model. `slots` None: find
    them. `experts`: of a mixture; None: of a dense model, or not known.

    Nothing is asked that is expected to pass `seconds`, but for one burst of two streams, and
    bursts that are asked again.
    """
    prompts = lengths_of(workload, 400, 1).prompt  # of conversations with their histories
    seen = _Seen(ask, prompts, seconds, experts)
    for level in alone:
        seen.take(level)
    if slots is None and seen.has_steps:
        slots = seen.find_slots()
    step_times, reason = seen.step_times_of_bursts(slots, seconds - seen.spent)
    return Calibration(slots=slots, step_times=step_times, reason=reason)


class _Seen:
    """What was asked and seen so far."""

    def __init__(
        self,
        ask: SendBurst,
        prompts: np.typing.NDArray[np.int64],
        seconds: float,
        experts: Routing | None,
    ) -> None:
        self.observations: list[StepObservation] = []
        self.spent = 0.0
        self.has_steps = False
        self._ask, self._prompts, self._seconds = ask, prompts, seconds
        self._experts = experts

    def take(self, level: Level) -> None:
        """Add what a level's stamps tell of steps."""
        if not len(level.chunks):
            return
        # All of a burst are under way at once; slots below its streams only merge more steps.
        steps, _ = observed_steps(level, max(len(level.due), 1), self._experts)
        self.has_steps = self.has_steps or bool(steps)
        self.observations += merged_steps(steps)

    def ask(self, prompts: Sequence[int], outputs: Sequence[int]) -> Level | None:
        level = self._ask(Burst(tuple(map(int, prompts)), tuple(map(int, outputs))))
        if level is not None and len(level.chunks):
            self.spent += float(np.nanmax(level.chunks))
            self.take(level)
        return level

    def find_slots(self) -> int | None:
        """Streams served together, by bursts of 2, 4, 8 ...; None: too slow to find out."""
        served, streams = None, 2
        while streams <= MAX_SLOTS:
            tokens = STEPS[0] + AHEAD + streams
            cost = tokens * self._expected(streams) + self._fill(SHORT_PROMPT) * streams
            if streams > 2 and cost > (self._seconds - self.spent) / 2:
                break
            level = self.ask([SHORT_PROMPT] * streams, [tokens] * streams)
            if level is None:
                break
            at_once = most_at_once(level)
            served = max(served or 1, at_once)
            if at_once < streams:
                break
            streams *= 2
        return served

    def step_times_of_bursts(
        self, slots: int | None, seconds: float
    ) -> tuple[StepTimeModel | None, str]:
        """The step-time model with two bursts within so many seconds, and as many again where it
        does not fit.

        Where there is none: None and why.
        """
        if not self.has_steps:
            return None, "the server's chunks have several tokens or none, so its steps are unknown"
        before, streams = self.observations, min(slots or 0, MAX_STREAMS)
        found: list[StepTimeModel] = []
        while len(found) < PAIRS and not (found and found[-1].fits):
            self.observations, until = list(before), self.spent + seconds
            for left in (2, 1):
                self.burst(streams, (until - self.spent) / left, left == 1)
            try:
                found.append(self.step_times())
            except WorkloadError as problem:
                return None, str(problem)
        step_times = min(found, key=lambda one: one.error or 0.0)
        off = (
            f"its error on steps left out of the fit is {step_times.error:.0%} ({FITS:.0%} at most)"
        )
        return (step_times, "") if step_times.fits else (None, off)

    def burst(self, streams: int, seconds: float, real_lengths: bool) -> None:
        """One within so many seconds; fewer streams, steps and prompt tokens where it must be."""
        while streams >= 2:
            ladder = sorted({max(2, round(streams * part)) for part in LADDER}, reverse=True)
            each = sum(map(self._expected, ladder))
            prompts = self._burst_prompts(streams, seconds, real_lengths)
            ahead = AHEAD + streams // 8 + sum(prompts) // PIECE
            left = seconds - sum(map(self._fill, prompts)) - ahead * self._expected(streams)
            steps = min(STEPS[1], int(left / max(each, 1e-6)))
            if steps >= STEPS[0] or streams == 2:
                self.ask(prompts, _ending_in_turn(ladder, max(steps, STEPS[0]), ahead))
                return
            streams = max(2, streams // 2)

    def _burst_prompts(self, streams: int, seconds: float, real_lengths: bool) -> list[int]:
        if not real_lengths:
            return [int(min(SHORT_PROMPT, self._prompts.min()))] * streams
        lengths = np.quantile(self._prompts, (np.arange(streams) + 0.5) / streams)
        cost = float(sum(map(self._fill, lengths)))
        lengths *= min(1.0, PROMPTS_SHARE * seconds / max(cost, 1e-9))
        # The long ones are neither all first nor all last.
        mixed = np.random.default_rng(1).permutation(np.maximum(lengths, 1).astype(int))
        return [int(one) for one in mixed]

    def _expected(self, rows: int) -> float:
        """Seconds of a decode step."""
        several = any(one.rows > one.steps for one in self.observations)
        if several and len(self.observations) >= MIN_OBSERVATIONS:
            return self.step_times().seconds(rows, 0, rows * float(np.mean(self._prompts)))
        decodes = [o.seconds / o.steps for o in self.observations if o.rows and not o.prompt_tokens]
        return float(np.median(decodes)) * rows**SCALING if decodes else 0.0

    def _fill(self, tokens: float) -> float:
        """Seconds of a prompt."""
        each = [
            o.seconds / o.prompt_tokens for o in self.observations if o.prompt_tokens and not o.rows
        ]
        return min(each) * tokens if each else 0.0  # of the longest prompt: least of it is base

    def step_times(self) -> StepTimeModel:
        """Of all that was seen. Raises WorkloadError."""
        longest = max((o.context_tokens / o.rows for o in self.observations if o.rows), default=0)
        knows_context = longest >= MIN_CONTEXT * float(np.mean(self._prompts))
        return fit_step_times(self.observations, knows_context=knows_context, experts=self._experts)


def _ending_in_turn(ladder: Sequence[int], steps: int, ahead: int) -> list[int]:
    """Output tokens of the streams of a burst whose decode rows go down the ladder.

    The first stream, which starts first, ends last.
    """
    tokens: list[int] = []
    for stage, rows in enumerate(ladder, 1):
        fewer = ladder[stage] if stage < len(ladder) else 0
        tokens += [1 + ahead + steps * stage] * (rows - fewer)
    return tokens[::-1]


def seconds_outside_engine(single_streams: Sequence[Level]) -> float | None:
    """Return the mean E2E of a single-stream request less the engine's busy time; None where the
    engine has no clock of its own, or a request failed."""
    seconds, requests = 0.0, 0
    for level in single_streams:
        engine_time = level.finished.engine_time if level.finished else None
        if engine_time is None or not np.isfinite(level.e2e).all():
            continue
        seconds += float(level.e2e.sum()) - engine_time.device_seconds - engine_time.host_seconds
        requests += len(level.e2e)
    return seconds / requests if requests else None


def request_seconds(
    step_times: StepTimeModel, settings: SchedulerSettings, single_streams: Sequence[Level]
) -> float | None:
    """Return the mean seconds by which the TTFT of single-stream requests is above what the model
    says of their steps, at most what they spent outside the engine by its own clock. None where the
    engine has no such clock.

    The model is fitted to TTFT too, so it has a part of that time already, on a CPU all of it.
    """
    outside_seconds = seconds_outside_engine(single_streams)
    if outside_seconds is None:
        return None
    model = msgspec.structs.replace(step_times, request_seconds=None)
    excess_seconds: list[float] = []
    for level in single_streams:
        prompt = np.where(
            np.isnan(level.prompt_tokens), level.requested_prompt_tokens, level.prompt_tokens
        )
        is_known = np.isfinite(prompt) & np.isfinite(level.ttft)
        prompt = prompt[is_known].astype(np.int64)
        cached = np.nan_to_num(level.cached_tokens[is_known]).astype(np.int64)
        lengths = Lengths(prompt, np.ones_like(prompt), cached)
        modeled_ttft = Server(model, settings, lengths).alone().ttft
        excess_seconds += (level.ttft[is_known] - modeled_ttft).tolist()
    if not excess_seconds:
        return None
    return min(max(float(np.mean(excess_seconds)), 0.0), max(outside_seconds, 0.0))


def most_at_once(level: Level) -> int:
    """How many streams that were sent at one moment were served together."""
    answered = level.chunk_counts > 0
    first, last = level.first[answered], level.last[answered]
    return max((int(((first <= at) & (at <= last)).sum()) for at in first), default=0)
