"""Who may still join the queue, and the Retry-After of who may not.

    ledger = Ledger(QueueBounds(ttft_seconds=2.0), 16, sequences)
    ledger.check_room(prompt_tokens=300, max_tokens=200, now=clock())     # raises Overloaded
    ledger.joined(sequence); ledger.changed()

Work is counted in tokens, prompt and output alike, and done at the engine's pace. Sequences
begin in the order they joined, each when a slot is free, and those in slots get a token each in the
same steps. So it is known which slot a new one will find, and what its neighbours will still have
to do then; all other work must be done before it begins:

    wait = (work outstanding - what the neighbours have left then) / pace     0 while a slot is free
    TTFT = wait + own prompt / pace, at least (prompts outstanding + own prompt) / pace of prompts

Both are longer by the lag of the HTTP process. Where no pace is known nothing is predicted: the
other bounds hold, and with a TTFT SLO nobody may wait. Pure: no clock of time, no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapreplace

import msgspec

from serving.errors import Overloaded

MARGIN = 0.3  # of the TTFT SLO, kept free: it must hold for nearly all, and forecasts miss
RETURN_SLACK = 1.1  # spacing of retries over the pace at which places become free
HALF_LIFE_SECONDS = 10.0  # of what a pace is learnt from, in stepping time
RETRY_SECONDS = 0.1, 60.0  # the shortest and the longest Retry-After
EVIDENCE_SECONDS = 0.5  # stepping time before a pace is believed


class QueueBounds(msgspec.Struct, frozen=True):
    """Where the queue ends. None: that bound does not hold."""

    waiting_requests: int | None = 256  # admitted and not begun, beyond the slots
    waiting_tokens: int | None = 1 << 20  # prompt + most output tokens of those
    wait_seconds: float | None = 30.0  # predicted time until a new sequence begins
    ttft_seconds: float | None = None  # SLO of the TTFT


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


class Work:
    """One sequence in flight, in tokens. It has begun once it has produced one."""

    def __init__(self, prompt_tokens: int, max_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.produced = 0


class _Load:
    """All that is in flight. `ends`: when each slot is done with its part, in output tokens of one
    sequence from now; a heap."""

    def __init__(self, slots: int) -> None:
        self.waiting = self.waiting_prompts = self.waiting_limits = 0
        self.outputs = 0.0
        self.ends = [0.0] * slots

    def add(self, one: Work, used_share: float) -> None:
        left = used_share * (one.max_tokens - one.produced)
        self.outputs += left
        heapreplace(self.ends, self.ends[0] + left)
        if not one.produced:
            self.waiting += 1
            self.waiting_prompts += one.prompt_tokens
            self.waiting_limits += one.max_tokens

    @property
    def before(self) -> float:
        """Tokens to be worked before a sequence that joins full slots begins."""
        left_then = sum(self.ends) - len(self.ends) * self.ends[0]
        return max(0.0, self.waiting_prompts + self.outputs - left_then)


class Ledger:
    """The work of `sequences`, which are in flight, and the pace of the engine that does it."""

    def __init__(self, bounds: QueueBounds, slots: int, sequences: Mapping[int, Work]) -> None:
        self.bounds = bounds
        self.pace = Pace()
        self.lag_seconds = 0.0  # how late the HTTP process is, at the moment
        self._slots = slots
        self._sequences = sequences
        self._used_share = 1.0  # of max_tokens, as recent sequences used it
        self._promised_until = 0.0
        self._known: _Load | None = None

    def serve_with(self, slots: int, pace: Pace) -> None:
        """Another engine works now."""
        self._slots, self.pace, self._known = slots, pace, None

    @property
    def most_sequences(self) -> int | None:
        """That can be in flight together, in slots and waiting; None: no bound holds."""
        waiting = self.bounds.waiting_requests
        return None if waiting is None else self._slots + waiting

    def joined(self, one: Work) -> None:
        """One more is in flight."""
        if self._known is not None:
            self._known.add(one, self._used_share)

    def changed(self) -> None:
        """Sequences have gone on, or begin again."""
        self._known = None

    def ended(self, one: Work, naturally: bool) -> None:
        """One less; `naturally`: no error or cancellation, a typical length."""
        self._known = None
        if naturally and one.max_tokens:
            self._used_share += 0.05 * (one.produced / one.max_tokens - self._used_share)

    def predicted_wait_seconds(self) -> float | None:
        """Time until a new sequence begins: 0.0 while a slot is free; None: no pace is known."""
        if len(self._sequences) < self._slots:
            return 0.0
        pace = self.pace.tokens_per_second
        return None if pace is None else self._load().before / pace

    def predicted_ttft_seconds(self, prompt_tokens: int) -> float | None:
        """Time until a new sequence shows its first token; None: no pace is known."""
        pace, load = self.pace.tokens_per_second, self._load()
        if pace is None:
            return None
        prompt_pace = self.pace.prompt_tokens_per_second or pace
        seconds = (load.waiting_prompts + prompt_tokens) / prompt_pace
        if len(self._sequences) >= self._slots:
            seconds = max(seconds, (load.before + prompt_tokens) / pace)
        return seconds + 2 * self.lag_seconds  # it has waited that long, and its first token will

    def check_room(self, prompt_tokens: int, max_tokens: int, now: float) -> None:
        """Raises Overloaded where a sequence of this size may not join now. `now`: monotonic."""
        bounds, load = self.bounds, self._load()
        backlog = len(self._sequences) - self._slots + 1  # places behind the slots, with this one
        if backlog > 0:
            most = bounds.waiting_requests
            if most is not None and backlog > most:
                text = f"{most} requests are waiting, the most allowed"
                over = self._seconds_for((backlog - most) * self._mean_work())
                raise self._refused("queue_requests", text, over, now)
            most, waiting = bounds.waiting_tokens, load.waiting_prompts + load.waiting_limits
            ahead = waiting + prompt_tokens + max_tokens
            if most is not None and waiting and ahead > most:
                text = f"{waiting} tokens are waiting, {most} at most"
                raise self._refused("queue_tokens", text, self._seconds_for(ahead - most), now)
            longest, wait = bounds.wait_seconds, self.predicted_wait_seconds()
            if longest is not None and wait is not None and wait > longest:
                text = f"a wait of {wait:.1f} s is predicted, {longest:g} s at most"
                raise self._refused("queue_wait", text, wait - longest, now)
        slo = bounds.ttft_seconds
        if slo is not None and (backlog > 0 or load.waiting):  # else no better time can come
            ttft = self.predicted_ttft_seconds(prompt_tokens)
            if ttft is None and backlog > 0:
                text = "all slots are taken, and the pace of the engine is not known yet"
                raise self._refused("queue_ttft", text, 1.0, now)
            if ttft is not None and (late := ttft - (1 - MARGIN) * slo) > 0:
                text = f"the first token is predicted after {ttft:.1f} s, {slo:g} s are promised"
                raise self._refused("queue_ttft", text, late, now)
        if backlog <= 0:
            self._promised_until = now  # there is room: those told to come later have not all come

    def _load(self) -> _Load:
        if self._known is None:
            self._known = _Load(self._slots)
            for one in self._sequences.values():
                self._known.add(one, self._used_share)
        return self._known

    def _mean_work(self) -> float:
        """Expected work of a sequence: of those that wait, else what is left of those that run."""
        load = self._load()
        if load.waiting:
            work = load.waiting_prompts + self._used_share * load.waiting_limits
            return work / load.waiting
        return load.outputs / max(1, len(self._sequences))

    def _seconds_for(self, work: float) -> float:
        pace = self.pace.tokens_per_second
        return work / pace if pace else 1.0

    def _refused(self, kind: str, text: str, room_in_seconds: float, now: float) -> Overloaded:
        """Refusals are spaced by the time one sequence takes to leave, so that retries do not come
        all at once."""
        shortest, longest = RETRY_SECONDS
        spacing = RETURN_SLACK * self._seconds_for(self._mean_work())
        promised = min(self._promised_until, now + longest)
        self._promised_until = max(now + room_in_seconds, promised + spacing)
        retry = min(longest, max(shortest, self._promised_until - now))
        return Overloaded(f"{text}; try again in {retry:.1f} s", retry, kind)
