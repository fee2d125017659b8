"""The sequences in flight: which engine has which, and what becomes of them when it ends.

stream = sequences.admit(prompt=..., max_tokens=...)     # raises Overloaded
sequences.give(stream, life)                             # to an engine that is ready
sequences.hear(life, step)                               # what the engine added
sequences.rehouse(life, "it died", successor=None)       # anew where nothing was read, else the end with an error
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from serving.admission import Ledger, QueueBounds
from serving.backends.base import Sampling
from serving.errors import ServingError
from serving.life import Life
from serving.messages import Cancel, Delta, Step, Submit
from serving.streams import Stream

MOST_ATTEMPTS = 3  # engines that one sequence is given to: it may be the one that kills them


class Unavailable(ServingError):
    """No engine serves at the moment: loading, restarting, failed, draining or stopped. Becomes a 503."""

    def __init__(self, reason: str, retry_after_seconds: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class Overloaded(ServingError):
    """The queue is full by the bound named in `kind` (queue_requests, queue_tokens, queue_wait, queue_ttft). Becomes a 429."""

    def __init__(self, reason: str, retry_after_seconds: float, kind: str = "queue_requests") -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
        self.kind = kind


class Sequences:
    """Everything submitted and not finished, with the ledger that decides who may join."""

    def __init__(self, bounds: QueueBounds, slots: int, clock: Callable[[], float]) -> None:
        self.ledger = Ledger(bounds, slots)
        self.failed = 0  # how many ended with an error of ours, ever
        self._clock = clock
        self._streams: dict[int, Stream] = {}
        self._homes: dict[int, Life] = {}  # which engine has it; the others wait for one
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._streams)

    def check_room(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raises Overloaded where a sequence of this size may not join now."""
        refusal = self.ledger.refusal(prompt_tokens, max_tokens, self._clock())
        if refusal is not None:
            raise Overloaded(refusal.text, refusal.retry_after_seconds, refusal.kind)

    def admit(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        stop_token_ids: Sequence[int],
        min_tokens: int,
        ignore_eos: bool,
        deadline_seconds: float | None,
        include_stop: bool,
        whole: bool,
    ) -> Stream:
        """A new sequence, not yet given to anyone. Raises Overloaded."""
        self.check_room(len(prompt), max_tokens)
        now = self._clock()
        submit = Submit(
            id=next(self._ids),
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=list(stop),
            stop_token_ids=list(stop_token_ids),
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            deadline_seconds=deadline_seconds,
            include_stop=include_stop,
        )
        stream = Stream(submit, self.cancel, now, whole)
        self._streams[stream.id] = stream
        self.ledger.admit(stream.id, len(prompt), max_tokens, now)
        return stream

    def give(self, stream: Stream, life: Life) -> None:
        """Send it to an engine; one that is given again has only the rest of its deadline left."""
        now = self._clock()
        submit = stream.submit
        if submit.deadline_seconds is not None and stream.attempts > 1:
            left = submit.deadline_seconds - (now - stream.arrived)
            if left <= 0:
                self._end(Delta(stream.id, 0, "", finish="deadline"))
                return
            submit = msgspec.structs.replace(submit, deadline_seconds=left)
        life.took(stream.id, now)
        self._homes[stream.id] = life
        life.send(submit)

    def give_homeless(self, life: Life) -> None:
        """Send every sequence that waits for an engine to this one, oldest first."""
        for sequence in [sequence for sequence in self._streams if sequence not in self._homes]:
            self.give(self._streams[sequence], life)

    def hear(self, life: Life, step: Step) -> None:
        """What one step of an engine added; what is not (or no longer) that engine's is not heard."""
        now = self._clock()
        for delta in step.deltas:
            if self._homes.get(delta.id) is not life:
                continue
            if delta.tokens:
                self.ledger.progressed(delta.id, delta.tokens, now)
            if delta.finish is None:
                self._streams[delta.id].push(delta)
            else:
                self._end(delta)

    def rehouse(self, life: Life, message: str, successor: Life | None, retry: bool) -> None:
        """The engine is gone. With `retry`, sequences whose reader has seen nothing begin anew: on `successor`, or when there is an engine.

        The others, and those that have been with too many engines, end with finish "error".
        """
        for sequence in sorted(life.sequences):
            stream = self._streams[sequence]
            if not retry or stream.handed_over or stream.attempts >= MOST_ATTEMPTS:
                self._fail(stream, f"the engine ended while this request was running: {message}")
                continue
            life.sequences.discard(sequence)
            del self._homes[sequence]
            stream.begin_anew()
            self.ledger.restarted(sequence)
            if successor is not None:
                self.give(stream, successor)

    def cancel(self, sequence: int) -> None:
        """The reader gives up. The engine says when it is over; without an engine it is over now."""
        life = self._homes.get(sequence)
        if life is not None:
            life.send(Cancel(sequence))
        elif sequence in self._streams:
            self._end(Delta(sequence, 0, "", finish="cancelled"))

    def fail_homeless(self, message: str) -> None:
        for sequence in [sequence for sequence in self._streams if sequence not in self._homes]:
            self._fail(self._streams[sequence], message)

    def fail_all(self, message: str) -> None:
        """End everything with an error."""
        for stream in list(self._streams.values()):
            self._fail(stream, message)

    def _fail(self, stream: Stream, message: str) -> None:
        self.failed += 1
        self._end(Delta(stream.id, 0, "", finish="error", error=message))

    def _end(self, delta: Delta) -> None:
        stream = self._streams.pop(delta.id)
        life = self._homes.pop(delta.id, None)
        if life is not None:
            life.sequences.discard(delta.id)
        self.ledger.finished(delta.id, naturally=delta.finish in ("stop", "length"))
        stream.push(delta)
