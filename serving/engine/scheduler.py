"""Continuous batching over any backend: admits sequences, plans steps, and ends sequences.

    scheduler = Scheduler(backend, token_bytes, eos_ids, config)
    scheduler.add(submit)
    while scheduler.busy:
        deltas = scheduler.step()

A free slot goes to the oldest waiting sequence. A step contains one token of each decoding
sequence, and then prompt tokens, oldest prompt first, as many as
`crossover.serving.capacity.plan_step` allows. When the KV pool is full, the KV of idle slots is
freed first; then the youngest sequence returns to the queue with what it has generated. What is
freed goes to the prompt cache if there is one.

If the backend can launch a step without waiting for it
(crossover.serving.backends.backend_interface), the next step is launched before the tokens of the
in-flight step are read, so that the device has work while the host makes text. The rows of the next
step then stand for tokens that are still being sampled; if one of these ends its sequence, what the
next step samples for that sequence is dropped. If a row's token must be sampled on the host
(grammars, log-probabilities, min_tokens), or if the pool is full, each step is read before the next
one starts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from crossover.serving.backends.backend_interface import Backend, EngineConfig, Launched
from crossover.serving.capacity.plan_step import plan_step
from crossover.serving.engine.detokenize_and_stop import StreamText
from crossover.serving.engine.ipc_messages import Delta, FinishReason, StepStats, Submit
from crossover.serving.engine.sequence import Sequence
from crossover.serving.engine.slot_allocator import SlotAllocator
from crossover.serving.engine.step_clock import StepClock
from crossover.serving.errors import EngineFailed, KvFull, ServingError, Unsupported
from crossover.serving.sampling.step_inputs import NO_TOKEN, Row, Sampled

# If a launched step could not sample a token of a sequence, it is likely that the next ones cannot
# either. So many of the sequence's next tokens are then sampled by `Backend.step`.
WAITED_TOKENS = 16
MAX_BROKEN = 8  # if more sequences in a row have NaN logits, the engine itself is broken


class InFlightStep(NamedTuple):
    """A step that the backend has begun. If it was launched, it may still be running; otherwise it
    is complete."""

    rows: list[Row]
    sequences: list[Sequence]  # of the rows
    prompt_tokens: int
    started: float  # by the scheduler's clock
    seconds: float  # spent in the backend so far
    launched: Launched | None  # None: it is complete
    sampled: list[Sampled]  # the tokens of a complete step


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
        self.backend = backend
        self._vocabulary = backend.info.vocabulary
        self.clock = clock
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by slot
        self.preemptions = 0
        self._table = token_bytes
        self._eos = frozenset(token for token in eos_ids if 0 <= token < self._vocabulary)
        self._slots = SlotAllocator(backend, config.prefix_reuse, config.prompt_cache_bytes)
        self._prompt_cache = self._slots.prompt_cache
        self.settings = backend.info.settings
        if self._prompt_cache is not None:
            self.settings = msgspec.structs.replace(
                self.settings,
                stored_tokens=self._prompt_cache.stored_tokens,
                stored_sequence_tokens=self._prompt_cache.sequence_tokens,
                copy_token_seconds=self._prompt_cache.copy_token_seconds,
            )
        self._step_clock = StepClock()
        self._launch = getattr(backend, "launch", None)
        self._by_id: dict[int, Sequence] = {}
        self._cancelled: set[int] = set()
        self._has_deadlines = False
        self._broken = 0  # sequences that ended with NaN since a token was last sampled
        self._in_flight: InFlightStep | None = None  # the step that was launched and not read yet
        self._read_at = 0.0  # when the last launched step was read
        self._must_wait = False  # a token has to be sampled by `step`, not by a launched step
        self._last_step = StepStats(0, 0, 0, 0.0, 0.0, 0, 0, 0)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, submit: Submit, state: object = None) -> Delta | None:
        """Queue a sequence. Return a Delta with finish "refused" if it can never run, else None.

        `state`: the state of its grammar, which its rows carry
        (crossover.serving.sampling.grammar.Matcher).
        """
        request, context = submit.request, self.settings.context_tokens
        if not 1 <= len(request.prompt) < context:
            why = f"The prompt has {len(request.prompt)} tokens, but 1 to {context - 1} fit"
            return Delta(submit.id, 0, "", FinishReason.REFUSED, error=why)
        for parameter, ids in (
            ("prompt", request.prompt),
            ("stop_token_ids", request.stop_token_ids),
            ("logit_bias", request.sampling.logit_bias),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary:
                why = (
                    f"{parameter}: A token id is out of range. The model has rows for the ids 0 to "
                    f"{self._vocabulary - 1}"
                )
                problem = Unsupported(why, parameter)
                return failed_delta(submit.id, problem)
        text = StreamText(self._table, request.stop, request.include_stop, request.thoughts)
        sequence = Sequence(submit, text, self._eos, context, self.clock(), state)
        self._has_deadlines |= sequence.deadline is not None
        self._by_id[submit.id] = sequence
        self.waiting.append(sequence)
        return None

    def cancel(self, sequence_id: int) -> None:
        """End a sequence before the next step. Ids of sequences that have ended are ignored."""
        if sequence_id in self._by_id:
            self._cancelled.add(sequence_id)

    def stats(self) -> StepStats:
        """Return the current state, and what the last step cost."""
        self._last_step.running = len(self.running)
        self._last_step.waiting = len(self.waiting)
        self._last_step.kv_used_tokens = self._used_tokens()
        self._last_step.preemptions = self.preemptions
        if self._prompt_cache is not None:
            self._last_step.prompt_cache = self._prompt_cache.stats
        return self._last_step

    def prepare_memory(self) -> bool:
        """Use idle time to make memory of the prompt cache ready, for some milliseconds. Return
        whether there is more to do."""
        return self._prompt_cache is not None and self._prompt_cache.touch_more()

    def step(self) -> list[Delta]:
        """Run one step; return what it added to each sequence.

        Raises what the backend raises, except KvFull, which is handled by freeing KV.
        """
        started = self.clock()
        deltas = self._end_cancelled_and_late(started)
        self._admit(started)
        self._last_step = StepStats(0, 0, 0, 0.0, 0.0, 0, 0, 0)
        step = self._in_flight
        self._in_flight = None
        if not self.running:
            return deltas
        if step is None:
            step = self._next(None)
        if step is not None:
            if step.launched is not None and not self._must_wait:
                self._in_flight = self._next(step.launched)
            self._read_tokens(step, deltas)
            if not self.running:
                self._in_flight = None  # all of its sequences have ended
            self._last_step.decode_rows = sum(len(row.tokens) == 1 for row in step.rows)
            self._last_step.prefill_tokens = step.prompt_tokens
            self._last_step.step_seconds = self.clock() - started
        return deltas

    def _schedule(self) -> tuple[list[Row], set[int]]:
        """Return the rows of the next step in slot order, and the slots of prefilling sequences."""
        continuing = [s for s in self.running.values() if not s.is_sampling_last]
        prefilling = [s for s in continuing if s.pending > 1]
        rows = [s.row(1) for s in continuing if s.pending <= 1]
        prefilling.sort(key=lambda s: s.id)
        pending = [s.until_checkpoint for s in prefilling]
        pieces = plan_step(pending, len(rows), self.settings, self._step_clock) if pending else []
        # There may be fewer pieces than prompts: the youngest then wait for a later step.
        rows += [s.row(count) for s, count in zip(prefilling, pieces, strict=False)]
        rows.sort(key=lambda row: row.slot)
        return rows, {sequence.slot for sequence in prefilling}

    def _next(self, after: Launched | None) -> InFlightStep | None:
        """Start the next step: launch it if possible, otherwise run it to its end.

        `after`: the step in flight, if there is one. Return None if it has to be read first. Raises
        what the backend raises.
        """
        rows, prefill_slots = self._schedule()
        if after is not None and not (rows and self._has_room(rows)):
            return None
        while True:
            if after is None:
                while not self._has_room(rows) and self._drop_or_preempt():
                    pass
                rows = [row for row in rows if row.slot in self.running]  # some were preempted
            try:
                return self._begin(rows, prefill_slots, after)
            except KvFull:
                if after is not None:
                    return None
                if not self._drop_or_preempt():
                    raise

    def _begin(
        self, rows: list[Row], prefill_slots: set[int], after: Launched | None
    ) -> InFlightStep | None:
        """Launch a step of these rows, or run it to its end if it cannot be launched. Return None
        if it can neither be launched behind `after` nor run before `after` is read. Raises what the
        backend raises."""
        sampling = (self.running[row.slot] for row in rows if row.wants_token)
        must_wait = self._must_wait or any(
            sequence.length < sequence.waited_until for sequence in sampling
        )
        launched: Launched | None = None
        sampled: list[Sampled] = []
        started = self.clock()
        if self._launch is not None and not must_wait:
            launched = self._launch(rows, after)
        if launched is None:
            if after is not None:
                return None
            sampled = self.backend.step(rows)
            self._must_wait = False
        seconds = self.clock() - started
        self._last_step.backend_seconds += seconds
        sequences = [self.running[row.slot] for row in rows]
        for row, sequence in zip(rows, sequences, strict=True):
            sequence.computed += len(row.tokens)
            if sequence.is_at_checkpoint:
                self._slots.save(row.slot, sequence.computed_tokens)
        prompt_tokens = sum(len(row.tokens) for row in rows if row.slot in prefill_slots)
        return InFlightStep(rows, sequences, prompt_tokens, started, seconds, launched, sampled)

    def _read_tokens(self, step: InFlightStep, deltas: list[Delta]) -> None:
        """Read the sampled tokens of a step, and give them to the sequences that still run. Append
        what each of them adds to its answer to `deltas`."""
        results: list[Sampled | None] = [*step.sampled]
        seconds = step.seconds
        if step.launched is not None:
            read_started = self.clock()
            results = step.launched.tokens()
            now = self.clock()
            self._last_step.backend_seconds += now - read_started
            seconds = now - max(step.started, self._read_at)  # the device runs one step at a time
            self._read_at = now
        decode_seconds = getattr(self.backend, "last_decode_seconds", None)
        decode_tokens = sum(len(row.tokens) for row in step.rows) - step.prompt_tokens
        self._step_clock.learn(decode_tokens, step.prompt_tokens, seconds, decode_seconds)
        samples = iter(results)
        for row, sequence in zip(step.rows, step.sequences, strict=True):
            if not row.wants_token:
                continue
            sample = next(samples)
            if self.running.get(row.slot) is not sequence or sequence.computed < row.position:
                continue  # the sequence has ended, or was preempted
            if sample is None:
                self._retry_later(sequence, row)
                continue
            if sample.token == NO_TOKEN:
                delta = self._end_broken(sequence)
            else:
                self._broken = 0
                problem: ServingError | None = getattr(row.state, "error", None)  # of its grammar
                if problem is None:
                    delta = sequence.take(sample, self.clock())
                else:
                    delta = failed_delta(sequence.id, problem, sequence.text.finish())
            deltas.append(delta)
            if delta.finish is not None:
                self._release(sequence)

    def _retry_later(self, sequence: Sequence, row: Row) -> None:
        """Have the next step sample a token that a launched step could not sample.

        Only torch launches steps, on GPUs. Its GPU sampler finds no token if the logits are NaN, if
        no proposal of its rejection sampling is accepted, or if top-p needs more candidates than it
        looks at. `Backend.step` gives such a row to the host's sampler.
        """
        # The row's last token is computed once more, because its logits are gone. If a step is in
        # flight that assumes the missing token, what it samples for this sequence is dropped.
        sequence.computed = row.position - 1
        sequence.waited_until = sequence.length + WAITED_TOKENS
        self._must_wait = True

    def _end_broken(self, sequence: Sequence) -> Delta:
        """Return the last Delta of a sequence whose logits are NaN. None of its KV is reused.

        Raises EngineFailed after MAX_BROKEN such sequences in a row.
        """
        self._broken += 1
        if self._broken > MAX_BROKEN:
            raise EngineFailed("The model's logits are not numbers (NaN) for any request")
        sequence.computed = 0
        problem = ServingError("this prompt makes the model's logits NaN")
        return failed_delta(sequence.id, problem, sequence.text.finish())

    def _admit(self, now: float) -> None:
        """Give free slots to waiting sequences, oldest first, while the KV pool has room."""
        while self.waiting and len(self.running) < self.settings.slots:
            sequence = self.waiting[0]
            # What the running sequences take when their prompts are computed, and one token each.
            needed = sum(s.length for s in self.running.values()) + len(self.running)
            if self.running and needed + sequence.length > self.settings.pool_tokens:
                return  # it would soon be preempted again
            self.waiting.popleft()
            computed = {slot: s.computed_tokens for slot, s in self.running.items()}
            allocation = self._slots.take(
                sequence.tokens[: sequence.length], computed, sequence.cache_salt
            )
            sequence.slot = allocation.slot
            sequence.computed = allocation.reused
            sequence.checkpoints = allocation.checkpoints
            if sequence.scheduled is None:
                sequence.scheduled = now
                sequence.cached = sequence.computed
            self.running[sequence.slot] = sequence

    def _used_tokens(self) -> int:
        """Return the KV tokens of all running sequences."""
        return sum(sequence.computed for sequence in self.running.values())

    def _has_room(self, rows: list[Row]) -> bool:
        """Return whether the KV pool has room for a step of these rows."""
        new = sum(len(row.tokens) for row in rows if row.slot in self.running)
        return self._used_tokens() + new + self._slots.idle_tokens <= self.settings.pool_tokens

    def _drop_or_preempt(self) -> bool:
        """Free the KV of the longest idle slot, else preempt the youngest sequence.

        Return False if neither is possible.
        """
        if self._slots.drop_oldest():
            return True
        if len(self.running) < 2:
            return False
        youngest = max(self.running.values(), key=lambda s: s.id)
        del self.running[youngest.slot]
        self._slots.preempt(youngest.slot, youngest.computed_tokens)
        youngest.slot = -1
        youngest.computed = 0
        self.waiting.appendleft(youngest)
        self.preemptions += 1
        return True

    def _release(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, and make its slot idle if it has one."""
        if sequence.slot >= 0:
            del self.running[sequence.slot]
            self._slots.release(sequence.slot, sequence.computed_tokens, self.clock())
        self._by_id.pop(sequence.id, None)

    def _end_cancelled_and_late(self, now: float) -> list[Delta]:
        """End the sequences that were canceled or are past their deadline; return their Deltas."""
        deltas: list[Delta] = []
        if not (self._cancelled or self._has_deadlines):
            return deltas
        for sequence in list(self._by_id.values()):
            if sequence.id in self._cancelled:
                finish = FinishReason.CANCELLED
            elif sequence.deadline is not None and now > sequence.deadline:
                finish = FinishReason.DEADLINE
            else:
                continue
            deltas.append(Delta(sequence.id, 0, sequence.text.finish(), finish))
            if sequence.slot < 0:  # it has not started
                self.waiting.remove(sequence)
            self._release(sequence)
        self._cancelled.clear()
        return deltas


def failed_delta(number: int, problem: ServingError, text: str = "") -> Delta:
    """Return the last Delta of a sequence that ends with an error: "refused" if the request is the
    reason (Unsupported), else "error"."""
    if isinstance(problem, Unsupported):
        refused, parameter = FinishReason.REFUSED, problem.parameter
        return Delta(number, 0, text, refused, error=str(problem), parameter=parameter)
    return Delta(number, 0, text, FinishReason.ERROR, error=str(problem))
