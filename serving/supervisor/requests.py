"""The sequences in flight: which engine has which, and what becomes of them when it ends.

requests = Requests(bounds, slots)
stream = requests.admit(GenerationRequest(...))       # raises Overloaded
requests.give(stream, engine)                         # to an engine that is ready
requests.hear(engine, step)                           # what the engine added
requests.move(engine, "it died", None, place=1)       # again where nothing was read, else an error
"""

from __future__ import annotations

import itertools
import time
from collections import Counter

import msgspec

from serving.engine.messages import (
    Cancel,
    Delta,
    FinishReason,
    GenerationRequest,
    Origin,
    Step,
    Submit,
)
from serving.errors import Overloaded
from serving.supervisor.admission import Ledger, QueueBounds
from serving.supervisor.process import EngineProcess
from serving.supervisor.stream import Stream
from serving.supervisor.suspects import Suspects

MOST_ATTEMPTS = 2  # of one sequence with an engine: it may be the one that kills it
_NATURAL = (FinishReason.STOP, FinishReason.LENGTH)


class Requests:
    """Everything submitted and not finished, and the ledger that decides who may join."""

    def __init__(self, bounds: QueueBounds, slots: int) -> None:
        self.ledger = Ledger(bounds, slots)
        self.failed = 0  # ended with an error of ours, ever
        self._streams: dict[int, Stream] = {}
        self._owners: Counter[str] = Counter()  # how many are whose
        self._engines: dict[int, EngineProcess] = {}  # who has it; the others wait for an engine
        self._ids = itertools.count(1)
        self._suspects = Suspects()

    def __len__(self) -> int:
        return len(self._streams)

    def check_room(self, prompt_tokens: int, max_tokens: int, origin: Origin) -> None:
        """Raises Overloaded where a sequence of this size may not join now."""
        if self._is_next(origin):
            return
        refusal = self.ledger.refusal(prompt_tokens, max_tokens, time.monotonic())
        if refusal is not None:
            raise Overloaded(refusal.text, refusal.retry_after_seconds, refusal.kind)

    def _is_next(self, origin: Origin) -> bool:
        """Whether all slots are taken and this owner has less at work than its part of them: the
        next free one is its own, whatever the others have queued. So the queue may be longer than
        its bounds: with n owners by slots x (1 / 2 + ... + 1 / n) at most."""
        slots = self.ledger.slots
        if len(self) < slots or self.ledger.bounds.ttft_seconds is not None:
            return False
        if origin.share < 1:
            part = max(1, int(origin.share * slots))
        else:  # of an owner that has no share of its own
            part = slots // len(self._owners.keys() | {origin.owner})
        return self._owners[origin.owner] < part

    def _check_share(self, origin: Origin) -> None:
        """Raises Overloaded where the owner's share of the queue is full."""
        places = self.ledger.bounds.waiting_requests
        if origin.share >= 1 or places is None:
            return
        most = max(1, int(origin.share * (places + self.ledger.slots)))
        mine = (s for s in self._streams.values() if s.request.origin.owner == origin.owner)
        if sum(self.ledger.waits(stream.id) for stream in mine) >= most:
            text = f"{most} requests of this key are waiting, its share of the queue"
            raise Overloaded(text, self.ledger.bounds.retry_shortest_seconds + 1.0, "queue_share")

    def admit(self, request: GenerationRequest) -> Stream:
        """A new sequence, not yet given to an engine. Raises Overloaded, Unavailable."""
        prompt_tokens = len(request.prompt)
        now = time.monotonic()
        self._suspects.check(request, now)
        self._check_share(request.origin)
        self.check_room(prompt_tokens, request.max_tokens, request.origin)
        stream = Stream(next(self._ids), request, self.cancel, now)
        self._streams[stream.id] = stream
        self._owners[request.origin.owner] += 1
        self._suspects.admitted(stream.id, request)
        if request.sampling.prompt_logprobs is None:
            self.ledger.admit(stream.id, prompt_tokens, request.max_tokens, now)
        else:  # each token of the prompt is a step, as each of the answer is
            self.ledger.admit(stream.id, 1, prompt_tokens - 1 + request.max_tokens, now)
        return stream

    def give(self, stream: Stream, engine: EngineProcess) -> None:
        """Send it to an engine; one that is given again has the rest of its deadline left."""
        request = stream.request
        if request.deadline_seconds is not None and len(stream.places) > 0:
            left = request.deadline_seconds - (time.monotonic() - stream.arrived)
            if left <= 0:
                self._end(Delta(stream.id, 0, "", finish=FinishReason.DEADLINE))
                return
            request = msgspec.structs.replace(request, deadline_seconds=left)
        engine.took(stream.id)
        stream.places.append(engine.place)
        self._engines[stream.id] = engine
        engine.send(Submit(stream.id, request))

    def give_waiting(self, engine: EngineProcess) -> None:
        """Send every sequence that waits for an engine to this one, oldest first."""
        for stream in self._waiting():
            self.give(stream, engine)

    def end_overdue(self) -> None:
        """End every sequence that waits for an engine and whose deadline is past."""
        now = time.monotonic()
        for stream in self._waiting():
            seconds = stream.request.deadline_seconds
            if seconds is not None and now - stream.arrived >= seconds:
                self._end(Delta(stream.id, 0, "", finish=FinishReason.DEADLINE))

    def hear(self, engine: EngineProcess, step: Step) -> None:
        """What one step of an engine added, to the sequences that it still has."""
        now = time.monotonic()
        for delta in step.deltas:
            if self._engines.get(delta.id) is not engine:
                continue
            steps = delta.tokens + len(delta.prompt_details or ())
            if steps:
                self.ledger.progressed(delta.id, steps, now)
                self._suspects.showed(delta.id)
            if delta.finish is None:
                self._streams[delta.id].push(delta)
            else:
                self._end(delta)

    def move(
        self,
        engine: EngineProcess,
        message: str,
        successor: EngineProcess | None,
        place: int | None,
    ) -> None:
        """The engine is gone. Sequences whose reader has seen nothing begin again on `successor`,
        or when there is an engine; it is the `place`-th of the list, None where none is to come.

        The others, and those that have been there MOST_ATTEMPTS times, end with finish "error".
        """
        there = sorted(engine.sequences)
        guilty = [False] * len(there)
        if not engine.asked_to_end:
            requests = [self._streams[sequence].request for sequence in there]
            guilty = self._suspects.died_with(requests, time.monotonic())
        for sequence, is_guilty in zip(there, guilty, strict=True):
            stream = self._streams[sequence]
            tried = place is None or stream.places.count(place) >= MOST_ATTEMPTS
            if stream.handed_over or tried or is_guilty:
                self._fail(stream, f"the engine ended while this request was running: {message}")
                continue
            engine.sequences.discard(sequence)
            del self._engines[sequence]
            stream.start_again()
            self.ledger.restarted(sequence)
            if successor is not None:
                self.give(stream, successor)

    def cancel(self, sequence: int) -> None:
        """The reader gives up. The engine says when it is over; without one it is over now."""
        engine = self._engines.get(sequence)
        if engine is not None:
            engine.send(Cancel(sequence))
        elif sequence in self._streams:
            self._end(Delta(sequence, 0, "", finish=FinishReason.CANCELLED))

    def fail_waiting(self, message: str) -> None:
        """End every sequence that waits for an engine with an error."""
        for stream in self._waiting():
            self._fail(stream, message)

    def fail_all(self, message: str) -> None:
        """End everything with an error."""
        for stream in list(self._streams.values()):
            self._fail(stream, message)

    def _waiting(self) -> list[Stream]:
        return [stream for key, stream in self._streams.items() if key not in self._engines]

    def _fail(self, stream: Stream, message: str) -> None:
        self.failed += 1
        self._end(Delta(stream.id, 0, "", finish=FinishReason.ERROR, error=message))

    def _end(self, delta: Delta) -> None:
        stream = self._streams.pop(delta.id)
        owner = stream.request.origin.owner
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]
        engine = self._engines.pop(delta.id, None)
        if engine is not None:
            engine.sequences.discard(delta.id)
        naturally = delta.finish in _NATURAL
        self._suspects.ended(delta.id, naturally)
        self.ledger.finished(delta.id, naturally)
        stream.push(delta)
