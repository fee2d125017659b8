"""The cost of steps, learned from the steps so far.

clock = StepClock()
clock.learn(rows=4, prompt_tokens=256, seconds=0.31)
clock.prompt_seconds, clock.rows_seconds(8)
"""

from __future__ import annotations

from crossover.serving.capacity.plan_step import PREFILL_MULTIPLE

LEARNING_RATE = 0.3
ROW_WEIGHT = 16.0  # how much more of an error is attributed to a row than to a prompt token


class StepClock:
    """Seconds of a prompt token, and of n decoding rows. None until steps have been observed."""

    def __init__(self) -> None:
        self.prompt_seconds: float | None = None  # of one token
        self._rows_seconds: dict[int, float] = {}  # by the number of rows

    def learn(
        self, rows: int, prompt_tokens: int, seconds: float, decode_seconds: float | None = None
    ) -> None:
        """Learn from a step. `decode_seconds`: the part of `seconds` that its decoding rows took;
        None: the backend does not report it."""
        if seconds <= 0:
            return
        if rows and prompt_tokens and decode_seconds is None:
            if prompt_tokens >= PREFILL_MULTIPLE:
                self._learn_mixed(rows, prompt_tokens, seconds)
            return
        rows_seconds = (decode_seconds or 0.0) if prompt_tokens else seconds
        if rows:
            previous = self.rows_seconds(rows)
            updated = rows_seconds
            if previous is not None:
                updated = previous + LEARNING_RATE * (rows_seconds - previous)
            self._rows_seconds[rows] = updated
        if prompt_tokens >= PREFILL_MULTIPLE:  # the time of fewer is mostly the step's fixed cost
            prompt_token_seconds = (seconds - rows_seconds * bool(rows)) / prompt_tokens
            previous_prompt_seconds = self.prompt_seconds
            if previous_prompt_seconds is not None:
                prompt_token_seconds = max(
                    previous_prompt_seconds
                    + LEARNING_RATE * (prompt_token_seconds - previous_prompt_seconds),
                    0.1 * previous_prompt_seconds,
                )
            self.prompt_seconds = prompt_token_seconds

    def rows_seconds(self, rows: int) -> float | None:
        """Return the seconds of a step with this many decoding rows, scaled from the nearest number
        of rows that was observed; None: none was."""
        if not self._rows_seconds:
            return None
        nearest = min(self._rows_seconds, key=lambda count: abs(count - rows))
        return self._rows_seconds[nearest] * rows / nearest

    def row_costs(self, rows: int) -> tuple[float, float]:
        """See StepCosts in crossover.serving.capacity.plan_step."""
        cheapest = min((s / count for count, s in self._rows_seconds.items()), default=0.0)
        return self.rows_seconds(rows) or 0.0, cheapest

    def prompt_tokens_in(self, seconds: float) -> int | None:
        """Return how many prompt tokens take this long; None: no prompt has been observed."""
        return None if self.prompt_seconds is None else int(seconds / self.prompt_seconds)

    def _learn_mixed(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step with both prompts and rows: a normalized least-mean-squares update
        divides the error between the two costs (Haykin, Adaptive Filter Theory)."""
        expected = self.rows_seconds(rows)
        prompt_seconds = self.prompt_seconds or seconds / (prompt_tokens + rows)
        row_seconds = prompt_seconds if expected is None else expected / rows
        weight = ROW_WEIGHT * rows
        error = LEARNING_RATE * (seconds - prompt_seconds * prompt_tokens - row_seconds * rows)
        error /= prompt_tokens**2 + weight * rows
        self.prompt_seconds = max(prompt_seconds + error * prompt_tokens, 0.1 * prompt_seconds)
        self._rows_seconds[rows] = rows * max(row_seconds + error * weight, 0.1 * row_seconds)
