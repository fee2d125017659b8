"""The sequences in flight: which engine runs each of them, and what happens when the engine ends.

    requests = InflightRequests(bounds, slots)
    requests.serve_with(engine)                         # an engine that is ready
    stream = requests.submit(GenerationRequest(...), None)            # raises Overloaded
    requests.receive_step(engine, step)                 # pass on the tokens of one step
    requests.move(engine, "it died", 1)                 # start unread sequences again
    await stream.arrived.wait(); stream.take()          # in the reader

One engine gets every sequence at once and has the queue. Several engines of one model share the
queue here: each sequence, oldest first, waits until an engine has a free slot. It goes to the one
that served the conversation so far (choose_engine.py), or else to the one with the most free slots.

Everything that arrives between two reads of a stream is merged into one Delta. A request with
`whole` gets one Delta at its end, so that it can start again on another engine until then.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

import msgspec

from crossover.serving.engine import ipc_messages as ipc
from crossover.serving.supervisor.admission import AdmissionController, JointPace, QueueBounds
from crossover.serving.supervisor.choose_engine import Histories, as_history
from crossover.serving.supervisor.engine_process import EngineProcess

# Starts of one sequence on one engine, or on any of several that serve at the same time. Only those
# that reached the engine count, since then the sequence may be what crashes it.
MAX_ATTEMPTS = 2
# After its deadline, a sequence that an engine runs is ended here: the engine ends it only between
# two steps, and not at all if it hangs.
OVERDUE_SECONDS = 1.0
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
        self.created_at = now  # by time.monotonic()
        self.waited_seconds = 0.0  # before it was sent to its engine
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
        if delta.queue_seconds is not None:
            delta.queue_seconds += self.waited_seconds
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

    def __init__(self, bounds: QueueBounds, slots: int, max_engines: int = 1) -> None:
        """`slots`: of an engine. `max_engines`: that serve at the same time."""
        self._streams: dict[int, Stream] = {}
        super().__init__(bounds, slots * max_engines, self._streams)
        self.max_engines = max_engines
        self.engines: list[EngineProcess] = []  # that get new sequences
        # Of their last steps, together; what engines count includes those that have ended, since
        # a counter never decreases.
        self.stats: ipc.StepStats | None = None
        self._stats_of: dict[EngineProcess, ipc.StepStats] = {}  # of those that have not ended
        self._ended_stats: list[ipc.StepStats] = []  # of those that have, together
        self._histories: dict[EngineProcess, Histories] = {}
        self.on_step: Callable[[ipc.StepStats], None] | None = None  # called after each step
        self.failed = 0  # sequences that the server ended with an error since the last stop began
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._streams)

    def serve_with(self, engine: EngineProcess) -> None:
        """Send waiting sequences, oldest first, and all new ones to this ready engine: instead of
        the one that served, or beside others if several may serve at the same time."""
        self._set_engines([*self.engines, engine][-self.max_engines :])
        self._hand_out()

    def _set_engines(self, engines: list[EngineProcess]) -> None:
        """Serve with these engines. The slots of the last one are kept while there is none."""
        self.engines, self.cached_load = engines, None
        self._histories = {engine: self._histories.get(engine) or Histories() for engine in engines}
        self._sum_stats()
        if not engines:
            return
        self._engines_serving = len(engines)
        self._slots = sum(
            engine.ready.info.settings.slots for engine in engines if engine.ready is not None
        )
        paces = [engine.pace for engine in engines]
        self.pace = paces[0] if len(paces) == 1 else JointPace(paces)

    def submit(self, request: ipc.GenerationRequest, arrived: asyncio.Event | None) -> Stream:
        """Add a new sequence. Raises Overloaded."""
        self.check_room(len(request.prompt))
        stream = Stream(next(self._ids), request, self.cancel, time.monotonic(), arrived)
        self._streams[stream.id] = stream
        self.cached_load = None
        self._hand_out()
        return stream

    def _hand_out(self, *, even_if_full: bool = False) -> None:
        """Send waiting sequences to the engines, oldest first, as far as slots are free.
        `even_if_full`: the others too, so that they wait in the queue of an engine."""
        for stream in self._waiting():
            engines = self.engines
            if self.max_engines > 1 and not even_if_full:
                engines = [engine for engine in engines if engine.free_slots > 0]
            if not engines:
                return
            engine = engines[0]
            if self.max_engines > 1:
                engine = self._engine_with_history(stream, engines)
            self._give(stream, engine)

    def _engine_with_history(
        self, stream: Stream, engines: Sequence[EngineProcess]
    ) -> EngineProcess:
        """Return the engine that has the conversation of a request, else the one with the most free
        slots, and remember that it gets this prompt. Of several such engines, the one that got no
        request for longest: otherwise the caches of the others would stay empty at low load."""
        history, salt = as_history(stream.request.prompt), stream.request.cache_salt
        chosen = max(
            engines,
            key=lambda engine: (
                self._histories[engine].continued_by(history, salt),
                engine.free_slots,
                -self._histories[engine].last_request,
            ),
        )
        self._histories[chosen].last_request = stream.id
        if chosen.config.prefix_reuse:
            self._histories[chosen].add(history, salt)
        return chosen

    def hand_out_all(self) -> None:
        """Send all waiting sequences to the engines, which are about to drain."""
        self._hand_out(even_if_full=True)

    def _give(self, stream: Stream, engine: EngineProcess) -> None:
        """Send the sequence to an engine, with the time that is left until its deadline."""
        request, now = stream.request, time.monotonic()
        stream.waited_seconds = now - stream.created_at
        if stream.deadline is not None:
            # Above 0 even if the deadline has passed: the engine then ends the sequence.
            seconds_left = max(0.001, stream.deadline - now)
            request = msgspec.structs.replace(request, deadline_seconds=seconds_left)
        stream.engine = engine
        stream.engine_indices.append(engine.index)
        engine.send(ipc.Submit(stream.id, request))

    def end_overdue(self) -> None:
        """End every sequence past its deadline: one that waits for an engine at once, and one that
        an engine runs after OVERDUE_SECONDS. The engine still has the slot of such a sequence."""
        now = time.monotonic()
        for stream in list(self._streams.values()):
            engine = stream.engine
            grace_seconds = 0.0 if engine is None else OVERDUE_SECONDS
            if stream.deadline is None or now < stream.deadline + grace_seconds:
                continue
            if engine is not None:
                engine.send(ipc.Cancel(stream.id))
            self._end(_last_delta(stream.id, ipc.FinishReason.DEADLINE))

    def receive_step(self, engine: EngineProcess, step: ipc.Step) -> None:
        """Pass the Deltas of one step of an engine on to its sequences."""
        self.cached_load = None
        self._stats_of[engine] = step.stats
        if engine in self.engines and self.on_step is not None:
            self.on_step(step.stats)
        for delta in step.deltas:
            if delta.finish is not None:
                engine.sequence_ended(delta.id)
            stream = self._streams.get(delta.id)
            if stream is None or stream.engine is not engine:
                continue
            if delta.finish is None:
                stream.push(delta)
            else:
                self._end(delta)
        if self.max_engines > 1:  # slots may have become free
            self._hand_out()
        self._sum_stats()

    def _sum_stats(self) -> None:
        """Add up the stats of the engines that serve, and what others have counted."""
        stats = [
            stats if engine in self.engines else ipc.counters_of(stats)
            for engine, stats in self._stats_of.items()
        ]
        stats += self._ended_stats
        self.stats = ipc.joined(stats) if stats else None

    @property
    def waiting_count(self) -> int:
        """Return the number of sequences that wait for a slot, in an engine or here."""
        in_engines = 0 if self.stats is None else self.stats.waiting
        return in_engines + len(self._waiting())

    def move(self, engine: EngineProcess, message: str, index: int | None) -> None:
        """Handle the end of an engine.

        Sequences of which the reader has received nothing start again on the engine that serves
        next, which is at `index` in the engine list (None: no engine will serve), or on any of
        several that serve at the same time. The others, and those that were started there
        MAX_ATTEMPTS times, end with finish "error". A sequence that was sent to an engine which was
        dead by then, or which died before it read the sequence, was not started there.
        """
        self.cached_load = None
        if (stats := self._stats_of.pop(engine, None)) is not None:
            self._ended_stats = [ipc.counters_of(ipc.joined([*self._ended_stats, stats]))]
        if engine in self.engines:
            self._set_engines([other for other in self.engines if other is not engine])
        for stream in self._streams_of(engine):
            attempts = stream.engine_indices
            if not engine.has_received(stream.id):
                attempts.pop()
            if self.max_engines == 1:
                attempts = [attempt for attempt in attempts if attempt == index]
            can_retry = index is not None and len(attempts) < MAX_ATTEMPTS
            if not can_retry or stream.handed_over or stream.given_up:
                self._fail(stream, f"The engine ended while this request was running: {message}")
                continue
            stream.start_again()
        self._hand_out()

    def recall(self, engine: EngineProcess) -> None:
        """Move the sequences of this engine of which the reader has received nothing to the engine
        that serves now, which is faster. They start again there."""
        assert self.engines and engine not in self.engines
        self.cached_load = None
        for stream in self._streams_of(engine):
            if not stream.handed_over and not stream.given_up:
                engine.send(ipc.Cancel(stream.id))
                engine.sequence_ended(stream.id)
                stream.start_again()
        self._hand_out()

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
        stream.push(delta)
        self.ended(stream, delta.finish in _NATURAL_ENDS)
