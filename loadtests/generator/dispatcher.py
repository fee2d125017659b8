"""One load generator at work on one level: every request leaves when it is due.

Open loop: one greenlet sends each request at its due time, whether or not earlier ones have ended.
Closed loop: each Locust user calls `send` for one request after the other (locust_users.py).
Load goes on after the window where the plan says so, that the last requests of the window do not
finish in a server that empties: these requests do not count, and are ended once those that do have.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import gevent
import gevent.event
import msgspec

from loadtests.generator.connection import clock
from loadtests.generator.endpoint import pool_for, probe
from loadtests.generator.live_stats import Live
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import Ended, Late, Recorded, Told
from loadtests.generator.request_factory import Request, RequestFactory, Share
from loadtests.generator.sse_request import Answer, GaveUp, stream
from loadtests.host.timerfd import Alarm
from loadtests.metrics.slo import SLO_PRESETS
from loadtests.records.schema import RequestRecord

log = logging.getLogger("crossover")
LATE_EVERY_SECONDS = 0.25
FOLLOW_EVERY_SECONDS = 0.02
END_SECONDS = 10.0  # that requests may take to end once they are given up
YIELD_EVERY = 16  # overdue requests that are sent before answers are read again


class Dispatcher:
    """`tell` takes messages for the runner; `ended` takes each record, for Locust's statistics."""

    def __init__(
        self,
        plan: LoadPlan,
        share: Share,
        tell: Callable[[Told], None],
        ended: Callable[[RequestRecord], None],
    ) -> None:
        self.plan = plan
        self.pool = pool_for(plan.target)
        facts = plan.facts or probe(plan.target, self.pool)
        for note in facts.notes if plan.facts is None else ():
            log.warning("%s: %s", plan.target.url, note)
        self.factory = RequestFactory(plan, facts, self.pool, share)
        self.scheduled = self.factory.scheduled() if plan.is_open else []
        self.live: Live | None = None if plan.quiet else Live(SLO_PRESETS[plan.slo])
        self.account = Ended(worker=share.index)
        self.origin = 0.0  # t0 of the level, on `clock`
        self.began = gevent.event.Event()
        self.over = gevent.event.Event()  # nothing more is sent
        self.finished = gevent.event.Event()
        self.settled: Callable[[], None] = lambda: None  # every request of ours that counts is
        self.others_settled = gevent.event.Event()  # and of the level's other load generators
        self.others_settled.set()
        self._worker = share.index
        self._tell = tell
        self._ended = ended
        self._decided = gevent.event.Event()
        self._idle = gevent.event.Event()
        self._idle.set()
        self._running: set[Any] = set()  # greenlets with a request on its way
        self._counted: set[int] = set()  # requests on their way that were due before the end
        self._waiting: dict[int, float] = {}  # index -> due seconds, until the first token
        self._answers: dict[str, dict[int, str]] = {}  # session -> turn -> the server's words
        self._alarm = Alarm()

    def run(self, origin: float) -> Ended:
        """Send all that is due from `origin` on `clock`, wait for the last answer; the account."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        self.origin = origin
        cpu_seconds, busy_seconds = time.process_time(), _busy_seconds()
        watcher = gevent.spawn(self._tell_late)
        self.began.set()
        end_seconds = self.plan.duration_seconds
        counted = [one for one in self.scheduled if one.due_seconds < end_seconds]
        self._dispatch(counted)
        self.over.wait(max(0.0, self.origin + end_seconds - clock()))
        if self.plan.follow_seconds:
            gevent.spawn(self._end_following)
            self._dispatch(self.scheduled[len(counted) :])
            self.over.wait()
        self.over.set()
        self._drain()
        watcher.kill()
        gc.set_threshold(700, 10, 10)
        gc.unfreeze()
        self.account.cpu_seconds = time.process_time() - cpu_seconds
        if busy_seconds is not None:
            self.account.busy_seconds = (_busy_seconds() or 0.0) - busy_seconds
        self.account.wall_seconds = clock() - self.origin
        self._close()
        return self.account

    def leave_out(self) -> None:
        """In place of `run`, for a level that never begins: users that wait for it go on."""
        self.over.set()
        self.began.set()
        self._close()

    def _close(self) -> None:
        self.pool.close()
        self._alarm.close()
        self.finished.set()

    def stop(self, is_decided: bool = False) -> None:
        """Send nothing more, from now on. A level that is decided does not wait for answers."""
        if self.finished.is_set():
            return
        if is_decided and self.account.stopped_seconds is None:
            self.account.stopped_seconds = max(0.0, clock() - self.origin)
            self._decided.set()
        self.over.set()
        self._alarm.set(clock())

    def takes(self, due_seconds: float) -> bool:
        """Whether a request of a closed loop may be sent now."""
        is_time = due_seconds < self.plan.duration_seconds or self.plan.follow_seconds > 0
        return is_time and not self.over.is_set()

    def send(self, request: Request, due_seconds: float) -> None:
        """One request from now to its end."""
        me = gevent.getcurrent()
        self._running.add(me)
        if due_seconds < self.plan.duration_seconds:
            self._counted.add(request.index)
            self._idle.clear()
        self.account.due += 1
        if self.live is not None:
            self.live.due(due_seconds)
        self._waiting[request.index] = due_seconds

        def answered() -> None:
            self._waiting.pop(request.index, None)

        answer = Answer(answered, keep_text=request.session is not None)
        wire, is_stand_in = self._wire(request)
        record = stream(
            self.pool,
            wire,
            request.ask(self.plan, due_seconds, self._worker),
            origin=self.origin,
            timeout_seconds=self.plan.target.timeout_seconds,
            answer=answer,
        )
        if is_stand_in:
            record = msgspec.structs.replace(record, stand_in=True)
        answered()
        self._running.discard(me)
        self._counted.discard(request.index)
        if request.session is not None and record.error is None:
            words = "".join(answer.text or ())
            self._answers.setdefault(request.session, {})[request.turn or 0] = words
        self.account.recorded += 1
        self._tell(Recorded(record))
        if self.live is not None:
            self.live.add(record)
        self._ended(record)
        if not self._counted:
            self._idle.set()

    def _wire(self, request: Request) -> tuple[bytes, bool]:
        """The bytes to send, and whether filler stands in for answers that have not come."""
        if not request.needs_answers:
            return request.wire, False
        seen = self._answers.get(request.session or "", {})
        before = [seen[turn] for turn in range(request.turn or 0) if turn in seen]
        if len(before) < (request.turn or 0):
            return request.wire, True
        return self.factory.with_answers(request, before), False

    def _dispatch(self, requests: Sequence[Request]) -> None:
        """Send each request at its due time, on a kernel timer: gevent's own is 1 ms late."""
        hub = gevent.get_hub()
        rung = hub.loop.io(self._alarm.fd, 1)
        try:
            for position, request in enumerate(requests):
                moment = self.origin + request.due_seconds
                if moment > clock():
                    self._alarm.set(moment)
                    hub.wait(rung)
                elif position % YIELD_EVERY == 0:
                    gevent.sleep(0)
                if self.over.is_set():
                    return
                gevent.spawn(self.send, request, request.due_seconds)
        finally:
            rung.close()

    def _end_following(self) -> None:
        """Nothing more is sent once every counted request has ended or broken every TTFT limit.

        Those of other load generators too: theirs end beside our load.
        """
        until = self.origin + self.plan.duration_seconds + self.plan.follow_seconds
        gevent.sleep(0)  # requests that were due last have not begun yet
        while self._is_open() and clock() < until and not self.over.wait(FOLLOW_EVERY_SECONDS):
            pass
        self.settled()
        left = max(0.0, until - clock())
        gevent.wait([self.others_settled, self.over], timeout=left, count=1)
        self.stop()

    def _is_open(self) -> bool:
        """Whether a counted request on its way may still be good."""
        late = self.plan.late_seconds
        past = -math.inf if late is None else clock() - self.origin - late
        return any(self._waiting.get(index, math.inf) >= past for index in self._counted)

    def _tell_late(self) -> None:
        """Tell the runner, once each, of requests that wait too long for their first token."""
        told: set[int] = set()
        while self.plan.late_seconds is not None:
            gevent.sleep(LATE_EVERY_SECONDS)
            past = clock() - self.origin - self.plan.late_seconds
            late = {index for index, due in self._waiting.items() if due < past} - told
            if late:
                told |= late
                self._tell(Late(sorted(late)))

    def _drain(self) -> None:
        """Wait for the answers that count; end what is late or does not count, as a timeout."""
        gevent.sleep(0)  # requests that were due last have not begun yet
        patience = self.plan.drain_seconds
        end = self.origin + self.plan.duration_seconds + patience
        timeout = max(0.0, min(patience, end - clock()))
        gevent.wait([self._idle, self._decided], timeout=timeout, count=1)
        late = list(self._running)
        if late:
            self.account.gave_up = len(late)
            why = f"no end {patience:g} s after the last was due"
            if self._decided.is_set():
                why = "the level was decided"
            elif not self._counted:
                why = "it was due after the window: every answer that counts is there"
            gevent.killall(late, exception=GaveUp(why), block=False)
            until = clock() + END_SECONDS  # a user's greenlet goes on: only its request ends
            while self._running and clock() < until:
                gevent.sleep(0.001)


def _busy_seconds() -> float | None:
    """How long this thread has run, or had no core to run on (man 5 proc, schedstat)."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            ran, waited, _ = file.read().split()
    except OSError:
        return None
    return (int(ran) + int(waited)) / 1e9
