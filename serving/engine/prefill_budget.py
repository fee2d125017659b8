"""What steps cost, learnt from steps (StepClock), and how many prompt tokens may share a step with
decoding rows (prefill_tokens).

    clock = StepClock()
    clock.learn(rows=4, prompt_tokens=256, seconds=0.31)
    clock.prompt_seconds, clock.rows_seconds(8)
"""

from __future__ import annotations

from serving.performance.scheduler_settings import SchedulerSettings

PREFILL_MULTIPLE = 16  # prompts are cut at multiples: matrix kernels take so many tokens at a time
MIN_PREFILL_TOKENS = PREFILL_MULTIPLE + 1  # of every step: no piece leaves one token of 17
PREFILL_SHARE = 3.75  # prefill may always take this many times the decode time of the step
PREFILL_WORTH = 120.0  # and this many times what a row costs more among few rows than among many
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

    @property
    def cheapest_row_seconds(self) -> float:
        """Of one row, among as many as make it cheapest; 0.0: none has been seen."""
        return min((s / rows for rows, s in self._rows_seconds.items()), default=0.0)

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


def prefill_tokens(clock: StepClock, rows: int, settings: SchedulerSettings) -> int:
    """Prompt tokens of a step with so many decoding rows: what fits in the target time.

    Two bounds keep prompts going. Where decoding takes most of the target, prefill still gets
    PREFILL_SHARE times its time. Where few rows decode, each costs more than it would beside more
    rows: that loss stays small against the time given to prompts.
    """
    most, target_seconds = settings.prefill_tokens, settings.step_seconds_target
    if clock.prompt_seconds is None or target_seconds is None:
        return most
    decode_seconds = clock.rows_seconds(rows) or 0.0
    lost_seconds = decode_seconds / rows - clock.cheapest_row_seconds
    left = max(
        target_seconds - decode_seconds,
        PREFILL_SHARE * decode_seconds,
        PREFILL_WORTH * lost_seconds,
    )
    return min(most, max(MIN_PREFILL_TOKENS, int(left / clock.prompt_seconds)))
