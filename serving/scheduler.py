"""Continuous batching over any backend: who gets a slot, what is in the next step, when a sequence ends.

    scheduler = Scheduler(backend, token_bytes, eos_ids, config)
    scheduler.add(submit)
    while scheduler.busy:
        deltas = scheduler.step()

A step is: decode rows first, one token each; then prompt tokens, oldest sequence first, up to a budget. While someone decodes the
budget is what is expected to fit in `step_seconds_target`, so that a long prompt does not stall the others; while nobody does it is
the backend's whole step. When the KV pool is full, idle prefixes go first, then the youngest sequence goes back to the queue with
what it has generated; a sequence is never failed for lack of room.

Where a prompt's log-probabilities are asked for, its tokens go one a step, each a row that scores the next one (Row.target): slow, and
the same on every backend.

Works on token ids and numpy arrays only; knows no tensors, no sockets and no HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from serving.backends.base import Backend, EngineConfig, Row, Sampled, Sampling, TokenLogprobs, Tokens
from serving.errors import KvFull, Unsupported
from serving.messages import Delta, StepStats, Submit, TokenDetail
from serving.text import StreamText

MIN_REUSED_TOKENS = 16  # a shorter common prefix is not worth a copy
PREFILL_MULTIPLE = 16  # prompts are cut at multiples of this: matrix kernels work on so many tokens at a time, and half a block costs 70 %
MIN_PREFILL_TOKENS = PREFILL_MULTIPLE + 1  # progress that a prompt makes in every step, however slow the machine; one may ride
PREFILL_SHARE = 3.75  # what prompts may always have of a step's time, in times of what its decoding rows take
PREFILL_WORTH = 120.0  # and in times of what a row costs more among so few than among many
LEARNING_RATE = 0.3  # of what a prompt token costs and what decoding rows
ROW_WEIGHT = 16.0  # how much more of an error is put down to a row's cost than to a prompt token's: it varies more
_NOTHING_BANNED: tuple[int, ...] = ()
_NO_STEP = (0.0, 0.0, 0, 0)  # seconds, the backend's seconds, decode rows, prompt tokens


class Running:
    """One sequence on its way: its tokens so far and where it stands."""

    __slots__ = (
        "id",
        "tokens",
        "length",
        "prompt_length",
        "limit",
        "sampling",
        "text",
        "stop_ids",
        "min_length",
        "arrived",
        "deadline",
        "scheduled",
        "first_token",
        "slot",
        "computed",
        "cached",
        "state",
        "keeps_history",
        "serial",
        "scores",
        "scoring",
    )

    def __init__(self, submit: Submit, text: StreamText, stop_ids: frozenset[int], limit: int, now: float, serial: int) -> None:
        self.id = submit.id
        self.prompt_length = self.length = len(submit.prompt)
        self.limit = limit
        self.tokens: Tokens = np.empty(max(limit, self.length), np.int32)
        self.tokens[: self.length] = submit.prompt
        self.sampling: Sampling = submit.sampling
        self.text = text
        self.stop_ids = stop_ids
        self.min_length = self.prompt_length + submit.min_tokens
        self.arrived = now
        self.deadline = None if submit.deadline_seconds is None else now + submit.deadline_seconds
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.slot = -1
        self.computed = 0
        self.cached = 0
        self.state: object = None
        self.keeps_history = submit.sampling.needs_logits_work
        self.serial = serial
        count = submit.sampling.prompt_logprobs
        self.scoring = None if count is None else Sampling(logprobs=count)  # how the prompt's tokens are scored
        self.scores: list[TokenDetail] = []  # of the prompt's tokens from the second on, so far as they are known

    @property
    def unscored(self) -> int:
        """How many of the prompt's tokens are still to be scored."""
        return 0 if self.scoring is None else self.prompt_length - 1 - len(self.scores)

    @property
    def fills(self) -> int:
        """How many tokens can be computed as a piece of prompt: all that is known, or up to the next one to be scored."""
        return (len(self.scores) if self.unscored else self.length) - self.computed


class Scheduler:
    """See the module's docstring. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        backend: Backend,
        token_bytes: Sequence[bytes],
        eos_ids: frozenset[int],
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        constrain: Callable[[Sampling], object] | None = None,
    ) -> None:
        """`constrain`: what a request's rows carry in `state` for its grammar (serving.grammar.Grammars.open); None: no grammars here."""
        self.backend, self.info, self.config, self.clock = backend, backend.info, config, clock
        self._constrain = constrain or _no_grammars
        self._table, self._eos = token_bytes, eos_ids
        if self.info.kv_tokens < self.info.context_tokens:
            raise ValueError(
                f"a KV pool of {self.info.kv_tokens} tokens cannot hold one sequence of context_tokens = {self.info.context_tokens}"
            )
        slots = self.info.slots
        self.waiting: deque[Running] = deque()
        self.running: dict[int, Running] = {}  # by slot
        self._by_id: dict[int, Running] = {}
        self._cancelled: set[int] = set()
        self._held: list[Tokens] = [np.empty(0, np.int32) for _ in range(slots)]  # what each idle slot's KV still holds
        self._idle_since: list[float] = [0.0] * slots
        self._reuses = config.prefix_reuse and "prefix_reuse" in self.info.capabilities
        self._prompt_seconds: float | None = None  # a prompt token's cost, learnt from the steps
        self._decode_seconds: dict[int, float] = {}  # what so many decoding rows cost
        self._serial = 0
        self._with_deadline = 0
        self._rides: Callable[[Sequence[int], int], bool] | None = getattr(backend, "rides", None)
        self.preemptions = 0
        self._last_step = _NO_STEP

    # --- in and out -----------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, submit: Submit) -> Delta | None:
        """Queue a sequence; a Delta with finish="refused" comes back where it can never run."""
        room = self.info.context_tokens - len(submit.prompt)
        if not submit.prompt or room < 1:
            why = f"a prompt of {len(submit.prompt)} tokens; 1 to {self.info.context_tokens - 1} fit"
            return Delta(submit.id, 0, "", "refused", error=why)
        try:
            state = self._constrain(submit.sampling)
        except Unsupported as problem:
            return Delta(submit.id, 0, "", "refused", error=str(problem))
        self._serial += 1
        stop_ids = frozenset(submit.stop_token_ids) | (frozenset() if submit.ignore_eos else self._eos)
        limit = len(submit.prompt) + min(submit.max_tokens, room)
        text = StreamText(self._table, submit.stop, submit.include_stop)
        sequence = Running(submit, text, stop_ids, limit, self.clock(), self._serial)
        sequence.state = state
        self._by_id[submit.id] = sequence
        self._with_deadline += sequence.deadline is not None
        self.waiting.append(sequence)
        return None

    def cancel(self, sequence_id: int) -> None:
        """Ends a sequence before the next step; its slot is free at once. Unknown ids (already ended) are fine."""
        if sequence_id in self._by_id:
            self._cancelled.add(sequence_id)

    def stats(self) -> StepStats:
        step_seconds, backend_seconds, decode_rows, prefill_tokens = self._last_step
        used = sum(sequence.computed for sequence in self.running.values())
        return StepStats(
            len(self.running), len(self.waiting), used, step_seconds, backend_seconds, decode_rows, prefill_tokens, self.preemptions
        )

    # --- one step -------------------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Run one step and say what it added to whom. Raises what the backend raises, KvFull aside."""
        started = self.clock()
        deltas = self._end_cancelled_and_late(started)
        self._admit(started)
        if not self.running:
            self._last_step = _NO_STEP
            return deltas
        rows, prompt_tokens = self._rows()
        while True:
            self._make_room(rows)
            rows = [row for row in rows if row.slot in self.running]  # making room may have sent someone back to the queue
            before = self.clock()
            try:
                sampled = self.backend.step(rows)
                break
            except KvFull:
                if not self._drop_idle() and not self._preempt_youngest():
                    raise
                rows = [row for row in rows if row.slot in self.running]
        backend_seconds = self.clock() - before
        self._learn(rows, prompt_tokens, backend_seconds)
        self._collect(rows, sampled, deltas)
        decode_rows = sum(len(row.tokens) == 1 for row in rows)
        self._last_step = (self.clock() - started, backend_seconds, decode_rows, prompt_tokens)
        return deltas

    def _rows(self) -> tuple[list[Row], int]:
        # One token each: the next one is drawn, or scored.
        decoding = [s for s in self.running.values() if s.fills == (0 if s.unscored else 1)]
        filling = [s for s in self.running.values() if s.fills > (0 if s.unscored else 1)]
        rows = [self._row(sequence, 1) for sequence in decoding]
        budget = room = self.info.step_tokens - len(rows)
        if decoding and filling:
            budget = min(room, self._prefill_budget(len(decoding)))
        prompt_tokens = 0
        slots = [sequence.slot for sequence in decoding]
        for sequence in sorted(filling, key=lambda s: s.serial):
            count = min(sequence.fills, budget - prompt_tokens)
            if count < min(sequence.fills, PREFILL_MULTIPLE) and prompt_tokens:
                break  # too little is left for a piece of another prompt
            if PREFILL_MULTIPLE < count < sequence.fills:
                riding = self._rides is not None and bool(slots) and self._rides(slots, sequence.slot)
                count -= (count - riding) % PREFILL_MULTIPLE
                if riding:
                    slots.append(sequence.slot)
            if count <= 0:
                break
            rows.append(self._row(sequence, count))
            prompt_tokens += count
        rows.sort(key=lambda row: row.slot)
        return rows, prompt_tokens

    def _row(self, s: Running, count: int) -> Row:
        end = s.computed + count
        if s.scoring is not None and s.unscored and end > len(s.scores):
            tokens, target = s.tokens[s.computed : end], int(s.tokens[end])
            return Row(s.slot, tokens, s.computed, True, s.scoring, state=s.state, request=s.serial, target=target)
        return Row(
            slot=s.slot,
            tokens=s.tokens[s.computed : end],
            start=s.computed,
            wants_token=end == s.length,
            sampling=s.sampling,
            history=s.tokens[: s.length] if s.keeps_history else None,
            prompt_tokens=s.prompt_length,
            banned=tuple(s.stop_ids) if s.length < s.min_length and s.stop_ids else _NOTHING_BANNED,
            state=s.state,
            request=s.serial,
        )

    def _prefill_budget(self, decoding: int) -> int:
        """Prompt tokens that may share a step with so many decoding rows: what is expected to fit in the target time, but for two bounds.
        Where the decoding rows take most of that themselves (a big model on a small machine), prompts get PREFILL_SHARE times as much time
        as they do: otherwise the queue of prompts would be worked off in steps that are nearly all decoding. And where few rows decode,
        each costs more than it would once the prompts have joined it: that loss is kept small against the time given to prompts."""
        most = self.config.prefill_tokens
        if self._prompt_seconds is None:
            return most
        decode_seconds = self._expected_decode_seconds(decoding) or 0.0
        cheapest = min((seconds / rows for rows, seconds in self._decode_seconds.items()), default=0.0)
        lost_seconds = decode_seconds / decoding - cheapest  # a row
        left = max(self.config.step_seconds_target - decode_seconds, PREFILL_SHARE * decode_seconds, PREFILL_WORTH * lost_seconds)
        return min(most, max(MIN_PREFILL_TOKENS, int(left / self._prompt_seconds)))

    def _expected_decode_seconds(self, rows: int) -> float | None:
        """From the nearest number of rows that there was a step of; None before the first one."""
        if not self._decode_seconds:
            return None
        nearest = min(self._decode_seconds, key=lambda count: abs(count - rows))
        return self._decode_seconds[nearest] * rows / nearest

    def _learn(self, rows: list[Row], prompt_tokens: int, seconds: float) -> None:
        """What a prompt token costs, and what so many decoding rows."""
        decoding = sum(len(row.tokens) for row in rows) - prompt_tokens
        if not prompt_tokens:
            self._learn_apart(decoding, 0, seconds, 0.0)
        elif not decoding:
            self._learn_apart(0, prompt_tokens, 0.0, seconds)
        elif (told := getattr(self.backend, "last_decode_seconds", None)) is not None:
            self._learn_apart(decoding, prompt_tokens, told, seconds - told)
        elif prompt_tokens >= PREFILL_MULTIPLE:
            self._learn_mixed(decoding, prompt_tokens, seconds)

    def _learn_apart(self, decoding: int, prompt_tokens: int, decode_seconds: float, prompt_seconds: float) -> None:
        """Where it is known what each took. The last few tokens of a prompt say more of what a step costs than of what a token does."""
        if decoding:
            expected = self._expected_decode_seconds(decoding)
            self._decode_seconds[decoding] = decode_seconds if expected is None else expected + LEARNING_RATE * (decode_seconds - expected)
        if prompt_tokens >= PREFILL_MULTIPLE:
            found, before = prompt_seconds / prompt_tokens, self._prompt_seconds
            self._prompt_seconds = found if before is None else max(before + LEARNING_RATE * (found - before), 0.1 * before)

    def _learn_mixed(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Where prompts and decoding rows were one pass: a normalised least-mean-squares step tells them apart (Haykin, Adaptive Filter
        Theory, on NLMS)."""
        expected = self._expected_decode_seconds(decoding)
        prompt = self._prompt_seconds if self._prompt_seconds is not None else seconds / (prompt_tokens + decoding)
        row = prompt if expected is None else expected / decoding
        weight = ROW_WEIGHT * decoding
        error = LEARNING_RATE * (seconds - prompt * prompt_tokens - row * decoding) / (prompt_tokens**2 + weight * decoding)
        self._prompt_seconds = max(prompt + error * prompt_tokens, 0.1 * prompt)
        self._decode_seconds[decoding] = decoding * max(row + error * weight, 0.1 * row)

    def _collect(self, rows: list[Row], sampled: list[Sampled], deltas: list[Delta]) -> None:
        drawn: Iterator[Sampled] = iter(sampled)
        for row in rows:
            sequence = self.running[row.slot]
            sequence.computed += len(row.tokens)
            sequence.state = row.state
            if row.wants_token:
                one = next(drawn)
                if row.target is not None:
                    assert one.logprobs is not None
                    sequence.scores.append(_detail(row.target, one.logprobs))
                    continue
                problem = getattr(row.state, "error", None)  # a grammar that was given up: the token is not what was asked for
                if problem is None:
                    deltas.append(self._append(sequence, one))
                else:
                    deltas.append(Delta(sequence.id, 0, sequence.text.finish(), "error", error=str(problem)))
                    self._release(sequence)

    def _append(self, s: Running, drawn: Sampled) -> Delta:
        token = drawn.token
        finish: str | None
        s.tokens[s.length] = token
        s.length += 1
        if token in s.stop_ids and s.length > s.min_length:
            text, finish = "", "stop"
        else:
            text, stopped = s.text.push(token, s.length >= s.min_length)
            finish = "stop" if stopped else "length" if s.length >= s.limit else None
        delta = Delta(s.id, 1, text, finish)
        if drawn.logprobs is not None:
            delta.details = [_detail(token, drawn.logprobs)]
        if s.first_token is None:
            s.first_token = self.clock()
            scheduled = s.scheduled if s.scheduled is not None else s.first_token
            delta.cached_tokens = s.cached
            delta.queue_seconds = scheduled - s.arrived
            delta.prefill_seconds = s.first_token - scheduled
            if s.scoring is not None:
                delta.prompt_details = s.scores
        if finish is not None:
            delta.text += s.text.finish() if finish == "length" or token in s.stop_ids else ""
            self._release(s)
        return delta

    # --- slots and KV ---------------------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        while self.waiting and len(self.running) < self.info.slots:
            sequence = self.waiting[0]
            if self.running and self._used() + sequence.length + len(self.running) > self.info.kv_tokens:
                return  # it would only be preempted again
            self.waiting.popleft()
            slot, reused = self._slot_for(sequence)
            sequence.slot, sequence.computed = slot, reused
            if sequence.scheduled is None:
                sequence.scheduled, sequence.cached = now, reused
            self.running[slot] = sequence
            self._held[slot] = self._held[slot][:0]
            self.backend.truncate(slot, reused)

    def _slot_for(self, sequence: Running) -> tuple[int, int]:
        """A free slot and how many of the sequence's tokens its KV holds (after a copy, where another slot holds more)."""
        free = [slot for slot in range(self.info.slots) if slot not in self.running]
        if not self._reuses:
            return free[0], 0
        # The last token must be computed, for its logits, and so must every one that scores the next.
        wanted = sequence.tokens[: len(sequence.scores) if sequence.unscored else sequence.length - 1]
        best_slot, best = -1, MIN_REUSED_TOKENS - 1
        for slot in range(self.info.slots):
            runner = self.running.get(slot)
            holds = self._held[slot] if runner is None else runner.tokens[: runner.computed]
            common = common_prefix(holds, wanted)
            if common > best or (common == best and slot in free and best_slot not in free and best_slot >= 0):
                best_slot, best = slot, common
        if best_slot < 0:
            # An empty slot first, lowest first; else the one idle for longest.
            return min(free, key=lambda slot: (len(self._held[slot]) > 0, self._idle_since[slot], slot)), 0
        if best_slot in free and (best * 2 >= len(self._held[best_slot]) or len(free) == 1):
            return best_slot, best
        target = min(free, key=lambda slot: (slot == best_slot, len(self._held[slot]) > 0, self._idle_since[slot], slot))
        if target != best_slot:
            self.backend.copy(best_slot, target, best)
        return target, best

    def _used(self) -> int:
        return sum(sequence.computed for sequence in self.running.values())

    def _make_room(self, rows: list[Row]) -> None:
        """Before the step, not after its failure: a pool that is known to be too small gives up idle prefixes, then the youngest."""
        while True:
            active = [row for row in rows if row.slot in self.running]
            need = self._used() + sum(len(row.tokens) for row in active) + sum(len(held) for held in self._held)
            if need <= self.info.kv_tokens or (not self._drop_idle() and not self._preempt_youngest()):
                return

    def _drop_idle(self) -> bool:
        held = [slot for slot in range(self.info.slots) if len(self._held[slot])]
        if not held:
            return False
        oldest = min(held, key=lambda slot: self._idle_since[slot])
        self.backend.truncate(oldest, 0)
        self._held[oldest] = self._held[oldest][:0]
        return True

    def _preempt_youngest(self) -> bool:
        if len(self.running) < 2:
            return False
        youngest = max(self.running.values(), key=lambda s: s.serial)
        del self.running[youngest.slot]
        self.backend.truncate(youngest.slot, 0)
        youngest.slot, youngest.computed = -1, 0
        self.waiting.appendleft(youngest)
        self.preemptions += 1
        return True

    def _release(self, s: Running) -> None:
        if s.slot >= 0:
            del self.running[s.slot]
            if self._reuses:
                self._held[s.slot] = s.tokens[: s.computed]
                self._idle_since[s.slot] = self.clock()
            else:
                self.backend.truncate(s.slot, 0)
        self._by_id.pop(s.id, None)
        self._with_deadline -= s.deadline is not None

    def _end_cancelled_and_late(self, now: float) -> list[Delta]:
        if not self._cancelled and not self._with_deadline:
            return []
        deltas = []
        for s in list(self._by_id.values()):
            late = s.deadline is not None and now > s.deadline
            if s.id in self._cancelled or late:
                deltas.append(Delta(s.id, 0, s.text.finish(), "cancelled" if s.id in self._cancelled else "deadline"))
                if s.slot < 0:
                    self.waiting.remove(s)
                self._release(s)
        self._cancelled.clear()
        return deltas


def _no_grammars(sampling: Sampling) -> None:
    if sampling.grammar is not None or sampling.json_schema is not None:
        raise Unsupported("there are no grammars here", "grammar")


def _detail(token: int, found: TokenLogprobs) -> TokenDetail:
    return TokenDetail(token, found.chosen, found.top_ids, found.top_values)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens the two have in common."""
    shortest = min(len(a), len(b))
    if not shortest or a[0] != b[0]:
        return 0
    different = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(different[0]) if len(different) else shortest
