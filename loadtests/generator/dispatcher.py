"""One load generator at work on one level: every request leaves when it is due.

Open loop: one greenlet sends each request at its due time, whether or not earlier ones have ended.
Closed loop: each Locust user calls `send` for one request after the other (locust_users.py).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
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
        self.account = Ended()
        self.origin = 0.0  # t0 of the level, on `clock`
        self.began = gevent.event.Event()
        self.over = gevent.event.Event()  # nothing more is sent
        self.finished = gevent.event.Event()
        self._worker = share.index
        self._tell = tell
        self._ended = ended
        self._decided = gevent.event.Event()
        self._idle = gevent.event.Event()
        self._idle.set()
        self._running: set[Any] = set()  # greenlets with a request on its way
        self._waiting: dict[int, float] = {}  # index -> due seconds, until the first token
        self._answers: dict[str, dict[int, str]] = {}  # session -> turn -> the server's words
        self._alarm = Alarm()

    def run(self, started_unix_seconds: float) -> Ended:
        """Send all that is due, wait for the last answer, return the account."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        self.origin = clock() + (started_unix_seconds - time.time())
        cpu_seconds = time.process_time()
        watcher = gevent.spawn(self._tell_late)
        self.began.set()
        if self.plan.is_open:
            self._dispatch()
        self.over.wait(max(0.0, self.origin + self.plan.duration_seconds - clock()))
        self.over.set()
        self._drain()
        watcher.kill()
        gc.set_threshold(700, 10, 10)
        gc.unfreeze()
        self.account.cpu_seconds = time.process_time() - cpu_seconds
        self.account.wall_seconds = clock() - self.origin
        self.pool.close()
        self._alarm.close()
        self.finished.set()
        return self.account

    def stop(self, is_decided: bool = False) -> None:
        """Send nothing more, from now on. A level that is decided does not wait for answers."""
        if self.finished.is_set():
            return
        if is_decided and self.account.stopped_seconds is None:
            self.account.stopped_seconds = max(0.0, clock() - self.origin)
            self._decided.set()
        self.over.set()
        self._alarm.set(clock())

    def send(self, request: Request, due_seconds: float) -> None:
        """One request from now to its end."""
        me = gevent.getcurrent()
        self._running.add(me)
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
        if request.session is not None and record.error is None:
            words = "".join(answer.text or ())
            self._answers.setdefault(request.session, {})[request.turn or 0] = words
        self.account.recorded += 1
        self._tell(Recorded(record))
        if self.live is not None:
            self.live.add(record)
        self._ended(record)
        if not self._running:
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

    def _dispatch(self) -> None:
        """Send each request at its due time, on a kernel timer: gevent's own is 1 ms late."""
        hub = gevent.get_hub()
        rung = hub.loop.io(self._alarm.fd, 1)
        try:
            for position, request in enumerate(self.scheduled):
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
        """Wait for the answers on their way; end those that are late, on record as timeouts."""
        gevent.sleep(0)  # requests that were due last have not begun yet
        patience = self.plan.drain_seconds
        gevent.wait([self._idle, self._decided], timeout=patience, count=1)
        late = list(self._running)
        if late:
            self.account.gave_up = len(late)
            why = f"no end {patience:g} s after the last was due"
            if self._decided.is_set():
                why = "the level was decided"
            gevent.killall(late, exception=GaveUp(why), block=True, timeout=10)
