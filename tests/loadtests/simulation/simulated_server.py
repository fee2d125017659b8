"""A server whose step times are known: it answers bursts, with a stamp for every token.

Played step by step, apart from loadtests.simulation.batching, which is what it is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from loadtests.records.schema import RequestRecord

PREFILL_TOKENS = 256  # of one step while someone decodes
STEP_TOKENS = 2048

# decode rows, prompt tokens, context, passes -> seconds
StepSeconds = Callable[[int, int, int, int], float]


def staircase(rows: int) -> int:
    """Rows that so many are charged for: 3 cost what 4 do, 7 what 8 do."""
    return rows + 1 if rows % 4 == 3 else rows


class Server:
    """`steps` says what a step takes; each call goes through a burst from an idle server.

    `now`: seconds since it began. `chunk`: tokens that come together.
    """

    def __init__(self, steps: StepSeconds, slots: int, chunk: int = 1) -> None:
        self.steps, self.slots, self.chunk = steps, slots, chunk
        self.now = 0.0
        self.asked: list[tuple[int, tuple[int, ...]]] = []  # prompt tokens, output tokens each

    def answer(self, prompt_tokens: int, output_tokens: Sequence[int]) -> list[RequestRecord]:
        self.asked.append((prompt_tokens, tuple(output_tokens)))
        sent = self.now
        waiting = list(range(len(output_tokens)))
        left = [prompt_tokens] * len(output_tokens)
        stamps: list[list[float]] = [[] for _ in output_tokens]
        running: list[int] = []
        while waiting or running:
            while waiting and len(running) < self.slots:
                running.append(waiting.pop(0))
            decoding = [i for i in running if left[i] == 0]
            room = PREFILL_TOKENS if decoding else STEP_TOKENS
            taken, filled, passes = 0, [], int(bool(decoding))
            for i in (i for i in running if left[i] > 0):
                piece = min(left[i], room - taken)
                left[i] -= piece
                taken += piece
                passes += piece > 0
                if left[i] == 0:
                    filled.append(i)
            context = sum(prompt_tokens + len(stamps[i]) for i in decoding)
            self.now += self.steps(len(decoding), taken, context, passes)
            for i in decoding + filled:
                stamps[i].append(self.now - sent)
                if len(stamps[i]) == output_tokens[i]:
                    running.remove(i)
        return [
            self._record(i, prompt_tokens, asked, stamps[i])
            for i, asked in enumerate(output_tokens)
        ]

    def _record(
        self, index: int, prompt_tokens: int, output_tokens: int, stamps: list[float]
    ) -> RequestRecord:
        seen = stamps[self.chunk - 1 :: self.chunk] or stamps[-1:]
        return RequestRecord(
            cell="c",
            level="l",
            index=index,
            due_seconds=0.0,
            sent_seconds=0.0,
            first_content_seconds=seen[0],
            last_content_seconds=seen[-1],
            ended_seconds=stamps[-1],
            content_seconds=seen,
            first_chunk_tokens=self.chunk,
            asked_prompt_tokens=prompt_tokens,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            status=200,
        )


class Skewed:
    """What steps take beside their typical time: a few percent, and now and then a stall."""

    def __init__(self, seed: int, spread: float = 0.03, stalls: float = 0.01) -> None:
        self._rng = np.random.default_rng(seed)
        self._spread, self._stalls = spread, stalls

    def __call__(self) -> float:
        stall = 4.0 if self._rng.random() < self._stalls else 1.0
        return stall * float(np.exp(self._spread * self._rng.normal()))
