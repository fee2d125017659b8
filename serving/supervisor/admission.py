"""Who may still join the queue, and the Retry-After of who may not.

    ledger = Ledger(QueueBounds(ttft_seconds=2.0), slots=16)
    ledger.check_room(prompt_tokens=300, max_tokens=200, now=clock())     # raises Overloaded
    ledger.admit(id, 300, 200)
    ledger.progressed(id, tokens=1); ledger.finished(id)

Work is counted in tokens, prompt and output alike, and done at the step clock's pace. Sequences
begin in the order they joined, each when a slot is free, and those in slots get a token each in the
same steps. So it is known which slot a new one will find, and what its neighbours will still have
to do then; all other work must be done before it begins:

    wait = (work outstanding - what the neighbours have left then) / pace     0 while a slot is free
    TTFT = wait + own prompt / pace, at least (prompts outstanding + own prompt) / pace of prompts

Both are longer by the lag of the HTTP process. Where no pace is known nothing is predicted: the
other bounds hold, and with a TTFT SLO nobody may wait. Pure: no clock of time, no sockets.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import msgspec

from serving.engine.prefill_budget import StepClock
from serving.errors import Overloaded

MARGIN = 0.3  # of the TTFT SLO, kept free: it must hold for nearly all, and forecasts miss
RETURN_SLACK = 1.1  # spacing of retries over the pace at which places become free


class QueueBounds(msgspec.Struct, frozen=True):
    """Where the queue ends. None: that bound does not hold."""

    waiting_requests: int | None = 256  # admitted and not begun, beyond the slots
    waiting_tokens: int | None = 1 << 20  # prompt + most output tokens of those
    wait_seconds: float | None = 30.0  # predicted time until a new sequence begins
    ttft_seconds: float | None = None  # SLO of the TTFT
    retry_longest_seconds: float = 60.0
    retry_shortest_seconds: float = 0.1


class _Entry:
    """One sequence in flight, in tokens."""

    __slots__ = ("prompt", "limit", "begun", "produced")

    def __init__(self, prompt: int, limit: int) -> None:
        self.prompt = prompt
        self.limit = limit
        self.begun = False
        self.produced = 0


class Ledger:
    """The sequences in flight, the work they still are, and the pace of the engine that does it."""

    def __init__(self, bounds: QueueBounds, slots: int) -> None:
        self.bounds = bounds
        self.clock = StepClock()
        self.lag_seconds = 0.0  # how late the HTTP process is, at the moment
        self.waiting = 0  # sequences that have shown no token yet
        self._slots = slots
        self._entries: dict[int, _Entry] = {}
        self._waiting_prompt = 0  # tokens of those that wait
        self._waiting_limit = 0
        self._outstanding_limit = 0  # outputs not yet produced, of all
        self._used_share = 1.0  # of max_tokens, as recent sequences used it
        self._promised_until = 0.0
        self._ends: list[float] | None = None

    def serve_with(self, slots: int, clock: StepClock) -> None:
        """Another engine works now."""
        self._slots = slots
        self._ends = None
        self.clock = clock

    @property
    def most_sequences(self) -> int | None:
        """That can be in flight together, in slots and waiting; None: no bound holds."""
        waiting = self.bounds.waiting_requests
        return None if waiting is None else self._slots + waiting

    def predicted_wait_seconds(self) -> float | None:
        """Time until a new sequence begins: 0.0 while a slot is free; None: no pace is known."""
        if len(self._entries) < self._slots:
            return 0.0
        pace = self.clock.tokens_per_second
        return None if pace is None else max(0.0, self._work_before()) / pace

    def predicted_ttft_seconds(self, prompt_tokens: int) -> float | None:
        """Time until a new sequence shows its first token; None: no pace is known."""
        pace = self.clock.tokens_per_second
        if pace is None:
            return None
        lag = 2 * self.lag_seconds  # this request has waited that long, and its first token will
        prompt_pace = self.clock.prompt_tokens_per_second or pace
        prompts = (self._waiting_prompt + prompt_tokens) / prompt_pace
        if len(self._entries) < self._slots:
            return prompts + lag
        return max(prompts, (self._work_before() + prompt_tokens) / pace) + lag

    def _work_outstanding(self) -> float:
        return self._waiting_prompt + self._used_share * self._outstanding_limit

    def _work_before(self) -> float:
        """Tokens to be worked before a sequence that joins full slots begins."""
        if self._ends is None:
            self._ends = self._slot_ends()
        return self._work_outstanding() - sum(self._ends) + self._slots * self._ends[0]

    def _slot_ends(self) -> list[float]:
        """When each slot is done, in output tokens of one sequence from now; a heap."""
        share, entries = self._used_share, self._entries.values()
        ends = [share * (entry.limit - entry.produced) for entry in entries if entry.begun]
        ends += [0.0] * (self._slots - len(ends))
        heapify(ends)
        for entry in entries:
            if not entry.begun:
                heapreplace(ends, ends[0] + share * entry.limit)
        return ends

    def check_room(self, prompt_tokens: int, max_tokens: int, now: float) -> None:
        """Raises Overloaded where a sequence of this size may not join now. `now`: monotonic."""
        bounds = self.bounds
        backlog = len(self._entries) - self._slots + 1  # places behind the slots, with this one
        if backlog > 0:
            most = bounds.waiting_requests
            if most is not None and backlog > most:
                text = f"{most} requests are waiting, the most allowed"
                over = self._seconds_for((backlog - most) * self._mean_work())
                raise self._refused("queue_requests", text, over, now)
            most, waiting = bounds.waiting_tokens, self._waiting_prompt + self._waiting_limit
            ahead = waiting + prompt_tokens + max_tokens
            if most is not None and waiting and ahead > most:
                text = f"{waiting} tokens are waiting, {most} at most"
                raise self._refused("queue_tokens", text, self._seconds_for(ahead - most), now)
            longest, wait = bounds.wait_seconds, self.predicted_wait_seconds()
            if longest is not None and wait is not None and wait > longest:
                text = f"a wait of {wait:.1f} s is predicted, {longest:g} s at most"
                raise self._refused("queue_wait", text, wait - longest, now)
        slo = bounds.ttft_seconds
        if slo is not None and (backlog > 0 or self.waiting):  # else no better time can come
            ttft = self.predicted_ttft_seconds(prompt_tokens)
            if ttft is None and backlog > 0:
                text = "all slots are taken, and the pace of the engine is not known yet"
                raise self._refused("queue_ttft", text, 1.0, now)
            if ttft is not None and (late := ttft - (1 - MARGIN) * slo) > 0:
                text = f"the first token is predicted after {ttft:.1f} s, {slo:g} s are promised"
                raise self._refused("queue_ttft", text, late, now)
        if backlog <= 0:
            self._promised_until = now  # there is room: those told to come later have not all come

    def admit(self, sequence: int, prompt_tokens: int, max_tokens: int) -> None:
        """The sequence joins."""
        self._entries[sequence] = _Entry(prompt_tokens, max_tokens)
        self._outstanding_limit += max_tokens
        self._count_waiting(1, prompt_tokens, max_tokens)
        if self._ends is not None:
            heapreplace(self._ends, self._ends[0] + self._used_share * max_tokens)

    def progressed(self, sequence: int, tokens: int) -> None:
        """The sequence showed `tokens` new tokens; the first ones end its waiting."""
        entry = self._entries[sequence]
        self._ends = None
        if not entry.begun:
            entry.begun = True
            self._count_waiting(-1, entry.prompt, entry.limit)
        counted = min(tokens, entry.limit - entry.produced)
        entry.produced += counted
        self._outstanding_limit -= counted

    def restarted(self, sequence: int) -> None:
        """The sequence begins again, on another engine."""
        entry = self._entries[sequence]
        self.finished(sequence, naturally=False)
        self.admit(sequence, entry.prompt, entry.limit)

    def finished(self, sequence: int, naturally: bool = True) -> None:
        """The sequence is over; `naturally`: no error or cancellation, a typical length."""
        entry = self._entries.pop(sequence)
        self._ends = None
        if naturally and entry.limit:
            self._used_share += 0.05 * (entry.produced / entry.limit - self._used_share)
        self._outstanding_limit -= entry.limit - entry.produced
        if not entry.begun:
            self._count_waiting(-1, entry.prompt, entry.limit)

    def _count_waiting(self, sign: int, prompt: int, limit: int) -> None:
        self.waiting += sign
        self._waiting_prompt += sign * prompt
        self._waiting_limit += sign * limit

    def _mean_work(self) -> float:
        """Expected work of a sequence: of those that wait, else what is left of those that run."""
        if self.waiting:
            work = self._waiting_prompt + self._used_share * self._waiting_limit
            return work / self.waiting
        return self._work_outstanding() / max(1, len(self._entries))

    def _seconds_for(self, work: float) -> float:
        pace = self.clock.tokens_per_second
        return work / pace if pace else 1.0

    def _refused(self, kind: str, text: str, room_in_seconds: float, now: float) -> Overloaded:
        """Refusals are spaced by the time one sequence takes to leave, so that retries do not come
        all at once."""
        bounds = self.bounds
        spacing = RETURN_SLACK * self._seconds_for(self._mean_work())
        promised = min(self._promised_until, now + bounds.retry_longest_seconds)
        self._promised_until = max(now + room_in_seconds, promised + spacing)
        wait = max(bounds.retry_shortest_seconds, self._promised_until - now)
        retry = min(bounds.retry_longest_seconds, wait)
        return Overloaded(f"{text}; try again in {retry:.1f} s", retry, kind)
