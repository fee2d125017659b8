"""How many prompt tokens may share a step with decoding rows; learns what both cost."""

from __future__ import annotations

PREFILL_MULTIPLE = 16  # prompts are cut at multiples: matrix kernels take so many tokens at a time
MIN_PREFILL_TOKENS = PREFILL_MULTIPLE + 1  # of every step, however slow the machine; one may ride
PREFILL_SHARE = 3.75  # prefill may always take this many times the decode time of the step
PREFILL_WORTH = 120.0  # and this many times what a row costs more among few rows than among many
LEARNING_RATE = 0.3
ROW_WEIGHT = 16.0  # share of an error put down to a row's cost, in times of a prompt token's


class PrefillBudget:
    """Learns the seconds of a prompt token and of n decoding rows."""

    def __init__(self, most_tokens: int, step_seconds_target: float) -> None:
        self._most = most_tokens
        self._target = step_seconds_target
        self._prompt_seconds: float | None = None  # of one token
        self._decode_seconds: dict[int, float] = {}  # by the number of rows

    def tokens(self, decoding: int) -> int:
        """Prompt tokens of a step with so many decoding rows: what fits in the target time.

        Two bounds keep prompts going. Where decoding takes most of the target, prefill still gets
        PREFILL_SHARE times its time. Where few rows decode, each costs more than it would beside
        more rows: that loss stays small against the time given to prompts.
        """
        if self._prompt_seconds is None:
            return self._most
        decode_seconds = self._expected(decoding) or 0.0
        cheapest = min(
            (seconds / rows for rows, seconds in self._decode_seconds.items()), default=0.0
        )
        lost_seconds = decode_seconds / decoding - cheapest
        left = max(
            self._target - decode_seconds,
            PREFILL_SHARE * decode_seconds,
            PREFILL_WORTH * lost_seconds,
        )
        return min(self._most, max(MIN_PREFILL_TOKENS, int(left / self._prompt_seconds)))

    def learn(
        self, decoding: int, prompt_tokens: int, seconds: float, decode_seconds: float | None
    ) -> None:
        """Take in a step. `decode_seconds`: the decoding rows' part, where the backend knows it."""
        if not prompt_tokens:
            self._learn_decode(decoding, seconds)
        elif not decoding:
            self._learn_prompt(prompt_tokens, seconds)
        elif decode_seconds is not None:
            self._learn_decode(decoding, decode_seconds)
            self._learn_prompt(prompt_tokens, seconds - decode_seconds)
        elif prompt_tokens >= PREFILL_MULTIPLE:
            self._learn_mixed(decoding, prompt_tokens, seconds)

    def _expected(self, rows: int) -> float | None:
        """Seconds of decoding rows, from the nearest number seen; None before the first step."""
        if not self._decode_seconds:
            return None
        nearest = min(self._decode_seconds, key=lambda count: abs(count - rows))
        return self._decode_seconds[nearest] * rows / nearest

    def _learn_decode(self, decoding: int, seconds: float) -> None:
        expected = self._expected(decoding)
        if expected is not None:
            seconds = expected + LEARNING_RATE * (seconds - expected)
        self._decode_seconds[decoding] = seconds

    def _learn_prompt(self, prompt_tokens: int, seconds: float) -> None:
        if prompt_tokens < PREFILL_MULTIPLE:
            return  # says more of what a step costs than of what a token does
        found = seconds / prompt_tokens
        before = self._prompt_seconds
        if before is not None:
            found = max(before + LEARNING_RATE * (found - before), 0.1 * before)
        self._prompt_seconds = found

    def _learn_mixed(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Prompts and rows in one pass: a normalised least-mean-squares step tells them apart
        (Haykin, Adaptive Filter Theory)."""
        expected = self._expected(decoding)
        prompt = self._prompt_seconds
        if prompt is None:
            prompt = seconds / (prompt_tokens + decoding)
        row = prompt if expected is None else expected / decoding
        weight = ROW_WEIGHT * decoding
        error = LEARNING_RATE * (seconds - prompt * prompt_tokens - row * decoding)
        error /= prompt_tokens**2 + weight * decoding
        self._prompt_seconds = max(prompt + error * prompt_tokens, 0.1 * prompt)
        self._decode_seconds[decoding] = decoding * max(row + error * weight, 0.1 * row)
