"""A load generator: a child process with Locust in it, and the runner's end of its pipe.

    with LoadGenerator(log=path, cores=layout.client) as generator:
        for told in generator.run(plan):         # Started, RequestRecords, Late, None ..., Ended
            ...
            generator.stop()                     # the level is decided

It stays for one level after the other. With `processes`, so many children send their shares of
one arrival process from the same moment; with `listen`, Locust's workers on other machines do
(locust_workers.py), and to the runner all of them are one.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from loadtests.errors import LevelInterrupted, LoadError
from loadtests.host.child_processes import Child
from loadtests.load_generator.load_plan import (
    Begin,
    Ended,
    Failed,
    Late,
    LoadPlan,
    Order,
    Ready,
    Recorded,
    Settled,
    Share,
    Started,
    Stop,
    Told,
    Wire,
    Workers,
    total,
)
from models.isolated import PACKAGE_ROOT

TICK_SECONDS = 0.1
LEAD_SECONDS = 0.05  # between "begin" and t0: the message must have reached every process
PIPE_VARIABLE = "CROSSOVER_PIPE"  # the number of its file descriptor
# Locust takes modules and a locust.conf from the folder it starts in: it starts in ours, and goes
# to this one once it has read its options.
FOLDER_VARIABLE = "CROSSOVER_FOLDER"
_READ_BYTES = 1 << 18
Incoming = TypeVar("Incoming")


def locust_child(*options: str, variables: Mapping[str, str], **settings: Any) -> Child:
    """Locust with our locustfile. `settings`: of Child."""
    command = [sys.executable, "-m", "locust", "-f", f"{PACKAGE_ROOT}/loadtests/locustfile.py"]
    ours = {FOLDER_VARIABLE: os.getcwd(), "OPENBLAS_NUM_THREADS": "1"}
    return Child(
        [*command, "--headless", "--only-summary", "--loglevel", "WARNING", *options],
        environment={**ours, **variables},
        urgent=True,
        folder=PACKAGE_ROOT,
        **settings,
    )


class Pipe(Generic[Incoming]):
    """One end: a JSON line a message. `incoming` is the union of what the other end sends.

    A process killed within a message loses that message only.
    """

    def __init__(self, end: socket.socket, incoming: object) -> None:
        self.socket = end
        self._decode = msgspec.json.Decoder(incoming).decode
        self._encode = msgspec.json.Encoder().encode
        self._unread = b""
        self._unsent = bytearray()
        self._is_sending = False

    def send(self, message: Order | Wire) -> None:
        """Within gevent, another greenlet may be in the middle of one."""
        self._unsent += self._encode(message) + b"\n"
        if self._is_sending:
            return
        self._is_sending = True
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        finally:
            self._is_sending = False

    def receive(self) -> list[Incoming]:
        """Messages that have come; waits for bytes. Raises EOFError after the last."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except ConnectionResetError:  # the other end died with bytes unread
            data = b""
        if not data:
            raise EOFError("the other end of the pipe is closed")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [self._decode(line) for line in lines]


class Conductor:
    """Several senders of a level as one: orders go to all, and of all answers one is made."""

    def __init__(
        self, senders: Mapping[Any, Callable[[Order], None]], tell: Callable[[Wire], None]
    ) -> None:
        self._senders = senders
        self._tell = tell
        self._answered: dict[type, dict[Any, Any]] = {Ready: {}, Settled: {}, Ended: {}}

    def obey(self, order: Order) -> None:
        for number, send in enumerate(self._senders.values()):
            send(Share(order.plan, number, len(self._senders)) if type(order) is Share else order)

    def take(self, who: Any, wire: Wire) -> None:
        """An answer of one of them."""
        answered = self._answered.get(type(wire))
        if answered is None:
            self._tell(wire)
            return
        answered[who] = wire
        if len(answered) < len(self._senders):
            return
        if isinstance(wire, Settled):
            self.obey(wire)
            return
        if isinstance(wire, Ended):
            wire = total(list(answered.values()))
        elif len(versions := sorted({one.versions for one in answered.values()})) > 1:
            wire = Failed(f"load generators of different versions: {' and '.join(versions)}")
        self._tell(wire)


class LoadGenerator:
    """Starts at once, and imports Locust while its parent goes on.

    `listen`: (host, port) of a master for workers from elsewhere. Raises LoadError where nothing
    can listen there.
    """

    def __init__(
        self,
        *,
        log: Path | None = None,
        cores: tuple[int, ...] = (),
        processes: int = 1,
        listen: tuple[str, int] | None = None,
    ) -> None:
        self._settings = {"log": log, "cores": cores}
        self._processes = processes
        self._listen = listen
        self._children: list[Child] = []
        self._pipes: dict[socket.socket, Pipe[Wire]] = {}
        self._conductor: Conductor | None = None  # of the level that runs
        self._told: deque[Wire] = deque()
        self._start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of its processes, for the sampler."""
        return tuple(child.pid for child in self._children)

    def run(self, plan: LoadPlan) -> Iterator[Told]:
        """What it tells of a level as it comes, and None about every TICK_SECONDS.

        The last is Ended. Where it is left early, its processes are ended, and the next level gets
        new ones. Raises LevelInterrupted when it fails, loses requests or a process ends.
        """
        if self._conductor is not None:  # of a level that was left in the middle
            self._end()
        if not self._children:
            self._start()
        self._conduct()
        recorded, ticked = 0, time.monotonic()
        try:
            self._order(Share(plan))
            while self._conductor is not None:
                for wire in self._heard():
                    match wire:
                        case Ready():
                            self._order(Begin(time.perf_counter() + LEAD_SECONDS))
                            yield Started(time.time() + LEAD_SECONDS)
                        case Recorded(record):
                            recorded += 1
                            yield record
                        case Late():
                            yield wire
                        case Failed(problem):
                            raise LevelInterrupted(f"the load generator failed: {problem}")
                        case Ended():
                            if not recorded == wire.recorded == wire.due:
                                raise LevelInterrupted(
                                    f"the load generator lost requests: {wire.due} were due, "
                                    f"{wire.recorded} ended, {recorded} are on record"
                                )
                            self._conductor = None
                            yield wire
                if time.monotonic() - ticked >= TICK_SECONDS and self._conductor is not None:
                    ticked = time.monotonic()
                    yield None
        finally:
            if self._conductor is not None:
                self._end()

    def stop(self) -> None:
        """The level is decided: nothing more is sent, and what is on its way is ended."""
        if self._conductor is not None:
            self._order(Stop())

    def wait_for_workers(
        self, count: int, seconds: float, say: Callable[[list[str]], None]
    ) -> None:
        """Until so many have joined; `say` hears their names. Raises LoadError for too few."""
        names: list[str] = []
        until = time.monotonic() + seconds
        self._conduct()
        while len(names) < count:
            for wire in self._heard():
                if isinstance(wire, Workers):
                    names = wire.names
                    say(names)
            if time.monotonic() > until:
                raise LoadError(f"{len(names)} of {count} workers joined within {seconds:g} s")
        self._conductor = None

    def _start(self) -> None:
        options: list[str] = []
        if self._listen is not None:
            host, port = self._listen
            try:  # tried first: Locust would say it in its log alone
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                socket.create_server((host, port), family=family).close()
            except OSError as problem:
                reason = problem.strerror or str(problem)
                raise LoadError(f"{host}:{port} cannot be listened on: {reason}") from problem
            place = f"[{host}]" if ":" in host else host
            options = ["--master", "--master-bind-host", place, "--master-bind-port", str(port)]
        for _ in range(self._processes):
            ours, its = socket.socketpair()
            with its:
                variables, passed = {PIPE_VARIABLE: str(its.fileno())}, (its.fileno(),)
                child = locust_child(
                    *options, variables=variables, pass_fds=passed, **self._settings
                )
            self._children.append(child)
            self._pipes[ours] = Pipe(ours, Wire)

    def _conduct(self) -> None:
        self._told.clear()
        senders = {end: pipe.send for end, pipe in self._pipes.items()}
        self._conductor = Conductor(senders, self._told.append)

    def _order(self, order: Order) -> None:
        assert self._conductor is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # _heard says how it ended
            self._conductor.obey(order)

    def _heard(self) -> Iterator[Wire]:
        """What came within a tick. Raises LevelInterrupted where a process has ended."""
        assert self._conductor is not None
        for end in select.select(list(self._pipes), [], [], TICK_SECONDS)[0]:
            try:
                for wire in self._pipes[end].receive():
                    self._conductor.take(end, wire)
            except EOFError:
                child = self._children[list(self._pipes).index(end)]
                child.wait(5)
                how = child.how_it_ended()
                raise LevelInterrupted(f"the load generator ended early ({how})") from None
        while self._told:
            yield self._told.popleft()

    def _end(self, timeout_seconds: float = 0.0) -> None:
        """Its processes; within `timeout_seconds` they may quit by themselves."""
        for end in self._pipes:
            end.close()
        for child in self._children:
            child.wait(timeout_seconds)
            child.stop(timeout_seconds)
        self._pipes.clear()
        self._children.clear()
        self._conductor = None

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(10.0)
