"""A level at work: every request leaves when it is due.

Open loop: one greenlet sends each request at its due time, whether or not earlier ones have ended.
Closed loop: one greenlet a user sends one request after the other.
Conversations: sessions begin at their times whatever comes back (open loop). A turn is due the
think time after the end of the answer before it. Where an answer fails the session ends, and the
turns that never came are failures.
Load goes on after the window where the plan says so, that the last requests of the window do not
finish in a server that empties: these requests do not count, and are ended once those that do have.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import Any

import gevent
import gevent.event
import msgspec

from crossover.loadtests.host.precise_timer import Alarm
from crossover.loadtests.load_generator.completion_chunk import ReasoningWatch
from crossover.loadtests.load_generator.conversation import Conversation
from crossover.loadtests.load_generator.http_connection import clock
from crossover.loadtests.load_generator.level_messages import Ended, LoadPlan
from crossover.loadtests.load_generator.openai_endpoint import pool_for, probe
from crossover.loadtests.load_generator.request_factory import Request, RequestFactory
from crossover.loadtests.load_generator.sse_timestamps import GaveUp, stream
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.workload.conversations import Session

END_SECONDS = 10.0  # that requests may take to end once they are given up
YIELD_EVERY = 16  # overdue requests that are sent before answers are read again


class Dispatcher:
    """One level. `tell` takes each record.

    Requests are made when it is, so that `run` only sends. Raises LoadError.
    """

    def __init__(self, plan: LoadPlan, tell: Callable[[RequestRecord], None]) -> None:
        self.plan = plan
        self._tell = tell
        self._pool = pool_for(plan.target)
        facts = plan.facts or probe(plan.target, self._pool)
        self._factory = factory = RequestFactory(plan, facts, self._pool)
        self._sessions: list[tuple[float, Conversation, Session]] = []
        self._scheduled: list[Request] = []
        if plan.has_sessions:
            self._sessions = factory.conversations()
            self._talks = iter(self._sessions)  # of a closed loop
        elif plan.concurrency is None:
            self._scheduled = factory.scheduled()
        self._in_turn = factory.endless()  # of a closed loop
        if plan.concurrency is not None and plan.requests is not None and not plan.has_sessions:
            self._in_turn = iter(list(islice(self._in_turn, plan.requests)))
        self._indices = count()  # of the turns of conversations
        self._account = Ended()
        self._origin = 0.0  # t0 of the level, on `clock`
        self._over = gevent.event.Event()  # nothing more is sent
        self._idle = gevent.event.Event()  # no counted request is on its way
        self._idle.set()
        self._running: set[Any] = set()  # greenlets with a request on its way
        self._counted = 0  # requests on their way that were due before the end
        self._alarm = Alarm()

    def run(self, origin: float) -> Ended:
        """Send all that is due from `origin` on `clock`, wait for the last answer; the account."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        self._origin = origin
        plan, end = self.plan, origin + self.plan.duration_seconds
        cpu_seconds, busy_seconds = time.process_time(), _busy_seconds()
        use = self._talk_in_turn if plan.has_sessions else self._use
        users = [gevent.spawn(use) for _ in range(plan.concurrency or 0)]
        if plan.concurrency is None:
            users += [gevent.spawn(self._converse, *one) for one in self._sessions]
        try:
            counted = [one for one in self._scheduled if self._counts(one.record)]
            self._dispatch(counted)
            if plan.requests is not None:
                gevent.joinall(users, timeout=max(0.0, end - clock()))
            elif plan.asks is None:
                self._over.wait(max(0.0, end - clock()))
            if plan.follow_seconds:
                gevent.spawn(self._end_following)
                self._dispatch(self._scheduled[len(counted) :])
                self._over.wait()
            self._over.set()
            self._drain(end)
        finally:
            gevent.killall(users, block=False)
            gc.set_threshold(700, 10, 10)
            gc.unfreeze()
            self._pool.close()
            self._alarm.close()
        account, wall_seconds = self._account, max(clock() - origin, 1e-9)
        account.cpu_seconds = time.process_time() - cpu_seconds
        account.busy_share = round((_busy_seconds() - busy_seconds) / wall_seconds, 4)
        return account

    def send_no_more(self) -> None:
        """Answers that are on their way are waited for."""
        self._over.set()
        if self._alarm.fd >= 0:
            self._alarm.set(clock())

    def _counts(self, record: RequestRecord) -> bool:
        return record.scheduled_seconds < self.plan.duration_seconds

    def _dispatch(self, requests: Sequence[Request]) -> None:
        """Send each request at its due time, on a kernel timer: gevent's own is 1 ms late."""
        hub = gevent.get_hub()
        ladder_model = hub.loop.io(self._alarm.fd, 1)
        try:
            for position, (wire, record) in enumerate(requests):
                moment = self._origin + record.scheduled_seconds
                if moment > clock():
                    self._alarm.set(moment)
                    hub.wait(ladder_model)
                elif position % YIELD_EVERY == 0:
                    gevent.sleep(0)
                if self._over.is_set():
                    return
                gevent.spawn(self._send, wire, record)
        finally:
            ladder_model.close()
            gevent.sleep(0)  # requests that were due last begin

    def _use(self) -> None:
        """One user of a closed loop."""
        gevent.sleep(max(0.0, self._origin - clock()))
        for wire, record in self._in_turn:
            asked = msgspec.structs.replace(record, scheduled_seconds=clock() - self._origin)
            if self._over.is_set() or not self._counts(asked):
                return
            self._send(wire, asked)

    def _talk_in_turn(self) -> None:
        """One user of a closed loop who has one conversation after the other, without thinking."""
        gevent.sleep(max(0.0, self._origin - clock()))
        for _, talk, session in self._talks:
            for number, turn in enumerate(session.turns):
                due = clock() - self._origin
                if self._over.is_set() or due >= self.plan.duration_seconds:
                    return
                index = next(self._indices)
                if self.plan.requests is not None and index >= self.plan.requests:
                    return
                messages, asked = talk.begin(number, due, index)
                watch = ReasoningWatch(keeps_text=True)
                wire = self._factory.turn_bytes(messages, turn.output_tokens)
                record = self._send(wire, asked, watch)
                if record.error is not None:
                    self._end_session(talk, number + 1, record.ended_seconds or due)
                    break
                talk.end(record, "".join(watch.texts or ()))

    def _end_session(self, talk: Conversation, turn: int, ended_seconds: float) -> None:
        """The turns from `turn` on never come since an answer failed: each is a failure."""
        for missing in talk.missing(turn, ended_seconds, self._indices):
            self._account.due += 1
            self._account.recorded += 1
            self._tell(missing)

    def _converse(self, begin_seconds: float, talk: Conversation, session: Session) -> None:
        """One session, from its first turn to its last, or to an answer that failed."""
        due = begin_seconds
        for number, turn in enumerate(session.turns):
            counts = due < self.plan.duration_seconds
            self._expect(counts)  # it is waited for, though its user still thinks
            try:
                gevent.sleep(max(0.0, self._origin + due - clock()))
                if self._over.is_set() and not counts:
                    return
                messages, asked = talk.begin(number, due, next(self._indices))
                watch = ReasoningWatch(keeps_text=True)
                wire = self._factory.turn_bytes(messages, turn.output_tokens)
                record = self._send(wire, asked, watch)
            finally:
                self._expect(-counts)
            ended = record.ended_seconds or due
            if record.error is not None:
                return self._end_session(talk, number + 1, ended)
            talk.end(record, "".join(watch.texts or ()))
            if number + 1 < len(session.turns):
                due = ended + session.turns[number + 1].think_seconds

    def _expect(self, requests: int) -> None:
        """So many counted requests more, or fewer, are on their way or about to be."""
        self._counted += requests
        if self._counted:
            self._idle.clear()
        else:
            self._idle.set()

    def _send(
        self, wire: bytes, asked: RequestRecord, watch: ReasoningWatch | None = None
    ) -> RequestRecord:
        """One request from now to its end. `asked`: its record, with its due time."""
        me, counts = gevent.getcurrent(), self._counts(asked)
        self._running.add(me)
        self._account.due += 1
        if counts:
            self._counted += 1
            self._idle.clear()
        seconds = self.plan.target.timeout_seconds
        record = stream(self._pool, wire, asked, self._origin, seconds, watch)
        self._running.discard(me)
        self._counted -= counts
        self._account.recorded += 1
        self._tell(record)
        if not self._counted:
            self._idle.set()
        return record

    def _end_following(self) -> None:
        """Nothing more is sent once every counted request has ended."""
        until = self._origin + self.plan.duration_seconds + self.plan.follow_seconds
        self._idle.wait(max(0.0, until - clock()))
        self.send_no_more()

    def _drain(self, end: float) -> None:
        """Wait for the answers that count; end what is late or does not count, as a timeout."""
        patience = self.plan.drain_seconds
        self._idle.wait(max(0.0, min(patience, end + patience - clock())))
        late = list(self._running)
        if late:
            why = f"not finished {patience:g} s after the last scheduled request"
            if not self._counted:
                why = "scheduled after the window; all requests that count have ended"
            gevent.killall(late, exception=GaveUp(why), block=False)
            gevent.joinall(late, timeout=END_SECONDS)


def _busy_seconds() -> float:
    """How long this thread has run, or had no core to run on (man 5 proc, schedstat)."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            ran, waited, _ = file.read().split()
    except OSError:
        return time.process_time()
    return (int(ran) + int(waited)) / 1e9
