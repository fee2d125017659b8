"""The cost of steps, learned from the steps so far.

clock = StepClock()
clock.learn(rows=4, prompt_tokens=256, seconds=0.31)
clock.prompt_seconds, clock.rows_seconds(8)
"""

from __future__ import annotations

from crossover.serving.capacity.plan_step import PREFILL_MULTIPLE

LEARNING_RATE = 0.3
ROW_WEIGHT = 16.0  # how much more of an error is attributed to a row than to a prompt token
MIN_SHARE_OF_PREVIOUS = 0.1  # one step reduces a cost to no less than this share, so never below 0


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
        # The time of fewer prompt tokens is mostly the fixed cost of a step.
        has_enough_prompt = prompt_tokens >= PREFILL_MULTIPLE
        if rows and prompt_tokens and decode_seconds is None:
            if has_enough_prompt:
                self._learn_mixed(rows, prompt_tokens, seconds)
            return
        rows_seconds = 0.0
        if rows:
            rows_seconds = (decode_seconds or 0.0) if prompt_tokens else seconds
            self._learn_rows(rows, rows_seconds)
        if has_enough_prompt:
            self._learn_prompt((seconds - rows_seconds) / prompt_tokens)

    def _learn_rows(self, rows: int, seconds: float) -> None:
        """Learn that this many decoding rows took `seconds`."""
        previous = self.rows_seconds(rows)
        if previous is not None:
            seconds = previous + LEARNING_RATE * (seconds - previous)
        self._rows_seconds[rows] = seconds

    def _learn_prompt(self, token_seconds: float) -> None:
        """Learn that a prompt token took `token_seconds`."""
        previous = self.prompt_seconds
        if previous is not None:
            updated = previous + LEARNING_RATE * (token_seconds - previous)
            token_seconds = max(updated, MIN_SHARE_OF_PREVIOUS * previous)
        self.prompt_seconds = token_seconds

    def rows_seconds(self, rows: int) -> float | None:
        """Return the seconds of a step with this many decoding rows, scaled from the nearest number
        of rows that was observed; None: none was."""
        if not self._rows_seconds:
            return None
        nearest = min(self._rows_seconds, key=lambda count: abs(count - rows))
        return self._rows_seconds[nearest] * rows / nearest

    def row_costs(self, rows: int) -> tuple[float, float]:
        """See StepCosts in crossover.serving.capacity.plan_step."""
        cheapest = min(
            (seconds / count for count, seconds in self._rows_seconds.items()), default=0.0
        )
        return self.rows_seconds(rows) or 0.0, cheapest

    def prompt_tokens_in(self, seconds: float) -> int | None:
        """Return how many prompt tokens take this long; None: no prompt has been observed."""
        return None if self.prompt_seconds is None else int(seconds / self.prompt_seconds)

    def _learn_mixed(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step with both prompts and rows. A normalized least-mean-squares update
        divides the error between the two costs (Haykin, Adaptive Filter Theory)."""
        expected = self.rows_seconds(rows)
        prompt_seconds = self.prompt_seconds or seconds / (prompt_tokens + rows)  # of one token
        row_seconds = prompt_seconds if expected is None else expected / rows  # of one row
        error = seconds - prompt_seconds * prompt_tokens - row_seconds * rows
        row_weight = ROW_WEIGHT * rows
        change = LEARNING_RATE * error / (prompt_tokens**2 + row_weight * rows)
        self.prompt_seconds = max(
            prompt_seconds + change * prompt_tokens, MIN_SHARE_OF_PREVIOUS * prompt_seconds
        )
        self._rows_seconds[rows] = rows * max(
            row_seconds + change * row_weight, MIN_SHARE_OF_PREVIOUS * row_seconds
        )
