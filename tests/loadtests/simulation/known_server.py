"""A server whose step times are known: it answers requests, with a stamp for every token.

Played step by step, apart from serving.capacity.batching_simulator, which it is held against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from loadtests.analysis.level_columns import Level
from loadtests.records.journal_events import LevelFinished, LevelStarted
from loadtests.records.request_record import RequestRecord
from loadtests.simulation.calibration_bursts import Burst
from models.model_spec import Routing
from serving.capacity.scheduler_settings import SchedulerSettings
from serving.capacity.step_time_model import StepTimeModel

STEP_TIMES = StepTimeModel(
    base_seconds=0.02,
    row_seconds=0.003,
    prompt_token_seconds=0.0005,
    context_token_seconds=2e-6,
    pass_seconds=0.01,
)
# A mixture of experts whose steps are bound by reading weights.
EXPERTS_STEP_TIMES = StepTimeModel(
    base_seconds=0.004,
    row_seconds=0.002,
    prompt_token_seconds=0.0005,
    context_token_seconds=1e-6,
    pass_seconds=0.002,
    expert_seconds=0.03,
    experts=Routing(128, 8),
)
# As KnownServer schedules: no target for a step's time.
SETTINGS = SchedulerSettings(slots=8, step_tokens=2048, step_seconds_target=None)


@dataclasses.dataclass
class KnownServer:
    """`steps(rows, prompt tokens, context, passes)` says what a step takes."""

    steps: Callable[[int, int, int, int], float]
    slots: int = 8
    chunk: int = 1  # tokens that come together
    prefill_tokens: int = 256  # of a step while someone decodes
    step_tokens: int = 2048
    whole_prompts: bool = False  # nobody decodes while a prompt is computed
    asked: list[Burst] = dataclasses.field(default_factory=list)
    spent_seconds: float = 0.0  # of bursts
    now: float = 0.0  # seconds since the level's start, for steps that depend on it

    def __call__(self, burst: Burst) -> Level:
        """All streams sent at one moment."""
        self.asked.append(burst)
        level = self.level([0.0] * burst.streams, burst.prompt_tokens, burst.output_tokens)
        self.spent_seconds += float(level.chunks.max())
        return level

    def level(
        self,
        due: Sequence[float],
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
        cached_tokens: Sequence[int] | None = None,
    ) -> Level:
        """An open-loop level, from an idle server to its last answer."""
        records = self.records(due, prompt_tokens, output_tokens, cached_tokens)
        seconds = float(due[-1]) + 1e-6
        started = LevelStarted(
            cell="c",
            level="l",
            rate_per_second=1.0,
            window_seconds=seconds,
        )
        ended = LevelFinished(cell="c", level="l", due=len(records), window_seconds=seconds)
        return Level.of(records, started, ended)

    def records(
        self,
        due: Sequence[float],
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
        cached_tokens: Sequence[int] | None = None,
        cell: str = "c",
        level: str = "l",
    ) -> list[RequestRecord]:
        """What became of requests that are due at these times, in their order."""
        cached = [0] * len(due) if cached_tokens is None else list(cached_tokens)
        waiting = list(range(len(due)))
        left = [p - c for p, c in zip(prompt_tokens, cached, strict=True)]
        stamps: list[list[float]] = [[] for _ in due]
        running: list[int] = []
        now = 0.0
        while waiting or running:
            if not running:
                now = max(now, due[waiting[0]])
            while waiting and due[waiting[0]] <= now and len(running) < self.slots:
                running.append(waiting.pop(0))
            filling = [i for i in running if left[i] > 0]
            decoding = [i for i in running if left[i] == 0]
            if self.whole_prompts and filling:
                decoding = []
            room = self.prefill_tokens if decoding else self.step_tokens
            taken, filled, passes = 0, [], int(bool(decoding))
            for i in filling:
                piece = min(left[i], room - taken)
                left[i] -= piece
                taken += piece
                passes += piece > 0
                if left[i] == 0:
                    filled.append(i)
            self.now = now
            context = sum(prompt_tokens[i] + len(stamps[i]) for i in decoding)
            now += self.steps(len(decoding), taken, context, passes)
            for i in decoding + filled:
                stamps[i].append(now)
                if len(stamps[i]) == output_tokens[i]:
                    running.remove(i)
        records = []
        for i, all_stamps in enumerate(stamps):
            seen = all_stamps[self.chunk - 1 :: self.chunk] or all_stamps[-1:]
            records.append(
                RequestRecord(
                    cell=cell,
                    level=level,
                    index=i,
                    scheduled_seconds=float(due[i]),
                    sent_seconds=float(due[i]),
                    first_content_seconds=seen[0],
                    last_content_seconds=seen[-1],
                    ended_seconds=all_stamps[-1],
                    content_seconds=seen,
                    first_chunk_tokens=self.chunk,
                    prompt_tokens=int(prompt_tokens[i]),
                    cached_tokens=cached[i],
                    output_tokens=int(output_tokens[i]),
                    status=200,
                )
            )
        return records


class Skewed:
    """What steps take beside their typical time: a few percent, and now and then a stall."""

    def __init__(self, seed: int, spread: float = 0.03, stalls: float = 0.01) -> None:
        self._rng = np.random.default_rng(seed)
        self._spread, self._stalls = spread, stalls

    def __call__(self) -> float:
        stall = 4.0 if self._rng.random() < self._stalls else 1.0
        return stall * float(np.exp(self._spread * self._rng.normal()))
