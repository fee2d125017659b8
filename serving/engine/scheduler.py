"""Continuous batching over any backend: who gets a slot, what is in the next step, who ends.

    scheduler = Scheduler(backend, token_bytes, eos_ids, config)
    scheduler.add(submit)
    while scheduler.busy:
        deltas = scheduler.step()

A free slot goes to the oldest sequence that waits. A step holds decode rows first, one token each,
then prompt tokens, oldest first, up to a budget (serving.engine.prefill_budget; the backend's whole
step where nobody decodes). When the KV pool is full, idle prefixes go first, then the youngest
sequence returns to the queue with what it has generated.

Where the backend can launch a step (serving.backends.backend_interface), the next one is launched
before the tokens of the one under way are read: the device has work while the host makes text. Its
rows stand for tokens that are still being drawn; where one ends its sequence, what the next step
draws for it is dropped. Where a row's token must be drawn on the host (grammars, log-probabilities,
min_tokens) or the pool is full, each step is read before the next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serving.backends.backend_interface import Backend, EngineConfig, Launched
from serving.engine.detokenizer import StreamText
from serving.engine.ipc_messages import Delta, FinishReason, StepStats, Submit
from serving.engine.prefill_budget import PREFILL_MULTIPLE, StepClock, prefill_tokens
from serving.engine.sequence import Sequence
from serving.engine.slot_allocator import SlotAllocator
from serving.errors import EngineFailed, KvFull, NotNumbers, ServingError, Unsupported
from serving.sampling.step_rows import NO_TOKEN, Row, Sampled

MOST_BROKEN = 8  # sequences in a row whose logits are NaN: then it is not the prompts


@dataclass(slots=True)
class Flight:
    """`launched`: the step may still be under way, else `sampled` is what it drew."""

    rows: list[Row]
    sequences: list[Sequence]  # of the rows
    prompt_tokens: int
    began: float  # by the scheduler's clock
    seconds: float  # so far, in the backend
    launched: Launched | None
    sampled: list[Sampled]

    @property
    def decoding(self) -> int:
        """Tokens that are no piece of a prompt."""
        return sum(len(row.tokens) for row in self.rows) - self.prompt_tokens


class Scheduler:
    """See the module's docstring. Not thread-safe: one loop owns it."""

    def __init__(
        self,
        backend: Backend,
        token_bytes: list[bytes],
        eos_ids: frozenset[int],
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        info = backend.info
        if info.kv_tokens < info.context_tokens:
            raise ValueError(
                f"a KV pool of {info.kv_tokens} tokens cannot hold one sequence of "
                f"context_tokens = {info.context_tokens}"
            )
        self.backend = backend
        self.info = info
        self.clock = clock
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by slot
        self.preemptions = 0
        self._table = token_bytes
        self._eos = eos_ids
        reuses = config.prefix_reuse and "prefix_reuse" in info.capabilities
        self._slots = SlotAllocator(backend, reuses)
        self._step_clock = StepClock()
        self._most_prefill = config.prefill_tokens
        self._step_target = config.step_seconds_target
        self._by_id: dict[int, Sequence] = {}
        self._cancelled: set[int] = set()
        self._serial = 0
        self._with_deadline = 0
        self._broken = 0  # sequences ended by NaN since a token was drawn
        self._flight: Flight | None = None  # the step under way
        self._landed = 0.0  # when the last step's tokens were there
        self._must_wait = False  # a token has to be drawn by `step`
        self._last_step = StepStats(0, 0, 0, 0.0, 0.0, 0, 0, 0)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, submit: Submit, state: object = None) -> Delta | None:
        """Queue a sequence; a Delta with finish "refused" comes back where it can never run.

        `state`: what its rows carry for its grammar (serving.sampling.grammar.Matcher).
        """
        request = submit.request
        if not 1 <= len(request.prompt) < self.info.context_tokens:
            most = self.info.context_tokens - 1
            why = f"a prompt of {len(request.prompt)} tokens; 1 to {most} fit"
            return Delta(submit.id, 0, "", FinishReason.REFUSED, error=why)
        self._serial += 1
        text = StreamText(self._table, request.stop, request.include_stop)
        sequence = Sequence(submit, text, self._eos, self.info.context_tokens, self._serial)
        sequence.arrived = self.clock()
        sequence.state = state
        if request.deadline_seconds is not None:
            sequence.deadline = sequence.arrived + request.deadline_seconds
            self._with_deadline += 1
        self._by_id[submit.id] = sequence
        self.waiting.append(sequence)
        return None

    def cancel(self, sequence_id: int) -> None:
        """End a sequence before the next step. Unknown ids (already ended) are fine."""
        if sequence_id in self._by_id:
            self._cancelled.add(sequence_id)

    def drop_all(self) -> None:
        """Forget every sequence; the process is to end."""
        self.waiting.clear()
        self.running.clear()
        self._by_id.clear()
        self._flight = None

    def stats(self) -> StepStats:
        """The state now, and what the last step cost."""
        self._last_step.running = len(self.running)
        self._last_step.waiting = len(self.waiting)
        self._last_step.kv_used_tokens = self._used()
        self._last_step.preemptions = self.preemptions
        return self._last_step

    def step(self) -> list[Delta]:
        """Run one step; says what it added to whom. Raises what the backend raises but KvFull."""
        started = self.clock()
        deltas = self._end_cancelled_and_late(started)
        self._admit(started)
        self._last_step = StepStats(0, 0, 0, 0.0, 0.0, 0, 0, 0)
        if not self.running:
            self._flight = None  # of sequences that were ended
            return deltas
        flight = self._flight or self._run()
        self._flight = self._run_ahead(flight)
        self._land(flight, deltas)
        if not self.running:
            self._flight = None
        self._last_step.decode_rows = sum(len(row.tokens) == 1 for row in flight.rows)
        self._last_step.prefill_tokens = flight.prompt_tokens
        self._last_step.step_seconds = self.clock() - started
        return deltas

    def _schedule(self) -> tuple[list[Row], set[int]]:
        """The rows of the next step in slot order, and the slots of those that are prefill."""
        going_on = [s for s in self.running.values() if not s.draws_last]
        filling = [s for s in going_on if s.pending > 1]
        rows = [s.row(1) for s in going_on if s.pending <= 1]
        budget = self.info.step_tokens - len(rows)
        if rows and filling:
            most, target = self._most_prefill, self._step_target
            budget = min(budget, prefill_tokens(self._step_clock, len(rows), most, target))
        left = budget
        for sequence in sorted(filling, key=lambda s: s.serial):
            count = min(sequence.pending, left)
            if count < min(sequence.pending, PREFILL_MULTIPLE) and left < budget:
                break  # too little is left for a piece of another prompt
            if PREFILL_MULTIPLE < count < sequence.pending:
                count -= count % PREFILL_MULTIPLE
            if count <= 0:
                break
            rows.append(sequence.row(count))
            left -= count
        rows.sort(key=lambda row: row.slot)
        return rows, {sequence.slot for sequence in filling}

    def _run(self) -> Flight:
        """The next step: launched where the backend can, else done."""
        rows, filling = self._schedule()
        while True:
            self._make_room(rows)
            rows = [row for row in rows if row.slot in self.running]  # some may have been preempted
            before = self.clock()
            try:
                launched = None if self._must_wait else self._launch(rows, None)
                sampled = [] if launched is not None else self.backend.step(rows)
            except KvFull:
                if not self._slots.drop_oldest() and not self._preempt_youngest():
                    raise
            else:
                if launched is None:
                    self._must_wait = False
                return self._begun(rows, filling, before, launched, sampled)

    def _run_ahead(self, flight: Flight) -> Flight | None:
        """The step after one that may still be under way; None where that has to be read first."""
        if flight.launched is None or self._must_wait:
            return None
        rows, filling = self._schedule()
        if not rows or not self._has_room(rows):
            return None
        before = self.clock()
        try:
            launched = self._launch(rows, flight.launched)
        except KvFull:
            return None
        if launched is None:
            return None
        return self._begun(rows, filling, before, launched, [])

    def _launch(self, rows: list[Row], after: Launched | None) -> Launched | None:
        launch = getattr(self.backend, "launch", None)
        if launch is None or any(
            row.wants_token and self.running[row.slot].is_drawn_by_step for row in rows
        ):
            return None
        launched: Launched | None = launch(rows, after)
        return launched

    def _begun(
        self,
        rows: list[Row],
        filling: set[int],
        began: float,
        launched: Launched | None,
        sampled: list[Sampled],
    ) -> Flight:
        """What the backend was given: from now on these tokens count as computed."""
        seconds = self.clock() - began
        self._last_step.backend_seconds += seconds
        sequences = [self.running[row.slot] for row in rows]
        for row, sequence in zip(rows, sequences, strict=True):
            sequence.computed += len(row.tokens)
        prompt_tokens = sum(len(row.tokens) for row in rows if row.slot in filling)
        return Flight(rows, sequences, prompt_tokens, began, seconds, launched, sampled)

    def _land(self, flight: Flight, deltas: list[Delta]) -> None:
        """Read what a step drew, and give it to the sequences that still run."""
        found: list[Sampled | None] = [*flight.sampled]
        seconds = flight.seconds
        if flight.launched is not None:
            before = self.clock()
            found = flight.launched.tokens()
            now = self.clock()
            self._last_step.backend_seconds += now - before
            seconds = now - max(flight.began, self._landed)  # the device is done with one at a time
            self._landed = now
        told = getattr(self.backend, "last_decode_seconds", None)
        self._step_clock.learn(flight.decoding, flight.prompt_tokens, seconds, told)
        drawn = iter(found)
        for row, sequence in zip(flight.rows, flight.sequences, strict=True):
            one = next(drawn) if row.wants_token else None
            is_stale = (
                self.running.get(row.slot) is not sequence or sequence.computed < row.position
            )
            if is_stale or not row.wants_token:
                continue
            if one is None:
                sequence.missed(row.position - 1)
                self._must_wait = True
                continue
            self._take(sequence, row, one, deltas)

    def _take(self, sequence: Sequence, row: Row, found: Sampled, deltas: list[Delta]) -> None:
        """What a row drew becomes its sequence's."""
        if found.token == NO_TOKEN:
            deltas.append(self._no_numbers(sequence))
            return
        self._broken = 0
        problem: ServingError | None = getattr(row.state, "error", None)  # of its grammar
        if problem is None:
            delta = token_delta(sequence, found, self.clock())
        else:
            delta = failed_delta(sequence.id, problem, sequence.text.finish())
        deltas.append(delta)
        if delta.finish is not None:
            self._release(sequence)

    def _no_numbers(self, sequence: Sequence) -> Delta:
        """End a sequence whose logits are NaN; its KV is worth nothing. Raises EngineFailed where
        that is so of one after another."""
        self._broken += 1
        if self._broken > MOST_BROKEN:
            raise EngineFailed("the model's logits are not numbers (NaN), whatever it is asked")
        sequence.computed = 0
        self._release(sequence)
        problem = NotNumbers("this prompt makes the model's logits NaN")
        return failed_delta(sequence.id, problem, sequence.text.finish())

    def _admit(self, now: float) -> None:
        while self.waiting and len(self.running) < self.info.slots:
            sequence = self.waiting[0]
            promised = sum(s.length for s in self.running.values())
            if (
                self.running
                and promised + sequence.length + len(self.running) > self.info.kv_tokens
            ):
                return  # it would only be preempted again
            self.waiting.popleft()
            computed = {slot: s.held for slot, s in self.running.items()}
            known = sequence.tokens[: sequence.length - 1]  # the last one's logits are needed
            sequence.slot, sequence.computed = self._slots.take(known, computed)
            if sequence.scheduled is None:
                sequence.scheduled = now
                sequence.cached = sequence.computed
            self.running[sequence.slot] = sequence

    def _used(self) -> int:
        return sum(sequence.computed for sequence in self.running.values())

    def _has_room(self, rows: list[Row]) -> bool:
        new = sum(len(row.tokens) for row in rows if row.slot in self.running)
        return self._used() + new + self._slots.idle_tokens <= self.info.kv_tokens

    def _make_room(self, rows: list[Row]) -> None:
        """Before the step, where the pool is known to be too small for it."""
        while not self._has_room(rows):
            if not self._slots.drop_oldest() and not self._preempt_youngest():
                return

    def _preempt_youngest(self) -> bool:
        if len(self.running) < 2:
            return False
        youngest = max(self.running.values(), key=lambda s: s.serial)
        del self.running[youngest.slot]
        self.backend.truncate(youngest.slot, 0)
        youngest.slot = -1
        youngest.computed = 0
        self.waiting.appendleft(youngest)
        self.preemptions += 1
        return True

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            del self.running[sequence.slot]
            self._slots.release(sequence.slot, sequence.held, self.clock())
        self._by_id.pop(sequence.id, None)
        self._with_deadline -= sequence.deadline is not None

    def _end_cancelled_and_late(self, now: float) -> list[Delta]:
        if not self._cancelled and not self._with_deadline:
            return []
        deltas = []
        for sequence in list(self._by_id.values()):
            if sequence.id in self._cancelled:
                finish = FinishReason.CANCELLED
            elif sequence.deadline is not None and now > sequence.deadline:
                finish = FinishReason.DEADLINE
            else:
                continue
            deltas.append(Delta(sequence.id, 0, sequence.text.finish(), finish))
            if sequence.slot < 0:
                self.waiting.remove(sequence)
            self._release(sequence)
        self._cancelled.clear()
        return deltas


def token_delta(sequence: Sequence, drawn: Sampled, now: float) -> Delta:
    """Append a drawn token to its sequence; says what that adds to the answer."""
    token = drawn.token
    sequence.tokens[sequence.length] = token
    sequence.length += 1
    text, finish = _text_and_finish(sequence, token)
    delta = Delta(sequence.id, 1, text, finish)
    if drawn.logprobs is not None:
        delta.details = [drawn.logprobs]
    if sequence.length == sequence.prompt_length + 1:
        assert sequence.scheduled is not None
        delta.cached_tokens = sequence.cached
        delta.queue_seconds = sequence.scheduled - sequence.arrived
        delta.prefill_seconds = now - sequence.scheduled
    return delta


def _text_and_finish(sequence: Sequence, token: int) -> tuple[str, FinishReason | None]:
    if token in sequence.stop_ids and sequence.length > sequence.min_length:
        return sequence.text.finish(), FinishReason.STOP
    text, stopped = sequence.text.push(token, sequence.length >= sequence.min_length)
    if stopped:
        return text, FinishReason.STOP
    if sequence.length >= sequence.limit:
        return text + sequence.text.finish(), FinishReason.LENGTH
    return text, None


def failed_delta(number: int, problem: ServingError, text: str = "") -> Delta:
    """The last Delta of a sequence that its own request or an error of ours ends."""
    if isinstance(problem, Unsupported):
        refused, parameter = FinishReason.REFUSED, problem.parameter
        return Delta(number, 0, text, refused, error=str(problem), parameter=parameter)
    return Delta(number, 0, text, FinishReason.ERROR, error=str(problem))
