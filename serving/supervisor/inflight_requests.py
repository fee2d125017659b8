"""The sequences in flight: which engine runs each of them, and what happens when the engine ends.

    requests = InflightRequests(bounds, slots)
    requests.serve_with(engine)                         # an engine that is ready
    stream = requests.submit(GenerationRequest(...), engine, None)    # raises Overloaded
    requests.receive_step(engine, step)                 # pass on the tokens of one step
    requests.move(engine, "it died", 1)                 # start unread sequences again
    await stream.arrived.wait(); stream.take()          # in the reader

Everything that arrives between two reads of a stream is merged into one Delta. A request with
`whole` gets one Delta at its end, so that it can start again on another engine until then.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import msgspec

from crossover.serving.engine import ipc_messages as ipc
from crossover.serving.supervisor.admission import AdmissionController, QueueBounds
from crossover.serving.supervisor.engine_process import EngineProcess

MAX_ATTEMPTS = 2  # starts of one sequence on one engine, since it may be what crashes the engine
_NATURAL_ENDS = (ipc.FinishReason.STOP, ipc.FinishReason.LENGTH)


class Stream:
    """The Deltas of one sequence, up to the one with `finish`. It has one reader, on the same event
    loop.

    `arrived` is set when there is a Delta to take. The streams of one reader may share the event.
    """

    def __init__(
        self,
        number: int,
        request: ipc.GenerationRequest,
        cancel: Callable[[int], None],
        now: float,
        arrived: asyncio.Event | None = None,
    ) -> None:
        self.id = number
        self.request = request
        self.prompt_tokens = len(request.prompt)
        self.max_tokens = request.max_tokens
        self.produced = 0  # tokens generated so far
        seconds = request.deadline_seconds
        self.deadline = None if seconds is None else now + seconds  # by time.monotonic()
        self.engine: EngineProcess | None = None  # the engine that runs it; None: it waits for one
        self.engine_indices: list[int] = []  # indices in the engine list of those it was sent to
        self.arrived = asyncio.Event() if arrived is None else arrived
        self.finished = False
        self.handed_over = False  # the reader has received something, so it cannot start again
        self.given_up = False  # the reader has canceled it
        self._cancel = cancel
        self._unread: list[ipc.Delta] = []

    def cancel(self) -> None:
        """Cancel the sequence; its last Delta (finish "cancelled") still arrives."""
        self.given_up = True
        if not self.finished:
            self._cancel(self.id)

    def take(self) -> ipc.Delta | None:
        """Return a Delta of all that has arrived since the last call; None if nothing has, or if a
        `whole` request has not finished."""
        deltas = self._unread
        if not deltas or (self.request.whole and not self.finished):
            return None
        self._unread = []
        self.handed_over = True
        return deltas[0] if len(deltas) == 1 else merged(deltas)

    def push(self, delta: ipc.Delta) -> None:
        """Add a Delta from the engine. Ignored after the last one."""
        if self.finished:
            return
        self.produced += delta.tokens
        self._unread.append(delta)
        self.finished = delta.finish is not None
        if self.finished or not self.request.whole:
            self.arrived.set()

    def start_again(self) -> None:
        """Discard what has arrived, so that the sequence can start on another engine. Only while
        nothing has been handed over."""
        self._unread = []
        self.produced = 0
        self.engine = None


def merged(deltas: list[ipc.Delta]) -> ipc.Delta:
    """Return consecutive Deltas of one sequence (at least one) as a single Delta."""
    last = deltas[-1]
    return msgspec.structs.replace(
        deltas[0],
        tokens=sum(delta.tokens for delta in deltas),
        text="".join(delta.text for delta in deltas),
        details=[detail for delta in deltas for detail in delta.details],
        finish=last.finish,
        error=last.error,
        parameter=last.parameter,
    )


def _last_delta(sequence: int, finish: ipc.FinishReason, error: str | None = None) -> ipc.Delta:
    """Return the last Delta of a sequence that the server ends, without tokens."""
    return ipc.Delta(sequence, 0, "", finish=finish, error=error)


class InflightRequests(AdmissionController):
    """All sequences that are not finished. The base class decides which requests may join them."""

    def __init__(self, bounds: QueueBounds, slots: int) -> None:
        self._streams: dict[int, Stream] = {}
        super().__init__(bounds, slots, self._streams)
        self.engine: EngineProcess | None = None  # the engine that gets new sequences
        self.stats: ipc.StepStats | None = None  # of this engine's last step
        self.on_step: Callable[[ipc.StepStats], None] | None = None  # called after each step
        self.failed = 0  # sequences that the server ended with an error since the last stop began
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._streams)

    def serve_with(self, engine: EngineProcess) -> None:
        """Send waiting sequences, oldest first, and all new ones to this ready engine."""
        assert engine.ready is not None
        self._slots = engine.ready.info.settings.slots
        self.pace, self.cached_load = engine.pace, None
        self.engine, self.stats = engine, None
        for stream in self._waiting():
            self._give(stream, engine)

    def submit(
        self, request: ipc.GenerationRequest, engine: EngineProcess, arrived: asyncio.Event | None
    ) -> Stream:
        """Add a new sequence for this engine. Raises Overloaded."""
        self.check_room(len(request.prompt))
        stream = Stream(next(self._ids), request, self.cancel, time.monotonic(), arrived)
        self._streams[stream.id] = stream
        self.cached_load = None
        self._give(stream, engine)
        return stream

    def _give(self, stream: Stream, engine: EngineProcess) -> None:
        """Send the sequence to an engine, with the time that is left until its deadline."""
        request = stream.request
        if stream.engine_indices and stream.deadline is not None:
            # Above 0 even if the deadline has passed: the engine then ends the sequence.
            seconds_left = max(0.001, stream.deadline - time.monotonic())
            request = msgspec.structs.replace(request, deadline_seconds=seconds_left)
        stream.engine = engine
        stream.engine_indices.append(engine.index)
        engine.send(ipc.Submit(stream.id, request))

    def end_overdue(self) -> None:
        """End every sequence that waits for an engine and is past its deadline."""
        for stream in self._waiting():
            if stream.deadline is not None and time.monotonic() >= stream.deadline:
                self._end(_last_delta(stream.id, ipc.FinishReason.DEADLINE))

    def receive_step(self, engine: EngineProcess, step: ipc.Step) -> None:
        """Pass the Deltas of one step of an engine on to its sequences."""
        self.cached_load = None
        if engine is self.engine:
            self.stats = step.stats
            if self.on_step is not None:
                self.on_step(step.stats)
        for delta in step.deltas:
            stream = self._streams.get(delta.id)
            if stream is None or stream.engine is not engine:
                continue
            if delta.finish is None:
                stream.push(delta)
            else:
                self._end(delta)

    def move(self, engine: EngineProcess, message: str, index: int | None) -> None:
        """Handle the end of an engine.

        Sequences of which the reader has received nothing start again on the engine that serves
        next, which is at `index` in the engine list (None: no engine will serve). The others, and
        those that were started there MAX_ATTEMPTS times, end with finish "error".
        """
        self.cached_load = None
        if engine is self.engine:
            self.engine = self.stats = None
        for stream in self._streams_of(engine):
            can_retry = index is not None and stream.engine_indices.count(index) < MAX_ATTEMPTS
            if not can_retry or stream.handed_over or stream.given_up:
                self._fail(stream, f"The engine ended while this request was running: {message}")
                continue
            stream.start_again()
            if self.engine is not None:
                self._give(stream, self.engine)

    def recall(self, engine: EngineProcess) -> None:
        """Move the sequences of this engine of which the reader has received nothing to the engine
        that serves now, which is faster. They start again there."""
        assert self.engine is not None and self.engine is not engine
        self.cached_load = None
        for stream in self._streams_of(engine):
            if not stream.handed_over and not stream.given_up:
                engine.send(ipc.Cancel(stream.id))
                engine.sequence_ended(stream.id)
                stream.start_again()
                self._give(stream, self.engine)

    def cancel(self, sequence: int) -> None:
        """Cancel a sequence. Its engine reports the end; a sequence without an engine ends now."""
        stream = self._streams.get(sequence)
        if stream is not None and stream.engine is not None:
            stream.engine.send(ipc.Cancel(sequence))
        elif stream is not None:
            self._end(_last_delta(sequence, ipc.FinishReason.CANCELLED))

    def fail(self, message: str, only_waiting: bool = False) -> None:
        """End all sequences, or only those that wait for an engine, with an error."""
        for stream in self._waiting() if only_waiting else list(self._streams.values()):
            self._fail(stream, message)

    def _streams_of(self, engine: EngineProcess | None) -> list[Stream]:
        return [stream for stream in self._streams.values() if stream.engine is engine]

    def _waiting(self) -> list[Stream]:
        """Return the sequences that wait for an engine, oldest first."""
        return self._streams_of(None)

    def _fail(self, stream: Stream, message: str) -> None:
        """End a sequence with an error, or as canceled if its reader has canceled it."""
        if stream.given_up:
            self._end(_last_delta(stream.id, ipc.FinishReason.CANCELLED))
            return
        self.failed += 1
        self._end(_last_delta(stream.id, ipc.FinishReason.ERROR, message))

    def _end(self, delta: ipc.Delta) -> None:
        """Push the last Delta of a sequence and forget the sequence."""
        stream = self._streams.pop(delta.id)
        if stream.engine is not None:
            stream.engine.sequence_ended(delta.id)
        stream.push(delta)
        self.ended(stream, delta.finish in _NATURAL_ENDS)
