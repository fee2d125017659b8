"""Admission control: which requests may join the queue, and the Retry-After of the others.

    admission = AdmissionController(QueueBounds(ttft_seconds=2.0), 16, sequences)
    admission.check_room(prompt_tokens=300)     # raises Overloaded
    admission.cached_load = None                 # after any change of the sequences

Work is counted in tokens, prompt and output tokens alike. The engine processes it at its pace, in
tokens/s, as steps with all slots in use show it: a step with one request takes almost as long for a
single token. The prediction assumes that sequences start in the order in which they joined, each in
the first free slot, and that all sequences in slots get a token in each step:

    wait = (waiting prompt tokens + slots x output tokens until a slot is free) / pace
    TTFT = wait + own prompt tokens / pace

With several engines, slots and pace are those of all of them, and a prompt is processed at the pace
of one. The wait is 0 while a slot is free. TTFT is at least (waiting + own prompt tokens) / pace of
steps with prompts.

While the pace is unknown, nothing is predicted: only the limits on the queue's length apply, and
with a TTFT SLO no request may wait. Pure: no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapreplace
from typing import Protocol

import msgspec

from crossover.serving.errors import Overloaded

MARGIN = 0.3  # share of the TTFT SLO kept in reserve, because predictions are inexact
HALF_LIFE_SECONDS = 10.0  # of the weight of a step in the pace, in seconds of stepping
EVIDENCE_SECONDS = 0.5  # seconds of stepping before the pace is used
USED_SHARE_RATE = 0.05  # weight of one more sequence in the mean share of max_tokens that is used
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 60.0
UNKNOWN_RETRY_SECONDS = 1.0  # if nothing can be predicted


class QueueBounds(msgspec.Struct, frozen=True):
    """The limits of the queue."""

    waiting_requests: int = 256  # admitted but not started
    wait_seconds: float = 30.0  # predicted time until a new sequence starts
    ttft_seconds: float | None = None  # TTFT limit of the SLO; None: no limit


class Pace:
    """The engine's speed in tokens per second of stepping, weighted toward recent steps."""

    def __init__(self) -> None:
        # Exponentially decaying sums, of steps with all slots in use.
        self._tokens = self._seconds = 0.0
        self._prompt_tokens = self._prompt_seconds = 0.0  # those of steps with a prompt

    def learn(self, rows: int, prompt_tokens: int, seconds: float, is_full: bool) -> None:
        """Add a step of this duration. Steps without duration are only messages and are ignored.
        `is_full`: all slots were in use."""
        if seconds <= 0:
            return
        fade = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        if is_full:
            self._tokens = self._tokens * fade + rows + prompt_tokens
            self._seconds = self._seconds * fade + seconds
        if prompt_tokens:
            self._prompt_tokens = self._prompt_tokens * fade + prompt_tokens
            self._prompt_seconds = self._prompt_seconds * fade + seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The pace with all slots in use, in tokens/s, prompt and output tokens alike; None while
        it is unknown."""
        is_known = self._seconds >= EVIDENCE_SECONDS and self._tokens
        return self._tokens / self._seconds if is_known else None

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """The pace in prompt tokens/s, in steps with prompts. If that is unknown, the pace of all
        steps."""
        is_known = self._prompt_seconds >= EVIDENCE_SECONDS
        return self._prompt_tokens / self._prompt_seconds if is_known else self.tokens_per_second


class JointPace(Pace):
    """The pace of several equal engines together. That of an engine that is not known yet is the
    mean of the others'."""

    def __init__(self, paces: Sequence[Pace]) -> None:
        super().__init__()
        self._paces = paces

    @property
    def tokens_per_second(self) -> float | None:
        return self._together([pace.tokens_per_second for pace in self._paces])

    @property
    def prompt_tokens_per_second(self) -> float | None:
        return self._together([pace.prompt_tokens_per_second for pace in self._paces])

    def _together(self, paces: Sequence[float | None]) -> float | None:
        known = [pace for pace in paces if pace is not None]
        return len(paces) * sum(known) / len(known) if known else None


class Work(Protocol):
    """One sequence in flight, in tokens. It counts as started once it has produced a token."""

    prompt_tokens: int
    max_tokens: int
    produced: int


class AdmissionController:
    """Decides which requests may join the `sequences` in flight, from their work and the engine's
    pace."""

    def __init__(self, bounds: QueueBounds, slots: int, sequences: Mapping[int, Work]) -> None:
        self.bounds = bounds
        self.pace = Pace()
        self._slots = slots  # of all engines
        self._engines_serving = 1  # of which each processes a prompt at its part of the pace
        self._sequences = sequences
        self._used_share = 1.0  # share of max_tokens that recent sequences used
        self.cached_load: tuple[int, float] | None = None  # cached result of _load()

    def ended(self, sequence: Work, naturally: bool) -> None:
        """Learn from a sequence that has ended. `naturally`: without error or cancellation, so that
        its length is typical."""
        self.cached_load = None
        if naturally and sequence.max_tokens:
            used_share = sequence.produced / sequence.max_tokens
            self._used_share += USED_SHARE_RATE * (used_share - self._used_share)

    def predicted_wait_seconds(self) -> float | None:
        """Return the predicted time until a new sequence starts: 0.0 while a slot is free, and None
        if the pace is unknown."""
        if len(self._sequences) < self._slots:
            return 0.0
        pace = self.pace.tokens_per_second
        return None if pace is None else self._load()[1] / pace

    def predicted_ttft_seconds(self, prompt_tokens: int) -> float | None:
        """Return the predicted TTFT of a new sequence; None if the pace is unknown."""
        pace, prompt_pace = self.pace.tokens_per_second, self.pace.prompt_tokens_per_second
        must_wait = len(self._sequences) >= self._slots
        if prompt_pace is None or (must_wait and pace is None):
            return None
        waiting_prompt_tokens, tokens_until_free = self._load()
        own_tokens = prompt_tokens * self._engines_serving
        seconds = (waiting_prompt_tokens + own_tokens) / prompt_pace
        if must_wait and pace is not None:
            seconds = max(seconds, (tokens_until_free + own_tokens) / pace)
        return seconds

    def check_room(self, prompt_tokens: int = 1) -> None:
        """Check that a sequence with this prompt may join now. Raises Overloaded."""
        bounds = self.bounds
        must_wait = len(self._sequences) >= self._slots
        if must_wait:
            wait = self.predicted_wait_seconds()
            if len(self._sequences) >= self._slots + bounds.waiting_requests:
                text = f"The queue is full: {bounds.waiting_requests} requests are waiting"
                raise _refused("queue_requests", text, wait)
            if wait is not None and wait > bounds.wait_seconds:
                limit = f"the maximum of {bounds.wait_seconds:g} s"
                text = f"The predicted wait of {wait:.1f} s exceeds {limit}"
                raise _refused("queue_wait", text, wait - bounds.wait_seconds)
        if bounds.ttft_seconds is not None:
            self._check_ttft(prompt_tokens, bounds.ttft_seconds, must_wait)

    def _check_ttft(self, prompt_tokens: int, limit_seconds: float, must_wait: bool) -> None:
        """Check that the predicted TTFT is within the SLO's limit. Raises Overloaded."""
        waiting_prompt_tokens, _ = self._load()
        if not must_wait and not waiting_prompt_tokens:
            return  # it would start at once, so that trying again later would not help
        ttft = self.predicted_ttft_seconds(prompt_tokens)
        if ttft is None:
            if must_wait:
                text = "All slots are in use, and the speed of the engine is not known yet"
                raise _refused("queue_ttft", text, None)
            return
        excess = ttft - (1 - MARGIN) * limit_seconds
        if excess > 0:
            text = f"The predicted TTFT of {ttft:.1f} s exceeds the limit of {limit_seconds:g} s"
            raise _refused("queue_ttft", text, excess)

    def _load(self) -> tuple[int, float]:
        """Return the prompt tokens of sequences that have not started, and the tokens that the
        engine processes until a slot becomes free for a new sequence."""
        if self.cached_load is None:
            waiting_prompt_tokens = 0
            # A heap: after how many output tokens each slot is free.
            slot_free_at = [0.0] * self._slots
            for work in self._sequences.values():
                remaining = self._used_share * (work.max_tokens - work.produced)
                heapreplace(slot_free_at, slot_free_at[0] + remaining)
                if not work.produced:
                    waiting_prompt_tokens += work.prompt_tokens
            output_tokens = self._slots * max(0.0, slot_free_at[0])
            self.cached_load = waiting_prompt_tokens, waiting_prompt_tokens + output_tokens
        return self.cached_load


def _refused(kind: str, text: str, room_in_seconds: float | None) -> Overloaded:
    """Return the error for a request that may not join. `room_in_seconds` is the predicted time
    until it may; None if unknown."""
    if room_in_seconds is None:
        room_in_seconds = UNKNOWN_RETRY_SECONDS
    retry_seconds = min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, room_in_seconds))
    return Overloaded(f"{text}. Try again in {retry_seconds:.1f} s.", retry_seconds, kind)
