"""Who may still join the queue, and the Retry-After of who may not.

    ledger = Ledger(QueueBounds(ttft_seconds=2.0), slots=16)
    refusal = ledger.refusal(prompt_tokens=300, max_tokens=200, now=clock())
    if refusal is None: ledger.admit(id, 300, 200)
    ledger.clock.learn(rows=10, prompt_tokens=30, seconds=0.05)      # each step
    ledger.progressed(id, tokens=1); ledger.finished(id)

Work is counted in tokens, prompt and output alike, and done at the step clock's pace. Sequences
begin in the order they joined, each when a slot is free, and those in slots get a token each in the
same steps. So it is known which slot a new one will find, and what its neighbours will still have
to do then; all other work must be done before it begins:

    wait = (work outstanding - what the neighbours have left then) / pace     0 while a slot is free
    TTFT = wait + own prompt / pace, at least (prompts outstanding + own prompt) / pace of prompts

Both are longer by the lag of the HTTP process. A TTFT SLO must hold for nearly all that are
admitted, so MARGIN of it is kept free. Where no pace is known nothing is predicted: the other
bounds hold, and with a TTFT SLO nobody may wait. Pure: no clock of time of its own, no sockets.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import msgspec

from serving.engine.prefill_budget import StepClock

MARGIN = 0.3  # of the TTFT SLO: forecasts miss
RETURN_SLACK = 1.1  # spacing of retries over the pace at which places become free


class QueueBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the queue ends. None: that bound does not hold."""

    waiting_requests: int | None = 256  # admitted and not begun, beyond the slots
    waiting_tokens: int | None = 1 << 20  # prompt + most output tokens of those
    wait_seconds: float | None = 30.0  # predicted time until a new sequence begins
    ttft_seconds: float | None = None  # SLO of the TTFT
    retry_longest_seconds: float = 60.0
    retry_shortest_seconds: float = 0.1


class Refusal(msgspec.Struct, frozen=True):
    """`kind`: queue_requests, queue_tokens, queue_wait or queue_ttft; `text` is for people."""

    kind: str
    text: str
    retry_after_seconds: float


class _Entry:
    """One sequence in flight, in tokens."""

    __slots__ = ("prompt", "limit", "begun", "produced")

    def __init__(self, prompt: int, limit: int) -> None:
        self.prompt = prompt
        self.limit = limit
        self.begun = False
        self.produced = 0


class Ledger:
    """The sequences in flight, the work they still are, and the engine's step clock."""

    def __init__(self, bounds: QueueBounds, slots: int) -> None:
        self.bounds = bounds
        self.clock = StepClock()
        self.lag_seconds = 0.0  # how late the HTTP process is, at the moment
        self.waiting_tokens = 0  # prompt + limit of what has not begun
        self._slots = slots
        self._entries: dict[int, _Entry] = {}
        self._begun = 0
        self._all_prompt = 0  # of everything in flight, begun or not
        self._all_limit = 0
        self._outstanding_limit = 0  # sum of output limits not yet produced
        self._outstanding_prompt = 0  # prompts not yet begun
        self._used_share = 1.0  # of max_tokens, as recent sequences used it
        self._promised_until = 0.0
        self._ends: list[float] | None = None

    def serve_with(self, slots: int) -> None:
        """Another engine works now: what the last one could do says nothing."""
        self._slots = slots
        self._ends = None
        self.clock = StepClock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def waiting(self) -> int:
        """Sequences admitted that have shown no token yet."""
        return len(self._entries) - self._begun

    @property
    def outstanding_work(self) -> float:
        """Tokens still to be worked; outputs use the share of max_tokens that recent ones used."""
        return self._outstanding_prompt + self._used_share * self._outstanding_limit

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
        prompts = (self._outstanding_prompt + prompt_tokens) / prompt_pace
        if len(self._entries) < self._slots:
            return prompts + lag
        return max(prompts, (self._work_before() + prompt_tokens) / pace) + lag

    def _work_before(self) -> float:
        """Tokens to be worked before a sequence that joins full slots begins."""
        ends = self._slot_ends()
        return self.outstanding_work - sum(ends) + self._slots * ends[0]

    def _slot_ends(self) -> list[float]:
        """When each slot is done, in output tokens of one sequence from now; a cached heap."""
        if self._ends is None:
            share = self._used_share
            entries = self._entries.values()
            ends = [share * (entry.limit - entry.produced) for entry in entries if entry.begun]
            ends += [0.0] * (self._slots - len(ends))
            heapify(ends)
            for entry in entries:
                if not entry.begun:
                    heapreplace(ends, ends[0] + share * entry.limit)
            self._ends = ends
        return self._ends

    def refusal(self, prompt_tokens: int, max_tokens: int, now: float) -> Refusal | None:
        """Why a sequence of this size may not join now; None: it may. `now`: monotonic."""
        backlog = len(self._entries) - self._slots + 1  # places behind the slots, with this one
        refusal = None
        if backlog > 0:
            refusal = self._queue_full(prompt_tokens + max_tokens, backlog, now)
        if refusal is None and self.bounds.ttft_seconds is not None:
            refusal = self._too_late(prompt_tokens, backlog, self.bounds.ttft_seconds, now)
        if refusal is None and backlog <= 0:
            self._promised_until = now  # there is room: those told to come later have not all come
        return refusal

    def _queue_full(self, tokens: int, backlog: int, now: float) -> Refusal | None:
        """The refusal of a sequence of so many tokens by requests, tokens or wait."""
        bounds = self.bounds
        if bounds.waiting_requests is not None and backlog > bounds.waiting_requests:
            over = self._seconds_for((backlog - bounds.waiting_requests) * self._mean_work())
            text = f"{bounds.waiting_requests} requests are waiting, the most allowed"
            return self._refuse("queue_requests", text, over, now)
        most = bounds.waiting_tokens
        ahead = self.waiting_tokens + tokens
        if most is not None and self.waiting_tokens and ahead > most:
            text = f"{self.waiting_tokens} tokens are waiting, {most} at most"
            return self._refuse("queue_tokens", text, self._seconds_for(ahead - most), now)
        wait = self.predicted_wait_seconds()
        if bounds.wait_seconds is not None and wait is not None and wait > bounds.wait_seconds:
            text = f"a wait of {wait:.1f} s is predicted, {bounds.wait_seconds:g} s at most"
            return self._refuse("queue_wait", text, wait - bounds.wait_seconds, now)
        return None

    def _too_late(self, prompt_tokens: int, backlog: int, slo: float, now: float) -> Refusal | None:
        """The refusal of a sequence whose TTFT would miss the SLO."""
        if backlog <= 0 and self.waiting == 0:
            return None  # it cannot come at a better time
        ttft = self.predicted_ttft_seconds(prompt_tokens)
        if ttft is None:
            if backlog <= 0:
                return None
            text = "all slots are taken, and the pace of the engine is not known yet"
            return self._refuse("queue_ttft", text, 1.0, now)
        late = ttft - (1 - MARGIN) * slo
        if late <= 0:
            return None
        text = f"the first token is predicted after {ttft:.1f} s, {slo:g} s are promised"
        return self._refuse("queue_ttft", text, late, now)

    def admit(self, sequence: int, prompt_tokens: int, max_tokens: int) -> None:
        """The sequence joins."""
        self._entries[sequence] = _Entry(prompt_tokens, max_tokens)
        self._all_prompt += prompt_tokens
        self._all_limit += max_tokens
        self._outstanding_prompt += prompt_tokens
        self._outstanding_limit += max_tokens
        self.waiting_tokens += prompt_tokens + max_tokens
        if self._ends is not None:
            heapreplace(self._ends, self._ends[0] + self._used_share * max_tokens)

    def progressed(self, sequence: int, tokens: int) -> None:
        """The sequence showed `tokens` new tokens; the first ones end its waiting."""
        entry = self._entries.get(sequence)
        if entry is None:
            return
        self._ends = None
        if not entry.begun:
            entry.begun = True
            self._begun += 1
            self._outstanding_prompt -= entry.prompt
            self.waiting_tokens -= entry.prompt + entry.limit
        counted = min(tokens, entry.limit - entry.produced)
        entry.produced += counted
        self._outstanding_limit -= counted

    def restarted(self, sequence: int) -> None:
        """The sequence begins again, on another engine."""
        entry = self._entries.get(sequence)
        if entry is not None:
            self._drop(sequence)
            self.admit(sequence, entry.prompt, entry.limit)

    def finished(self, sequence: int, naturally: bool = True) -> None:
        """The sequence is over; `naturally`: no error or cancellation, a typical length."""
        entry = self._entries.get(sequence)
        if entry is None:
            return
        if naturally and entry.limit:
            self._used_share += 0.05 * (entry.produced / entry.limit - self._used_share)
        self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        entry = self._entries.pop(sequence)
        self._ends = None
        self._all_prompt -= entry.prompt
        self._all_limit -= entry.limit
        self._outstanding_limit -= entry.limit - entry.produced
        if entry.begun:
            self._begun -= 1
        else:
            self._outstanding_prompt -= entry.prompt
            self.waiting_tokens -= entry.prompt + entry.limit

    def _mean_work(self) -> float:
        """Expected work of one whole sequence of those in flight."""
        if not self._entries:
            return 0.0
        return (self._all_prompt + self._used_share * self._all_limit) / len(self._entries)

    def _seconds_for(self, work: float) -> float:
        pace = self.clock.tokens_per_second
        return work / pace if pace else 1.0

    def _refuse(self, kind: str, text: str, room_in_seconds: float, now: float) -> Refusal:
        """Refusals are spaced by the time one sequence takes to leave, so that retries do not come
        all at once."""
        bounds = self.bounds
        spacing = RETURN_SLACK * self._seconds_for(self._mean_work())
        promised = min(self._promised_until, now + bounds.retry_longest_seconds)
        self._promised_until = max(now + room_in_seconds, promised + spacing)
        wait = max(bounds.retry_shortest_seconds, self._promised_until - now)
        retry = min(bounds.retry_longest_seconds, wait)
        return Refusal(kind, f"{text}; try again in {retry:.1f} s", retry)
