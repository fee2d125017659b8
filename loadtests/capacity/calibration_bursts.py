"""Calibration: some 20 s of requests to which the step-time model is fitted.

    calibration = calibrate(send_burst, workload, 8, 20.0, [single_stream_level])
    calibration.step_times, calibration.reason     # the step-time model, or why there is none

Single streams show what a prompt and one decode row cost. Then come two bursts. The requests of a
burst are sent at one moment and end one after the other, so that a burst shows a step's time at
several numbers of decode rows, and at its beginning what several prompts in one step cost. The
first burst has short prompts and the second the workload's own lengths; their difference shows what
context costs. If an endpoint does not report its slots, bursts of 2, 4, 8 ... requests find them.
On a slow server, these have the shortest prompts and answers that show how many requests are served
together.

Levels during which other processes took CPU time come without it (Level.undisturbed). A process
that runs in bursts interrupts some steps and leaves others alone, so the model is fitted again with
the steps that were interrupted shortened by it.

If the step-time model does not fit, either something else ran during the bursts, or no step-time
model describes the engine. So the bursts are sent once more, and the pair with the better fit
counts.

What is sent depends on lengths and on the steps observed so far, not on a clock. So a calibration
that was interrupted sends the same again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.loadtests.capacity.step_observation import merged_steps, observed_steps
from crossover.loadtests.levels.level_columns import Level
from crossover.loadtests.levels.level_warnings import BUFFER_ADVICE, buffered_in_words
from crossover.loadtests.records.level_plan import Burst
from crossover.models.shape.model_spec import Routing
from crossover.serving.capacity.scheduler_settings import SchedulerSettings
from crossover.serving.capacity.simulated_capacity import Lengths, Server, lengths_of
from crossover.serving.capacity.step_time_model import (
    FITS,
    MIN_OBSERVATIONS,
    StepObservation,
    StepTimeModel,
    fit_step_times,
    without_interruptions,
)
from crossover.serving.errors import WorkloadError
from crossover.serving.workload.request_lengths import Workload

SAMPLED_REQUESTS = 400  # drawn from the workload for its lengths
SHORT_PROMPT_TOKENS = 16
MAX_STREAMS = 64
# Of a burst with the workload's lengths. Fewer, down to MIN_REAL_STREAMS, where its prompts would
# have to be shortened.
MAX_REAL_STREAMS, MIN_REAL_STREAMS = 16, 8
MAX_SLOTS = 64  # largest number that bursts look for
# Of bursts that look for slots on a slow server. Three tokens show a stream beside others if the
# first tokens of all come in the same step.
SHORTEST_PROMPT_TOKENS = 4
SHORTEST_OUTPUT_TOKENS = 3
MIN_STEP_TOKENS = 64  # prompt tokens that every server computes in one step, if it batches prompts
MAX_SLOTS_OF_SLOW_SERVERS = 16  # up to which a burst may double more than once
# As shares of the time of a calibration: what the search for slots may take, what is left for the
# pair of bursts in any case, and what all bursts may take if a second pair is sent.
MAX_SEARCH_SHARE, MIN_PAIR_SHARE, MAX_TOTAL_SHARE = 1.25, 0.75, 2.25
ROW_STAGES = (1.0, 0.75, 0.5, 0.375, 0.25)  # numbers of decode rows, as shares of the streams
MAX_PAIRS = 2  # of bursts; the second pair only if no step-time model fits the first
MIN_STEPS, MAX_STEPS = 4, 32  # at each number of decode rows
# A step with n decode rows is expected to take n ** ROW_EXPONENT times as long as one with a single
# row, until steps with several rows have been observed.
ROW_EXPONENT = 0.8
MAX_PROMPTS_SHARE = 0.4  # of a burst's time, for its prompts
# As a share of the mean prompt: shorter contexts do not show what a token of context costs.
MIN_CONTEXT_SHARE = 0.5
# The prompts of a burst are processed over several steps, in which the first streams already
# decode: at least LEAD_STEPS, one for each STREAMS_PER_STEP streams, and one for each
# PROMPT_TOKENS_PER_STEP tokens.
LEAD_STEPS = 4
STREAMS_PER_STEP = 8
PROMPT_TOKENS_PER_STEP = 256


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a calibration."""

    slots: int | None  # those that were given, or that bursts found; None: not found
    step_times: StepTimeModel | None
    reason: str  # why there is no step-time model


class _StartedTogether(NamedTuple):
    """A burst whose prompts were computed in one step."""

    prompt_tokens: float  # of all streams, as the server counts them
    added_tokens: float  # of a prompt, by the server: its chat template

    def steps_of(self, streams: int) -> int:
        """Return the maximum steps in which so many of the shortest prompts are computed."""
        prompt_tokens = streams * (SHORTEST_PROMPT_TOKENS + self.added_tokens)
        return math.ceil(prompt_tokens / max(self.prompt_tokens, MIN_STEP_TOKENS))


SendBurst = Callable[[Burst], Level]  # sends a burst and returns its level when it has ended


def calibrate(
    send: SendBurst,
    workload: Workload,
    slots: int | None,
    seconds: float,
    known_levels: Sequence[Level],
    experts: Routing | None = None,
) -> Calibration:
    """Send two bursts, and fit the step-time model to them and to the levels that are known:
    single streams, and bursts to the same server with fewer slots.

    `slots`: None to find them. `experts`: None for a dense model, or one whose experts are not
    known. No burst is sent that is expected to exceed `seconds`, except one of two streams, the
    pair of bursts after a search for slots that took most of the time, and the second pair if the
    first does not fit.
    """
    # Prompts of conversations include the history.
    prompt_tokens = lengths_of(workload, SAMPLED_REQUESTS, seed=1).prompt
    run = _CalibrationRun(send, prompt_tokens, seconds, experts)
    for level in known_levels:
        run.observe(level)
    if slots is None and run.has_steps:
        slots = run.find_slots()
    pair_seconds = max(seconds - run.spent_seconds, MIN_PAIR_SHARE * seconds)
    step_times, reason = run.fit_to_bursts(slots, pair_seconds)
    return Calibration(slots=slots, step_times=step_times, reason=reason)


class _CalibrationRun:
    """Sends bursts and collects the steps that they show."""

    def __init__(
        self,
        send: SendBurst,
        workload_prompts: npt.NDArray[np.int64],
        seconds: float,
        experts: Routing | None,
    ) -> None:
        """`workload_prompts`: [requests], prompt tokens."""
        self.observations: list[StepObservation] = []
        self.spent_seconds = 0.0
        self.has_steps = False  # some chunks were single tokens
        self._collected = ""  # what single streams showed of a proxy that collects chunks
        self._send = send
        self._workload_prompts = workload_prompts
        self._seconds = seconds
        self._experts = experts

    def observe(self, level: Level) -> None:
        """Add the steps that the chunks of a level show."""
        if not len(level.chunks):
            return
        if level.is_collected:
            self._collected = f"{buffered_in_words(level)}. To estimate a capacity, {BUFFER_ADVICE}"
        if self._collected:  # a burst's answers may be too short to show it
            return
        # All requests of a burst may be in flight at once. If the server has fewer slots, a waiting
        # prompt is counted to more steps than it may be part of, which does no harm.
        max_slots = max(len(level.due), 1)
        steps, _ = observed_steps(level, max_slots, self._experts)
        self.has_steps = self.has_steps or bool(steps)
        taken, kept = level.taken_share, 1 - level.taken_share
        self.observations += [
            msgspec.structs.replace(step, taken_seconds=step.seconds * taken / kept)
            for step in merged_steps(steps)
        ]

    def send(self, prompts: Sequence[int], outputs: Sequence[int]) -> Level:
        """Send a burst and add its steps."""
        level = self._send(Burst(tuple(map(int, prompts)), tuple(map(int, outputs))))
        if len(level.chunks):
            self.spent_seconds += float(np.nanmax(level.chunks))
            self.observe(level)
        return level

    def find_slots(self) -> int | None:
        """Return how many requests are served together, found by bursts of 2, 4, 8 ... requests;
        None: there is no time for a burst of two."""
        slots, streams, last = None, 2, None
        while streams <= MAX_SLOTS:
            burst = self._slots_burst(streams, last)
            if burst is None:
                break
            level = self.send(burst.prompt_tokens, burst.output_tokens)
            together = max_concurrent_streams(level)
            slots = max(slots or 1, together)
            if together < burst.streams:
                break
            last = _started_together(level)
            streams = 2 * burst.streams
        return slots

    def _slots_burst(self, streams: int, last: _StartedTogether | None) -> Burst | None:
        """Return the burst of at least so many equal streams that shows whether all of them are
        served together; None: there is no time for it.

        A burst that would take more than half of the time left is shortened. If the prompts of the
        last burst were computed together (`last`), a shortened burst has as many streams as there
        is time for: the steps that one with fewer would show are not worth its time.
        """
        output_tokens = MIN_STEPS + LEAD_STEPS + streams
        seconds = self._equal_burst_seconds(streams, SHORT_PROMPT_TOKENS, output_tokens)
        if seconds <= (self._seconds - self.spent_seconds) / 2:
            return Burst((SHORT_PROMPT_TOKENS,) * streams, (output_tokens,) * streams)
        seconds_left = MAX_SEARCH_SHARE * self._seconds - self.spent_seconds

        def shortest_output(count: int) -> int:
            if last is None:  # the first must not end before the last begins
                return SHORTEST_OUTPUT_TOKENS + count
            return max(SHORTEST_OUTPUT_TOKENS, last.steps_of(count) + 1)

        def fits(count: int) -> bool:
            tokens = shortest_output(count)
            seconds = self._equal_burst_seconds(count, SHORTEST_PROMPT_TOKENS, tokens)
            return seconds <= seconds_left

        if streams > 2 and not fits(streams):
            return None
        while last is not None and streams < MAX_SLOTS_OF_SLOW_SERVERS and fits(2 * streams):
            streams *= 2
        return Burst((SHORTEST_PROMPT_TOKENS,) * streams, (shortest_output(streams),) * streams)

    def _equal_burst_seconds(self, streams: int, prompt_tokens: int, output_tokens: int) -> float:
        """Return the seconds that a burst of equal streams is expected to take, if all of them are
        served together."""
        prompts_seconds = self._prompt_seconds(prompt_tokens) * streams
        return output_tokens * self._decode_seconds(streams) + prompts_seconds

    def fit_to_bursts(self, slots: int | None, seconds: float) -> tuple[StepTimeModel | None, str]:
        """Send two bursts within `seconds`, and two more if no step-time model fits them. Return
        the model that fits best and ""; or None, and why there is none."""
        if not self.has_steps:
            no_steps = "the server's chunks have several tokens or none, so its steps are unknown"
            return None, self._collected or no_steps
        earlier_observations = self.observations
        streams = min(slots or 0, MAX_STREAMS)
        models: list[StepTimeModel] = []
        while len(models) < MAX_PAIRS and not (models and models[-1].fits):
            if models and self.spent_seconds + seconds > MAX_TOTAL_SHARE * self._seconds:
                break
            self.observations = list(earlier_observations)
            until = self.spent_seconds + seconds
            self.send_burst(streams, (until - self.spent_seconds) / 2, has_real_lengths=False)
            seconds_left = until - self.spent_seconds
            real_streams = self._real_streams(streams, seconds_left)
            self.send_burst(real_streams, seconds_left, has_real_lengths=True)
            try:
                models.append(self.fit())
            except WorkloadError as problem:
                return None, str(problem)
        best = min(models, key=lambda model: model.error or 0.0)
        if best.fits:
            return best, ""
        return (
            None,
            f"its error on steps left out of the fit is {best.error:.0%} ({FITS:.0%} at most)",
        )

    def send_burst(self, streams: int, seconds: float, *, has_real_lengths: bool) -> None:
        """Send a burst that is expected to end within `seconds`. If that is little, it has fewer
        steps, then fewer streams, down to two."""
        while streams >= 2:
            stages = sorted({max(2, round(streams * part)) for part in ROW_STAGES}, reverse=True)
            prompts = self._burst_prompts(streams, seconds, has_real_lengths)
            lead_steps = (
                LEAD_STEPS + streams // STREAMS_PER_STEP + sum(prompts) // PROMPT_TOKENS_PER_STEP
            )
            prompts_seconds = sum(map(self._prompt_seconds, prompts))
            lead_seconds = lead_steps * self._decode_seconds(streams)
            one_step_each_seconds = sum(map(self._decode_seconds, stages))
            stages_seconds = seconds - prompts_seconds - lead_seconds
            steps = min(MAX_STEPS, int(stages_seconds / max(one_step_each_seconds, 1e-6)))
            if steps >= MIN_STEPS or streams == 2:
                self.send(prompts, _burst_outputs(stages, max(steps, MIN_STEPS), lead_steps))
                return
            streams = max(2, streams // 2)

    def _real_streams(self, streams: int, seconds: float) -> int:
        """Return how many streams a burst with the workload's lengths has: what a prompt and its
        context take is measured better by a few whole prompts than by many shortened ones."""
        mean_seconds = self._prompt_seconds(float(np.mean(self._workload_prompts)))
        whole_prompts = MAX_PROMPTS_SHARE * seconds / max(mean_seconds, 1e-9)
        return min(streams, max(MIN_REAL_STREAMS, int(min(whole_prompts, MAX_REAL_STREAMS))))

    def _burst_prompts(self, streams: int, seconds: float, has_real_lengths: bool) -> list[int]:
        """Return the tokens of each prompt of a burst: short ones, or quantiles of the workload's,
        all shortened by one factor if their processing would take too much of `seconds`."""
        if not has_real_lengths:
            # A prompt of one token takes as long as one of several, since its pass reads all
            # weights; but of a mixture it reads few experts, which shows what they cost.
            prompts = self._workload_prompts
            tokens = np.median(prompts) if self._experts is None else prompts.min()
            return [int(min(SHORT_PROMPT_TOKENS, tokens))] * streams
        lengths = np.quantile(self._workload_prompts, (np.arange(streams) + 0.5) / streams)
        prompts_seconds = float(sum(map(self._prompt_seconds, lengths)))
        lengths *= min(1.0, MAX_PROMPTS_SHARE * seconds / max(prompts_seconds, 1e-9))
        # Shuffled, so that the long ones are neither all first nor all last.
        shuffled = np.random.default_rng(1).permutation(np.maximum(lengths, 1).astype(int))
        return [int(length) for length in shuffled]

    def _decode_seconds(self, rows: int) -> float:
        """Return the expected seconds of a decode step with so many rows."""
        # An observation's rows are summed over its steps.
        has_several_rows = any(one.rows > one.steps for one in self.observations)
        if has_several_rows and len(self.observations) >= MIN_OBSERVATIONS:
            context_tokens = rows * float(np.mean(self._workload_prompts))
            return self.fit().seconds(rows, 0, context_tokens)
        step_seconds = [
            one.seconds / one.steps
            for one in self.observations
            if one.rows and not one.prompt_tokens
        ]
        return float(np.median(step_seconds)) * rows**ROW_EXPONENT if step_seconds else 0.0

    def _prompt_seconds(self, tokens: float) -> float:
        """Return the expected seconds of processing a prompt, if nothing else runs."""
        token_seconds = [
            one.seconds / one.prompt_tokens
            for one in self.observations
            if one.prompt_tokens and not one.rows
        ]
        # The minimum is that of the longest prompt, in which the fixed cost of a step weighs least.
        return min(token_seconds) * tokens if token_seconds else 0.0

    def fit(self) -> StepTimeModel:
        """Return the step-time model of all observations. Raises WorkloadError."""
        longest = max(
            (one.context_tokens / one.rows for one in self.observations if one.rows), default=0
        )
        knows_context = longest >= MIN_CONTEXT_SHARE * float(np.mean(self._workload_prompts))

        def fitted(observations: Sequence[StepObservation]) -> StepTimeModel:
            return fit_step_times(observations, knows_context=knows_context, experts=self._experts)

        # As if each step had been interrupted for the same share of its time.
        alike = [msgspec.structs.replace(one, taken_seconds=0.0) for one in self.observations]
        model = fitted(alike)
        if alike == self.observations:
            return model
        corrected = fitted(without_interruptions(model, self.observations))
        # If that fits, hardly a step was left alone, and few would tell the error.
        return msgspec.structs.replace(corrected, error=model.error) if model.fits else corrected


def _burst_outputs(stages: Sequence[int], steps: int, lead_steps: int) -> list[int]:
    """Return the output tokens of each stream of a burst in which the number of decode rows goes
    through `stages`, a descending list, and stays at each of them for so many `steps`.

    The first stream, which starts first, ends last. `lead_steps`: additional tokens of each stream,
    while the prompts are processed.
    """
    output_tokens: list[int] = []
    for number, rows in enumerate(stages, 1):
        next_rows = stages[number] if number < len(stages) else 0
        output_tokens += [1 + lead_steps + steps * number] * (rows - next_rows)
    return output_tokens[::-1]


def seconds_outside_engine(single_streams: Sequence[Level]) -> float | None:
    """Return the mean E2E of a single-stream request less the engine's busy time.

    None: the server does not report the engine's time, or a request failed.
    """
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
    """Return the seconds of a request that no step accounts for, such as HTTP and tokenizing.

    That is the mean difference of the TTFT of single-stream requests and the model's TTFT, at most
    the time that they spent outside the engine by the engine's own clock. Some of that time is in
    the model already, since it is fitted to TTFT too; on a CPU all of it. None: the server does not
    report the engine's time.
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
        modeled_ttft = Server(model, settings, lengths).unloaded().ttft
        excess_seconds += (level.ttft[is_known] - modeled_ttft).tolist()
    if not excess_seconds:
        return None
    return min(max(float(np.mean(excess_seconds)), 0.0), max(outside_seconds, 0.0))


def max_concurrent_streams(level: Level) -> int:
    """Return the maximum number of requests that decoded at the same time."""
    answered = level.chunk_counts > 0
    first, last = level.first[answered], level.last[answered]
    # The number rises only when a stream begins to decode.
    return max((int(((first <= begin) & (begin <= last)).sum()) for begin in first), default=0)


def start_together(burst: Level) -> bool:
    """Return whether the first tokens of all streams of a burst came before the second token of
    any, as they do if the server computes all of their prompts in one step."""
    has_second = burst.chunk_counts > 1
    if not has_second.any() or np.isnan(burst.first).any():
        return False
    second = burst.chunks[burst.chunk_offsets[:-1][has_second] + 1]
    return bool(burst.first.max() < second.min())


def _started_together(burst: Level) -> _StartedTogether | None:
    """Return what a burst shows of the prompts of one step; None: its streams did not start
    together."""
    if not start_together(burst):
        return None
    requested = burst.requested_prompt_tokens
    prompts = np.where(np.isnan(burst.prompt_tokens), requested, burst.prompt_tokens)
    added_tokens = float(np.nan_to_num(prompts - requested).mean())
    return _StartedTogether(float(np.nansum(prompts)), max(0.0, added_tokens))
