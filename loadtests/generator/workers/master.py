"""The master's part of a level: what it says to the workers, and what it makes of their answers.

    master                                   each worker
    prepare: plan, index, number ---------->  open connections, make the prompts, lay out due times
                                <----------  prepared: which requests, which endpoint
    ping, now and all along     ---------->
                                <----------  pong: its clock
    begin: t0 on its own clock  ---------->  send
                                <----------  told: messages for the runner
                                <----------  settled: its requests that count are good or bad
    settled                     ---------->  all are: nobody need send any more
    stop                        ---------->  the level is decided, or has failed
                                <----------  drained: its account

Every message holds the number of the level: what comes late of a level that failed is left out. A
worker that is lost, before the level begins or in the middle of it, fails the level for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gevent
import msgspec
import zmq

from loadtests.errors import LoadError
from loadtests.generator.connection import clock
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import Ended, Started, Told, WorkerClock, Workers, total
from loadtests.generator.workers.clocks import OtherClock

LEAD_SECONDS = 0.2  # between "begin" and t0: the message must have reached every worker
PING_SECONDS = 0.5
FIRST_PINGS = 12
FIRST_PING_SECONDS = 0.02
LOST_SECONDS = 5.0  # without a word
# After which a worker is told again to prepare: one that has just joined may not listen yet.
PREPARE_SECONDS = 2.0
USERS_SECONDS = 30.0  # that Locust may take to share the users of a closed loop
# Locust calls a worker missing that is silent for so many heartbeats, and ends the test where it
# was the last. Who is lost is decided here.
PATIENT_HEARTBEATS = 600


class Hooks(NamedTuple):
    """What a master tells the process around it."""

    tell: Callable[[Told], None]
    pass_on: Callable[[bytes], None]  # an encoded message of a worker
    ended: Callable[[Ended], None]
    failed: Callable[[str], None]
    heartbeat: Callable[[str], bytes]  # Locust's message of that kind to a worker


@dataclass
class _Worker:
    """One of a level's workers."""

    client: str  # Locust's id: the machine's name, "_", a random number
    index: int
    its_clock: OtherClock = field(default_factory=OtherClock)
    offset_begun: float = 0.0  # its clock minus ours that its t0 was said by
    offset_now: float = 0.0
    worst_seconds: float = 0.0  # largest uncertainty so far
    heard: float = field(default_factory=clock)
    draws: str | None = None  # what it is to send, once it is prepared
    is_settled: bool = False
    account: Ended | None = None

    @property
    def name(self) -> str:
        return self.client.rpartition("_")[0]

    @property
    def in_words(self) -> str:
        return f"worker {self.index} on {self.name}"


class Master:
    """Runs one level after the other on the workers that are there."""

    def __init__(self, runner: Any, hooks: Hooks, heartbeats: int) -> None:
        """`heartbeats`: without so many Locust calls a worker missing."""
        self._runner = runner
        self._heartbeats = heartbeats
        self._hooks = hooks
        self._level = 0  # number of the level; of messages
        self._is_running = False
        self._has_begun = False
        self._workers: dict[str, _Worker] = {}

    @property
    def workers(self) -> int:
        """How many send the level."""
        return len(self._workers)

    @property
    def listeners(self) -> dict[str, Callable[[str, Any], None]]:
        """Message -> who takes it: the worker's id, and the data."""
        return {
            "crossover_prepared": self._prepared,
            "crossover_pong": self._pong,
            "crossover_told": self._told,
            "crossover_settled": self._settled,
            "crossover_drained": self._drained,
            "crossover_failed": self._failed,
        }

    def present(self) -> list[str]:
        """Ids of the workers that are connected and heard."""
        least = self._heartbeats - LOST_SECONDS
        clients = self._runner.clients
        here = [*clients.ready, *clients.spawning, *clients.running]
        heard = [client.id for client in here if client.heartbeat > least]
        return sorted(one for one in heard if self._is_connected(one))

    def tell_who_is_there(self) -> None:
        """Tell the runner, once a second while no level runs; for ever."""
        while True:
            if not self._is_running:
                self._hooks.tell(Workers([one.rpartition("_")[0] for one in self.present()]))
            gevent.sleep(1.0)

    def start(self, plan: LoadPlan) -> None:
        self._level += 1
        self._is_running = True
        self._has_begun = False
        self._workers = {one: _Worker(one, index) for index, one in enumerate(self.present())}
        for client in self._runner.clients.all:
            if client.id not in self._workers:
                self._forget(client.id)
        self._spawn(self._watch, self._level)
        self._spawn(self._prepare, self._level, plan)

    def stop(self) -> None:
        """The level is decided; one that waits for a worker before it begins has failed."""
        if self._is_running and not self._has_begun:
            self._fail(self._not_begun())
        else:
            self._stop_workers()

    def _stop_workers(self) -> None:
        for worker in self._workers.values():
            self._send("crossover_stop", worker, {})

    def _not_begun(self) -> str:
        waited_for = [one.in_words for one in self._workers.values() if one.draws is None]
        why = f": {', '.join(waited_for)} not ready" if waited_for else ""
        return f"the level was stopped before it began{why}"

    def _send(self, name: str, worker: _Worker, data: dict[str, Any]) -> None:
        self._runner.send_message(name, data | {"level": self._level}, client_id=worker.client)

    def _is_connected(self, client: str) -> bool:
        """False once its process has ended. Sends one of Locust's heartbeats.

        Locust itself drops what reaches nobody, and sleeps after a send that raises.
        """
        message = [client.encode(), self._hooks.heartbeat(client)]
        socket = self._runner.server.socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:  # it does not read: its silence will tell
            return True
        except zmq.ZMQError:
            return False
        finally:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        return True

    def _watch(self, level: int) -> None:
        """Fail the level for the first worker that is lost."""
        while self._is_running and level == self._level:
            for worker in self._workers.values():
                if worker.account is not None:
                    continue
                if self._is_silent(worker) or not self._is_connected(worker.client):
                    when = "in the middle of" if self._has_begun else "before the beginning of"
                    self._forget(worker.client)
                    self._fail(f"{worker.in_words} was lost {when} the level")
                    return
                if worker.draws is not None:
                    self._ping(worker)
            gevent.sleep(PING_SECONDS)

    def _is_silent(self, worker: _Worker) -> bool:
        """By its answers to pings; before it gets any, by Locust's heartbeats, one a second."""
        if worker.draws is not None:
            return clock() - worker.heard > LOST_SECONDS
        clients = self._runner.clients
        beats = clients[worker.client].heartbeat if worker.client in clients else -math.inf
        return bool(self._heartbeats - beats > LOST_SECONDS)

    def _ping(self, worker: _Worker) -> None:
        self._send("crossover_ping", worker, {"sent": clock()})

    def _worker(self, client: str, data: Any) -> _Worker | None:
        """Whose message this is; None for one that is not of the level."""
        known = self._is_running and data.get("level") == self._level
        return self._workers.get(client) if known else None

    def _spawn(self, act: Callable[..., None], *arguments: Any) -> None:
        """In a greenlet, whose end by an exception Locust would not hear of."""
        made = gevent.spawn(act, *arguments)
        made.link_exception(lambda ended: self._fail(f"the master failed: {ended.exception!r}"))

    def _fail(self, problem: str) -> None:
        if self._is_running:
            self._is_running = False
            self._stop_workers()
            self._hooks.failed(problem)

    def _prepare(self, level: int, plan: LoadPlan) -> None:
        if not self._workers:
            self._fail("no worker is left")
            return
        try:
            self._share_users(level, plan)
        except LoadError as problem:
            if level == self._level:
                self._fail(f"{problem}")
            return
        text = msgspec.json.encode(plan).decode()
        while self._is_running and level == self._level:
            waited_for = [worker for worker in self._workers.values() if worker.draws is None]
            for worker in waited_for:
                data = {"plan": text, "index": worker.index, "workers": len(self._workers)}
                self._send("crossover_prepare", worker, data)
            if not waited_for:
                return
            gevent.sleep(PREPARE_SECONDS)

    def _share_users(self, level: int, plan: LoadPlan) -> None:
        """Users of a closed loop: all are on workers that are there. Raises LoadError."""
        clients, until = self._runner.clients, clock() + USERS_SECONDS

        def users() -> int:
            own = [clients[one] for one in self._workers if one in clients]
            return sum(sum(one.user_classes_count.values()) for one in own)

        if plan.concurrency is None:
            return
        while users() != plan.concurrency and self._is_running and level == self._level:
            if clock() > until:
                raise LoadError(f"{users()} of {plan.concurrency} users are at work")
            if self._runner.state not in ("spawning", "cleanup"):
                self._runner.start(plan.concurrency, spawn_rate=plan.concurrency)
            gevent.sleep(0.5)

    def _prepared(self, client: str, data: Any) -> None:
        worker = self._worker(client, data)
        if worker is None:
            return
        worker.draws = str(data["draws"])
        worker.heard = clock()
        if all(one.draws is not None for one in self._workers.values()):
            self._spawn(self._begin, self._level)

    def _begin(self, level: int) -> None:
        """Compare the clocks, then say t0 to each worker on its own."""
        first, *others = self._workers.values()
        for other in others:
            if other.draws != first.draws:
                self._fail(
                    f"{first.in_words} and {other.in_words} draw other requests from the same "
                    "seed: give both the same versions of Crossover and numpy"
                )
                return
        pings = 0
        while pings < FIRST_PINGS or not all(
            one.its_clock.is_known for one in self._workers.values()
        ):
            for worker in self._workers.values():
                self._ping(worker)
            gevent.sleep(FIRST_PING_SECONDS)
            pings += 1
            if not self._is_running or level != self._level:
                return
        origin = clock() + LEAD_SECONDS
        self._has_begun = True
        for worker in self._workers.values():
            worker.heard = clock()
            worker.offset_begun = worker.offset_now = worker.its_clock.at(clock()).seconds
            self._send("crossover_begin", worker, {"origin": origin + worker.offset_begun})
        self._hooks.tell(Started(time.time() + (origin - clock())))

    def _pong(self, client: str, data: Any) -> None:
        received = clock()
        worker = self._worker(client, data)
        if worker is None:
            return
        worker.heard = received
        if self._has_begun:
            aged = worker.its_clock.at(received).uncertainty_seconds
            worker.worst_seconds = max(worker.worst_seconds, aged)
        if not worker.its_clock.exchange(data["sent"], data["there"], received):
            self._fail(f"the clock of {worker.in_words} jumped, or the machine stood still")
            return
        offset = worker.its_clock.at(received)
        worker.offset_now = offset.nearest(worker.offset_now)
        if self._has_begun:
            date = data["unix"] - data["there"] - (time.time() - clock()) + offset.seconds
            self._hooks.tell(
                WorkerClock(
                    worker=worker.index,
                    name=worker.name,
                    shift_seconds=worker.offset_begun - worker.offset_now,
                    uncertainty_seconds=max(worker.worst_seconds, offset.uncertainty_seconds),
                    offset_seconds=date,
                )
            )

    def _told(self, client: str, data: Any) -> None:
        worker = self._worker(client, data)
        if worker is not None:
            worker.heard = clock()
            self._hooks.pass_on(data["line"])

    def _settled(self, client: str, data: Any) -> None:
        worker = self._worker(client, data)
        if worker is None:
            return
        worker.is_settled = True
        if all(one.is_settled for one in self._workers.values()):
            for one in self._workers.values():
                self._send("crossover_settled", one, {})

    def _drained(self, client: str, data: Any) -> None:
        worker = self._worker(client, data)
        if worker is None:
            return
        worker.account = msgspec.convert(data["account"], Ended)
        accounts = [one.account for one in self._workers.values() if one.account is not None]
        if len(accounts) == len(self._workers):
            self._is_running = False
            self._hooks.ended(total(accounts))

    def _failed(self, client: str, data: Any) -> None:
        worker = self._worker(client, data)
        if worker is not None:
            self._fail(f"{worker.in_words}: {data['problem']}")

    def _forget(self, client: str) -> None:
        """Let Locust find it missing, and share its users out anew when a level wants them."""
        if client in self._runner.clients:
            self._runner.clients[client].heartbeat = -1
