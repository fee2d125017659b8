"""What steps cost, learned from the steps so far.

clock = StepClock()
clock.learn(rows=4, prompt_tokens=256, seconds=0.31)
clock.prompt_seconds, clock.rows_seconds(8)
"""

from __future__ import annotations

from crossover.serving.capacity.plan_step import PREFILL_MULTIPLE

LEARNING_RATE = 0.3
ROW_WEIGHT = 16.0  # share of an error put down to a row's cost, in times of a prompt token's


class StepClock:
    """Seconds of a prompt token and of n decoding rows. None until steps have told it."""

    def __init__(self) -> None:
        self.prompt_seconds: float | None = None  # of one token
        self._rows_seconds: dict[int, float] = {}  # by the number of rows

    def learn(
        self, rows: int, prompt_tokens: int, seconds: float, decode_seconds: float | None = None
    ) -> None:
        """Take in a step. `decode_seconds`: the decoding rows' part, where the backend knows it."""
        if seconds <= 0:
            return
        if rows and prompt_tokens and decode_seconds is None:
            if prompt_tokens >= PREFILL_MULTIPLE:
                self._learn_mixed(rows, prompt_tokens, seconds)
            return
        of_rows = (decode_seconds or 0.0) if prompt_tokens else seconds
        if rows:
            before = self.rows_seconds(rows)
            step = of_rows if before is None else before + LEARNING_RATE * (of_rows - before)
            self._rows_seconds[rows] = step
        if prompt_tokens >= PREFILL_MULTIPLE:  # fewer say more of what a step costs
            found, old = (seconds - of_rows * bool(rows)) / prompt_tokens, self.prompt_seconds
            if old is not None:
                found = max(old + LEARNING_RATE * (found - old), 0.1 * old)
            self.prompt_seconds = found

    def rows_seconds(self, rows: int) -> float | None:
        """Seconds of a step of so many decoding rows, from the nearest number seen."""
        if not self._rows_seconds:
            return None
        nearest = min(self._rows_seconds, key=lambda count: abs(count - rows))
        return self._rows_seconds[nearest] * rows / nearest

    def row_costs(self, rows: int) -> tuple[float, float]:
        """See StepCosts in crossover.serving.capacity.plan_step."""
        cheapest = min((s / count for count, s in self._rows_seconds.items()), default=0.0)
        return self.rows_seconds(rows) or 0.0, cheapest

    def prompt_tokens_in(self, seconds: float) -> int | None:
        """Prompt tokens that take so long; None: no prompt has been seen."""
        return None if self.prompt_seconds is None else int(seconds / self.prompt_seconds)

    def _learn_mixed(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Prompts and rows in one pass: a normalised least-mean-squares step tells them apart
        (Haykin, Adaptive Filter Theory)."""
        expected = self.rows_seconds(rows)
        prompt = self.prompt_seconds or seconds / (prompt_tokens + rows)
        row = prompt if expected is None else expected / rows
        weight = ROW_WEIGHT * rows
        error = LEARNING_RATE * (seconds - prompt * prompt_tokens - row * rows)
        error /= prompt_tokens**2 + weight * rows
        self.prompt_seconds = max(prompt + error * prompt_tokens, 0.1 * prompt)
        self._rows_seconds[rows] = rows * max(row + error * weight, 0.1 * row)
