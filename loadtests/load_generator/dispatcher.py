"""Sending the requests of a level, each at its scheduled time.

Open loop: one greenlet sends each request when it is due, whether or not earlier ones have ended.
Closed loop: one greenlet per user sends one request after the other.
Conversations: in an open loop, sessions begin at scheduled times, whether or not earlier ones have
ended. A turn is due its think time after the end of the answer before it. If an answer fails, the
session ends, and the turns that are left count as failures.

A plan can ask for load after the window (`follow_seconds`), so that the last requests of the window
do not finish on a server that is running empty. The requests of that time do not count, and are
ended when all requests that count have ended.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import gevent
import gevent.event
import msgspec

from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.completion_chunk import ReasoningWatch
from crossover.loadtests.load_generator.conversation import Conversation
from crossover.loadtests.load_generator.http_connection import clock
from crossover.loadtests.load_generator.level_messages import Ended, LoadPlan
from crossover.loadtests.load_generator.openai_endpoint import pool_for, probe_endpoint
from crossover.loadtests.load_generator.request_factory import ReadyRequest, RequestFactory
from crossover.loadtests.load_generator.sse_timestamps import GaveUp, stream
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.workload.conversations import Session

END_SECONDS = 10.0  # maximum time that requests take to end after they are given up
YIELD_EVERY = 16  # overdue requests that are sent before answers are read again
_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Dispatcher:
    """Runs one level and calls `report` with the record of each request.

    The requests are made here, so that `run` only has to send them. Raises LoadError.
    """

    def __init__(self, load: LoadPlan, report: Callable[[RequestRecord], None]) -> None:
        self._load = load
        self._plan = plan = load.plan
        self._report = report
        self._pool = pool_for(load.target)
        facts = load.facts or probe_endpoint(load.target, self._pool)
        self._factory = factory = RequestFactory(load, facts, self._pool)
        # What is sent: conversations, or requests at scheduled times (open loop), or one request as
        # soon as another has ended (closed loop).
        self._sessions: list[tuple[float, Conversation, Session]] = []
        self._scheduled: list[ReadyRequest] = []
        self._next_requests: Iterator[ReadyRequest] = iter(())
        if load.has_sessions:
            self._sessions = factory.conversations()
        elif plan.is_unloaded_check:
            self._next_requests = iter(factory.scheduled())
        elif plan.concurrency is None:
            self._scheduled = factory.scheduled()
        elif plan.requests is None:
            self._next_requests = factory.endless()
        else:
            self._next_requests = iter(list(islice(factory.endless(), plan.requests)))
        self._next_sessions = iter(self._sessions)  # of a closed loop
        self._indices = count()  # of the turns of conversations
        self._account = Ended()
        self._origin = 0.0  # start of the level, on `clock`
        self._over = gevent.event.Event()  # nothing more is sent
        self._idle = gevent.event.Event()  # no request that counts is in flight
        self._idle.set()
        self._main: Any = None  # the greenlet of `run`, until it ends or an error is raised in it
        self._running: set[Any] = set()  # greenlets with a request in flight
        self._counted_in_flight = 0  # requests in flight that count: due before the window's end
        self._alarm = Alarm()

    def run(self, origin: float) -> Ended:
        """Send each request at its scheduled time after `origin` (on `clock`), and wait for the
        last answer. Return the account of the level. Raises LoadError if this machine cannot hold
        the connections."""
        # A garbage collection would delay requests by milliseconds.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        self._origin = origin
        self._main = gevent.getcurrent()
        plan, end = self._plan, origin + self._plan.duration_seconds
        cpu_seconds, busy_seconds = time.process_time(), _busy_seconds()
        run_user = self._run_chat_user if self._load.has_sessions else self._run_user
        users = [gevent.spawn(run_user) for _ in range(plan.concurrency or 0)]
        if plan.concurrency is None:
            users += [gevent.spawn(self._run_session, *session) for session in self._sessions]
        try:
            counted = [request for request in self._scheduled if self._counts(request.record)]
            self._dispatch(counted)
            if plan.requests is not None:
                gevent.joinall(users, timeout=max(0.0, end - clock()))
            elif plan.burst is None:
                self._over.wait(max(0.0, end - clock()))
            if self._load.follow_seconds:
                gevent.spawn(self._end_following)
                self._dispatch(self._scheduled[len(counted) :])
                self._over.wait()
            self._over.set()
            self._drain(end)
        finally:
            self._main = None
            gevent.killall([*users, *self._running], block=False)
            gc.set_threshold(700, 10, 10)
            gc.unfreeze()
            self._pool.close()
            self._alarm.close()
        account, wall_seconds = self._account, max(clock() - origin, 1e-9)
        account.cpu_seconds = time.process_time() - cpu_seconds
        account.busy_share = round((_busy_seconds() - busy_seconds) / wall_seconds, 4)
        return account

    def send_no_more(self) -> None:
        """Stop sending. `run` still waits for the answers of requests in flight."""
        self._over.set()
        if self._alarm.fd >= 0:
            self._alarm.set(clock())

    def _counts(self, record: RequestRecord) -> bool:
        """Whether a request is due before the end of the window."""
        return record.scheduled_seconds < self._plan.duration_seconds

    def _dispatch(self, requests: Sequence[ReadyRequest]) -> None:
        """Send each request at its scheduled time, by a kernel timer."""
        hub = gevent.get_hub()
        alarm_watcher = hub.loop.io(self._alarm.fd, 1)
        try:
            for position, (wire, record) in enumerate(requests):
                scheduled = self._origin + record.scheduled_seconds
                if scheduled > clock():
                    self._alarm.set(scheduled)
                    hub.wait(alarm_watcher)
                elif position % YIELD_EVERY == 0:
                    gevent.sleep(0)
                if self._over.is_set():
                    return
                gevent.spawn(self._send, wire, record)
        finally:
            alarm_watcher.close()
            gevent.sleep(0)  # lets the last requests begin

    def _run_user(self) -> None:
        """Send one request after the other, as one user of a closed loop."""
        gevent.sleep(max(0.0, self._origin - clock()))
        for wire, unscheduled in self._next_requests:
            due_now = clock() - self._origin
            record = msgspec.structs.replace(unscheduled, scheduled_seconds=due_now)
            if self._over.is_set() or not self._counts(record):
                return
            self._send(wire, record)

    def _run_chat_user(self) -> None:
        """Have one conversation after the other, without think times, as one user of a closed
        loop."""
        gevent.sleep(max(0.0, self._origin - clock()))
        for _, conversation, session in self._next_sessions:
            for turn in range(len(session.turns)):
                due = clock() - self._origin
                if self._over.is_set() or due >= self._plan.duration_seconds:
                    return
                index = next(self._indices)
                if self._plan.requests is not None and index >= self._plan.requests:
                    return
                record = self._send_turn(conversation, session, turn, due, index)
                if record.error is not None:
                    self._end_session(conversation, turn + 1, record.ended_seconds or due)
                    break

    def _send_turn(
        self, conversation: Conversation, session: Session, turn: int, due: float, index: int
    ) -> RequestRecord:
        """Send one turn and, if it is answered, add the answer to the conversation."""
        messages, unsent_record = conversation.begin(turn, due, index)
        watch = ReasoningWatch(keeps_text=True)
        wire = self._factory.turn_bytes(messages, session.turns[turn].output_tokens)
        record = self._send(wire, unsent_record, watch)
        if record.error is None:
            conversation.end(record, "".join(watch.texts or ()))
        return record

    def _end_session(self, conversation: Conversation, turn: int, ended_seconds: float) -> None:
        """Record the turns from `turn` on as failures: they are not sent, as an answer failed."""
        for record in conversation.missing(turn, ended_seconds, self._indices):
            self._account.due += 1
            self._account.recorded += 1
            self._report(record)

    def _run_session(
        self, begin_seconds: float, conversation: Conversation, session: Session
    ) -> None:
        """Run one session of an open loop from its first turn to its last, or to an answer that
        failed."""
        due = begin_seconds
        for turn in range(len(session.turns)):
            counts = due < self._plan.duration_seconds
            # A turn that counts is in flight from here on, although its user still thinks.
            self._add_in_flight(counts)
            try:
                gevent.sleep(max(0.0, self._origin + due - clock()))
                if self._over.is_set() and not counts:
                    return
                index = next(self._indices)
                record = self._send_turn(conversation, session, turn, due, index)
            finally:
                self._add_in_flight(-counts)
            ended = record.ended_seconds or due
            if record.error is not None:
                return self._end_session(conversation, turn + 1, ended)
            if turn + 1 < len(session.turns):
                due = ended + session.turns[turn + 1].think_seconds

    def _add_in_flight(self, requests: int) -> None:
        """Change the number of requests in flight that count."""
        self._counted_in_flight += requests
        if self._counted_in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    def _send(
        self, wire: bytes, unsent_record: RequestRecord, watch: ReasoningWatch | None = None
    ) -> RequestRecord:
        """Send a request now, read its answer and report its record.

        `unsent_record`: the record with the fields known before sending, such as the scheduled
        time. `watch`: keeps the text of the answer.
        """
        greenlet, counts = gevent.getcurrent(), self._counts(unsent_record)
        self._running.add(greenlet)
        self._account.due += 1
        if counts:
            self._counted_in_flight += 1
            self._idle.clear()
        timeout_seconds = self._load.target.timeout_seconds
        try:
            record = stream(self._pool, wire, unsent_record, self._origin, timeout_seconds, watch)
        except LoadError as problem:
            main, self._main = self._main, None
            if main is not None:
                gevent.kill(main, problem)
            raise gevent.GreenletExit from problem
        self._running.discard(greenlet)
        self._counted_in_flight -= counts
        self._account.recorded += 1
        self._report(record)
        if not self._counted_in_flight:
            self._idle.set()
        return record

    def _end_following(self) -> None:
        """Stop sending when all requests that count have ended, or after `follow_seconds`."""
        end = self._origin + self._plan.duration_seconds + self._load.follow_seconds
        self._idle.wait(max(0.0, end - clock()))
        self.send_no_more()

    def _drain(self, end: float) -> None:
        """Wait for the answers that count. Give up, as timeouts, those that are late and those that
        do not count. `end`: of the window, on `clock`."""
        drain_seconds = self._load.drain_seconds
        self._idle.wait(max(0.0, min(drain_seconds, end + drain_seconds - clock())))
        unfinished = list(self._running)
        if unfinished:
            reason = f"not finished {drain_seconds:g} s after the last scheduled request"
            if not self._counted_in_flight:
                reason = "scheduled after the window; all requests that count have ended"
            gevent.killall(unfinished, exception=GaveUp(reason), block=False)
            gevent.joinall(unfinished, timeout=END_SECONDS)


class Alarm:
    """A kernel timer, timerfd_create(2): its file descriptor becomes readable some 50 us after the
    moment that is set.

    The timers of event loops are rounded to milliseconds, which would be most of the error of a
    measured TTFT.
    """

    def __init__(self) -> None:
        self.fd = int(_libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "no timer (timerfd_create)")
        # struct itimerspec: seconds and nanoseconds of an interval, which is not used, and of the
        # time of expiration.
        self._spec = (ctypes.c_long * 4)()
        self._address = ctypes.byref(self._spec)

    def set(self, moment: float) -> None:
        """Expire at `moment` on time.perf_counter (CLOCK_MONOTONIC), or at once if that is past.
        This replaces an earlier setting, whether or not it has expired."""
        seconds = int(moment)
        self._spec[2] = seconds
        self._spec[3] = max(1, int((moment - seconds) * 1e9))  # zero would disarm the timer
        if _libc.timerfd_settime(self.fd, _TFD_TIMER_ABSTIME, self._address, None) != 0:
            raise OSError(ctypes.get_errno(), "the timer cannot be set")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _busy_seconds() -> float:
    """Return how long this thread has run or waited for a core (man 5 proc, schedstat)."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            run_nanoseconds, wait_nanoseconds, _ = file.read().split()
    except OSError:  # a kernel without schedstat: only the process's CPU time is known
        return time.process_time()
    return (int(run_nanoseconds) + int(wait_nanoseconds)) / 1e9
