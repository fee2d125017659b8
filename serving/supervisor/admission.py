"""Admission control: which requests may join the queue, and the Retry-After of the others.

    ledger = AdmissionController(QueueBounds(ttft_seconds=2.0), 16, sequences)
    ledger.check_room(prompt_tokens=300)     # raises Overloaded
    ledger.known_load = None                 # sequences have joined, gone on, or begin again

Work is counted in tokens, prompt and output alike, and done at the engine's pace. Sequences begin
in the order they joined, each in the slot that is free first, and those in slots get a token each
in the same steps:

    wait = (prompts that wait + slots x outputs until a slot is free) / pace     0 while one is free
    TTFT = wait + own prompt / pace, at least (prompts that wait + own prompt) / pace of prompts

While the pace is unknown nothing is predicted: the other limits apply, and with a TTFT SLO no
request may wait. Pure: no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapreplace
from typing import Protocol

import msgspec

from serving.errors import Overloaded

MARGIN = 0.3  # of the TTFT SLO, kept free: it must hold for nearly all, and forecasts miss
HALF_LIFE_SECONDS = 10.0  # of what a pace is learnt from, in stepping time
EVIDENCE_SECONDS = 0.5  # stepping time before a pace is believed


class QueueBounds(msgspec.Struct, frozen=True):
    """Where the queue ends."""

    waiting_requests: int = 256  # admitted and not begun, beyond the slots
    wait_seconds: float = 30.0  # predicted time until a new sequence begins
    ttft_seconds: float | None = None  # SLO of the TTFT; None: there is none


class Pace:
    """Tokens per second of stepping, the last steps above all. None until steps have told it."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # fading
        self._prompt_tokens = self._prompt_seconds = 0.0  # of the steps that had a prompt

    def learn(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Take in a step; one of no time is only a message."""
        if seconds <= 0:
            return
        fade = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        self._tokens = self._tokens * fade + rows + prompt_tokens
        self._seconds = self._seconds * fade + seconds
        if prompt_tokens:
            self._prompt_tokens = self._prompt_tokens * fade + prompt_tokens
            self._prompt_seconds = self._prompt_seconds * fade + seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens, prompt and output alike."""
        is_known = self._seconds >= EVIDENCE_SECONDS and self._tokens
        return self._tokens / self._seconds if is_known else None

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Prompt tokens, in the steps that had any; else the pace of all."""
        is_known = self._prompt_seconds >= EVIDENCE_SECONDS
        return self._prompt_tokens / self._prompt_seconds if is_known else self.tokens_per_second


class Work(Protocol):
    """One sequence in flight, in tokens. It has begun once it has produced one."""

    prompt_tokens: int
    max_tokens: int
    produced: int


class AdmissionController:
    """The work of `sequences`, which are in flight, and the pace of the engine that does it."""

    def __init__(self, bounds: QueueBounds, slots: int, sequences: Mapping[int, Work]) -> None:
        self.bounds = bounds
        self.pace = Pace()
        self._slots = slots
        self._sequences = sequences
        self._used_share = 1.0  # of max_tokens, as recent sequences used it
        self.known_load: tuple[int, float] | None = None  # _load(), while it stays as it is

    def ended(self, one: Work, naturally: bool) -> None:
        """One less; `naturally`: no error or cancellation, a typical length."""
        self.known_load = None
        if naturally and one.max_tokens:
            self._used_share += 0.05 * (one.produced / one.max_tokens - self._used_share)

    def predicted_wait_seconds(self) -> float | None:
        """Time until a new sequence begins: 0.0 while a slot is free; None: no pace is known."""
        if len(self._sequences) < self._slots:
            return 0.0
        pace = self.pace.tokens_per_second
        return None if pace is None else self._load()[1] / pace

    def predicted_ttft_seconds(self, prompt_tokens: int) -> float | None:
        """Time until a new sequence shows its first token; None: no pace is known."""
        pace, (prompts, before) = self.pace.tokens_per_second, self._load()
        if pace is None:
            return None
        seconds = (prompts + prompt_tokens) / (self.pace.prompt_tokens_per_second or pace)
        if len(self._sequences) >= self._slots:
            seconds = max(seconds, (before + prompt_tokens) / pace)
        return seconds

    def check_room(self, prompt_tokens: int = 1) -> None:
        """Raises Overloaded where a sequence with this prompt may not join now."""
        bounds, waits = self.bounds, len(self._sequences) >= self._slots
        if waits:
            wait = self.predicted_wait_seconds()
            if len(self._sequences) >= self._slots + bounds.waiting_requests:
                text = f"The queue is full: {bounds.waiting_requests} requests are waiting"
                raise _refused("queue_requests", text, wait)
            if wait is not None and wait > bounds.wait_seconds:
                limit = f"the maximum of {bounds.wait_seconds:g} s"
                text = f"The predicted wait of {wait:.1f} s exceeds {limit}"
                raise _refused("queue_wait", text, wait - bounds.wait_seconds)
        slo = bounds.ttft_seconds
        if slo is not None and (waits or self._load()[0]):  # else no better time can come
            ttft = self.predicted_ttft_seconds(prompt_tokens)
            if ttft is None and waits:
                text = "All slots are in use, and the speed of the engine is not known yet"
                raise _refused("queue_ttft", text, None)
            if ttft is not None and (late := ttft - (1 - MARGIN) * slo) > 0:
                text = f"The predicted TTFT of {ttft:.1f} s exceeds the limit of {slo:g} s"
                raise _refused("queue_ttft", text, late)

    def _load(self) -> tuple[int, float]:
        """Prompt tokens of sequences that have not begun, and all tokens to be worked before one
        begins that joins full slots."""
        if self.known_load is None:
            prompts, ends = 0, [0.0] * self._slots  # of each slot's part, in tokens of one sequence
            for one in self._sequences.values():
                left = self._used_share * (one.max_tokens - one.produced)
                heapreplace(ends, ends[0] + left)
                prompts += 0 if one.produced else one.prompt_tokens
            self.known_load = prompts, prompts + self._slots * max(0.0, ends[0])
        return self.known_load


def _refused(kind: str, text: str, room_in_seconds: float | None) -> Overloaded:
    retry = min(60.0, max(0.1, 1.0 if room_in_seconds is None else room_in_seconds))
    return Overloaded(f"{text}. Try again in {retry:.1f} s.", retry, kind)
