"""Who may still join the queue: bounds by requests, tokens, predicted wait and promised TTFT, and the Retry-After that goes with a refusal.

    ledger = Ledger(QueueBounds(ttft_seconds=2.0), slots=16)
    refusal = ledger.refusal(prompt_tokens=300, max_tokens=200, now=clock())
    if refusal is None: ledger.admit(id, 300, 200, now=clock())
    ledger.worked(prompt_tokens=30, output_tokens=10, seconds=0.05)      # each step
    ledger.progressed(id, tokens=1, now=clock()); ledger.finished(id)

Work is counted in tokens, prompt and output alike. The engine's pace is tokens worked per second of stepping, remembered with a half-life.
Sequences begin in the order they joined, each when a slot is free, and those in slots get a token each in the same steps. So it is known
which slot a new one will find, and what its neighbours will still have to do then; all other work must be done before it begins:

    wait = (work outstanding - what the neighbours have left then) / pace        0 while a slot is free
    TTFT = wait + own prompt / pace, and never less than (prompts outstanding + own prompt) / pace of prompts

(the pace of prompts: their tokens per second of the steps that had any). Both are longer by what the HTTP side is behind itself: under a
storm of requests it gets late to each of them, and to each token.

A promised TTFT must hold for nearly all that are let in, not for their mean. So each forecast is held against what came of it, and the
worst of the recent misses is kept free: admitted is who fits with TTFT + margin <= promise. Where no pace is known yet, nothing is
predicted: the other bounds hold, and with a promise nobody may wait. Pure bookkeeping: no clock of its own, no sockets.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heapreplace

import msgspec

PACE_HALF_LIFE_SECONDS = 10.0  # of stepping time
PACE_EVIDENCE_SECONDS = 0.5  # stepping time before a pace is believed
MISSES_KEPT = 200
MISSES_TELL = 20  # fewer say nothing
MARGIN_UNTOLD = 0.3  # of the promise, until the misses tell
MARGIN_LEAST = 0.1  # of the promise, beside the worst miss: the next one may be worse
TELLING_FORECAST = 0.3  # of the promise: how far off a shorter one is says nothing of those near the promise
RETURN_SLACK = 1.1  # those told to come back come a little slower than places become free, so that they find one
WIDEST_MARGIN = 0.5  # of the promise: one stall of the machine must not shut the door for good


class QueueBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the queue ends. None: that bound does not hold."""

    waiting_requests: int | None = 256  # admitted and not begun, beyond the slots
    waiting_tokens: int | None = 1 << 20  # prompt + most output tokens of those
    wait_seconds: float | None = 30.0  # predicted time until a new sequence begins
    ttft_seconds: float | None = None  # promised time to first token, kept for 99 % of those let in
    retry_longest_seconds: float = 60.0
    retry_shortest_seconds: float = 0.1


class Refusal(msgspec.Struct, frozen=True):
    """Why not: `kind` is queue_requests, queue_tokens, queue_wait or queue_ttft (a metric's label); `text` is for people."""

    kind: str
    text: str
    retry_after_seconds: float


class _Entry:
    __slots__ = ("prompt", "limit", "begun", "produced", "admitted_at", "forecast")

    def __init__(self, prompt: int, limit: int, admitted_at: float, forecast: float | None) -> None:
        self.prompt, self.limit, self.begun, self.produced = prompt, limit, False, 0
        self.admitted_at, self.forecast = admitted_at, forecast


class Pace:
    """Tokens per second of stepping, the long past forgotten by halves; None until there is evidence."""

    __slots__ = ("_work", "_seconds")

    def __init__(self) -> None:
        self._work = self._seconds = 0.0

    def worked(self, tokens: int, seconds: float) -> None:
        fade = 0.5 ** (seconds / PACE_HALF_LIFE_SECONDS)
        self._work = self._work * fade + tokens
        self._seconds = self._seconds * fade + seconds

    @property
    def per_second(self) -> float | None:
        return self._work / self._seconds if self._seconds >= PACE_EVIDENCE_SECONDS and self._work > 0 else None


class Misses:
    """How much later than forecast the last ones came, in seconds, and the margin that follows."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=MISSES_KEPT)
        self._worst = 0.0

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self._worst = max(self._last)

    def margin_seconds(self, promise: float) -> float:
        """What must be kept free for nearly all to come in time."""
        if len(self._last) < MISSES_TELL:
            return MARGIN_UNTOLD * promise
        return min(MARGIN_LEAST * promise + max(0.0, self._worst), WIDEST_MARGIN * promise)


class Ledger:
    """The sequences in flight, the work they still are, and the engine's pace."""

    def __init__(self, bounds: QueueBounds, slots: int) -> None:
        self.bounds = bounds
        self._slots = slots
        self.waiting_tokens = 0  # prompt + limit of what has not begun
        self._entries: dict[int, _Entry] = {}
        self._begun = 0
        self._all_prompt = 0  # of everything in flight, begun or not
        self._all_limit = 0
        self._outstanding_limit = 0  # sum of output limits not yet produced
        self._outstanding_prompt = 0  # prompts not yet begun
        self._used_share = 1.0  # of max_tokens, as recent sequences used it
        self._pace = Pace()
        self._prompt_pace = Pace()
        self._misses = Misses()
        self._promised_until = 0.0
        self.lag_seconds = 0.0  # how late the HTTP side gets to what it has to do, at the moment
        self._ends: list[float] | None = None

    @property
    def slots(self) -> int:
        return self._slots

    @slots.setter
    def slots(self, slots: int) -> None:
        self._slots, self._ends = slots, None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def waiting(self) -> int:
        """Sequences admitted that have shown no token yet."""
        return len(self._entries) - self._begun

    @property
    def pace(self) -> float | None:
        """Tokens (prompt and output) per second of stepping; None until there is evidence."""
        return self._pace.per_second

    @property
    def outstanding_work(self) -> float:
        """Tokens still to be worked, with outputs as long as recent ones were in proportion to what was asked."""
        return self._outstanding_prompt + self._used_share * self._outstanding_limit

    def worked(self, prompt_tokens: int, output_tokens: int, seconds: float) -> None:
        """One step did so much in so long."""
        if seconds <= 0:
            return
        self._pace.worked(prompt_tokens + output_tokens, seconds)
        if prompt_tokens:
            self._prompt_pace.worked(prompt_tokens, seconds)

    def forget_pace(self) -> None:
        """Another engine works now: what the last one could do says nothing."""
        self._pace, self._prompt_pace, self._misses = Pace(), Pace(), Misses()

    def predicted_wait_seconds(self) -> float | None:
        """Time until a sequence that joins now begins: 0.0 while a slot is free, None where no pace is known."""
        if len(self._entries) < self.slots:
            return 0.0
        return None if self.pace is None else max(0.0, self._work_before()) / self.pace

    def predicted_ttft_seconds(self, prompt_tokens: int) -> float | None:
        """Time until a sequence that joins now shows its first token; None where no pace is known."""
        pace = self.pace
        if pace is None:
            return None
        lag = 2 * self.lag_seconds  # this request has waited for us that long, and its first token will
        prompts = (self._outstanding_prompt + prompt_tokens) / (self._prompt_pace.per_second or pace)
        if len(self._entries) < self.slots:
            return prompts + lag
        return max(prompts, (self._work_before() + prompt_tokens) / pace) + lag

    def _work_before(self) -> float:
        """Tokens to be worked before a sequence that joins full slots begins."""
        ends = self._slot_ends()
        return self.outstanding_work - sum(ends) + self.slots * ends[0]

    def _slot_ends(self) -> list[float]:
        """When each slot has done what is in flight, in output tokens of one sequence from now; a heap, kept until something moves."""
        if self._ends is None:
            share = self._used_share
            entries = self._entries.values()
            ends = [share * (entry.limit - entry.produced) for entry in entries if entry.begun]
            ends += [0.0] * (self.slots - len(ends))
            heapify(ends)
            for entry in entries:
                if not entry.begun:
                    heapreplace(ends, ends[0] + share * entry.limit)
            self._ends = ends
        return self._ends

    def refusal(self, prompt_tokens: int, max_tokens: int, now: float) -> Refusal | None:
        """Why a sequence of this size may not join now; None: it may. `now` is any monotonic clock."""
        bounds = self.bounds
        backlog = len(self._entries) - self.slots + 1  # places behind the slots that this one would make
        if backlog > 0:
            if bounds.waiting_requests is not None and backlog > bounds.waiting_requests:
                over = self._seconds_for((backlog - bounds.waiting_requests) * self._mean_work())
                return self._refuse("queue_requests", f"{bounds.waiting_requests} requests are waiting, the most allowed", over, now)
            ahead = self.waiting_tokens + prompt_tokens + max_tokens
            if bounds.waiting_tokens is not None and self.waiting_tokens and ahead > bounds.waiting_tokens:
                over = self._seconds_for(ahead - bounds.waiting_tokens)
                return self._refuse("queue_tokens", f"{self.waiting_tokens} tokens are waiting, {bounds.waiting_tokens} at most", over, now)
            wait = self.predicted_wait_seconds()
            if bounds.wait_seconds is not None and wait is not None and wait > bounds.wait_seconds:
                text = f"a wait of {wait:.1f} s is predicted, {bounds.wait_seconds:g} s at most"
                return self._refuse("queue_wait", text, wait - bounds.wait_seconds, now)
        if bounds.ttft_seconds is not None:
            return self._too_late(prompt_tokens, backlog, bounds.ttft_seconds, now)
        if backlog <= 0:
            self._promised_until = now  # there is room: those who were told to come later have not come, or not all
        return None

    def _too_late(self, prompt_tokens: int, backlog: int, promise: float, now: float) -> Refusal | None:
        """The refusal of a sequence whose first token would come after the promised time."""
        nobody_before = backlog <= 0 and self.waiting == 0
        ttft = self.predicted_ttft_seconds(prompt_tokens)
        if ttft is None:
            if backlog > 0:
                return self._refuse("queue_ttft", "all slots are taken, and the pace of the engine is not known yet", 1.0, now)
            return None
        late = ttft + self._misses.margin_seconds(promise) - promise
        if late <= 0 or nobody_before:  # who is alone cannot come at a better time
            if backlog <= 0:
                self._promised_until = now
            return None
        return self._refuse("queue_ttft", f"the first token is predicted after {ttft:.1f} s, {promise:g} s are promised", late, now)

    def admit(self, sequence: int, prompt_tokens: int, max_tokens: int, now: float) -> None:
        """The sequence joins. `now`: the clock that `progressed` will be told."""
        self._join(sequence, _Entry(prompt_tokens, max_tokens, now, self.predicted_ttft_seconds(prompt_tokens)))

    def _join(self, sequence: int, entry: _Entry) -> None:
        self._entries[sequence] = entry
        self._all_prompt += entry.prompt
        self._all_limit += entry.limit
        self._outstanding_prompt += entry.prompt
        self._outstanding_limit += entry.limit
        self.waiting_tokens += entry.prompt + entry.limit
        if self._ends is not None:
            heapreplace(self._ends, self._ends[0] + self._used_share * entry.limit)

    def progressed(self, sequence: int, tokens: int, now: float) -> None:
        """The sequence showed `tokens` new tokens; the first ones end its waiting."""
        entry = self._entries.get(sequence)
        if entry is None:
            return
        self._ends = None
        if not entry.begun:
            entry.begun = True
            self._begun += 1
            self._learn(entry, now)
            self._outstanding_prompt -= entry.prompt
            self.waiting_tokens -= entry.prompt + entry.limit
        counted = min(tokens, entry.limit - entry.produced)
        entry.produced += counted
        self._outstanding_limit -= counted

    def restarted(self, sequence: int) -> None:
        """The sequence begins anew, on another engine."""
        entry = self._entries.get(sequence)
        if entry is not None:
            self._drop(sequence)
            self._join(sequence, _Entry(entry.prompt, entry.limit, entry.admitted_at, None))

    def finished(self, sequence: int, naturally: bool = True) -> None:
        """The sequence is over; `naturally`: its length says something about others (not cancelled, no error)."""
        entry = self._entries.get(sequence)
        if entry is None:
            return
        if naturally and entry.limit:
            self._used_share += 0.05 * (entry.produced / entry.limit - self._used_share)
        self._drop(sequence)

    def _learn(self, entry: _Entry, now: float) -> None:
        promise = self.bounds.ttft_seconds
        if promise is not None and entry.forecast is not None and entry.forecast >= TELLING_FORECAST * promise:
            self._misses.add(now - entry.admitted_at - entry.forecast)

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
        return work / self.pace if self.pace else 1.0

    def _refuse(self, kind: str, text: str, room_in_seconds: float, now: float) -> Refusal:
        """Refusals follow each other by the time one sequence takes to leave, so that those told to come back do not all come at once."""
        spacing = RETURN_SLACK * self._seconds_for(self._mean_work())
        back_at = max(now + room_in_seconds, min(self._promised_until, now + self.bounds.retry_longest_seconds) + spacing)
        self._promised_until = back_at
        retry = min(self.bounds.retry_longest_seconds, max(self.bounds.retry_shortest_seconds, back_at - now))
        return Refusal(kind, f"{text}; try again in {retry:.1f} s", retry)
