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
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from loadtests.errors import LevelInterrupted, LoadError
from loadtests.host.child_processes import Child
from loadtests.load_generator.load_plan import (
    Begin,
    Ended,
    Failed,
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
from models.isolated import PACKAGE_ROOT, python_variables

TICK_SECONDS = 0.1
LEAD_SECONDS = 0.05  # between "begin" and t0: the message must have reached every process
START_SECONDS = 120.0  # that a load generator may take to make its requests
PIPE_VARIABLE = "CROSSOVER_PIPE"  # the number of its file descriptor
# Locust takes modules and a locust.conf from the folder it starts in: it starts in ours, and goes
# to this one once it has read its options.
FOLDER_VARIABLE = "CROSSOVER_FOLDER"
LOCUST = (
    *("-m", "locust", "-f", str(PACKAGE_ROOT / "loadtests" / "locustfile.py"), "--headless"),
    *("--only-summary", "--loglevel", "WARNING"),
)
_READ_BYTES = 1 << 18
Incoming = TypeVar("Incoming")


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
        self._answered: dict[type, dict[Hashable, Wire]] = {Ready: {}, Settled: {}, Ended: {}}

    def obey(self, order: Order) -> None:
        for number, send in enumerate(self._senders.values()):
            send(Share(order.plan, number, len(self._senders)) if type(order) is Share else order)

    def take(self, who: Hashable, wire: Wire) -> None:
        """An answer of one of them."""
        answered = self._answered.get(type(wire))
        if answered is None:
            self._tell(wire)
            return
        answered[who] = wire
        if len(answered) < len(self._senders):
            return
        if isinstance(wire, Ready):
            versions = {one.versions for one in answered.values() if isinstance(one, Ready)}
            if len(versions) > 1:
                problem = f"load generators of different versions: {' and '.join(sorted(versions))}"
                wire = Failed(problem)
        elif isinstance(wire, Ended):
            wire = total(one for one in answered.values() if isinstance(one, Ended))
        self._tell(wire)


class LoadGenerator:
    """Starts at once, and imports Locust while its parent goes on.

    `listen`: (host, port) of a master for `expect_workers` workers from elsewhere. Raises LoadError
    where nothing can listen there.
    """

    def __init__(
        self,
        *,
        log: Path | None = None,
        cores: tuple[int, ...] = (),
        processes: int = 1,
        listen: tuple[str, int] | None = None,
        expect_workers: int = 1,
    ) -> None:
        self._log = log
        self._cores = cores
        self._processes = processes
        self._listen = listen
        self._expect_workers = expect_workers
        self._children: list[Child] = []
        self._pipes: dict[socket.socket, Pipe[Wire]] = {}
        self._conductor: Conductor | None = None  # of the level that runs
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
        out: deque[Wire] = deque()
        self._conductor = Conductor(
            {end: pipe.send for end, pipe in self._pipes.items()}, out.append
        )
        recorded, ticked, until = 0, time.monotonic(), time.monotonic() + START_SECONDS
        is_whole = False
        try:
            self._order(Share(plan))
            while not is_whole:
                self._hear(TICK_SECONDS)
                while out:
                    match out.popleft():
                        case Ready():
                            until = float("inf")
                            self._order(Begin(time.perf_counter() + LEAD_SECONDS))
                            yield Started(time.time() + LEAD_SECONDS)
                        case Settled():
                            self._order(Settled())
                        case Failed(problem):
                            raise LevelInterrupted(f"the load generator failed: {problem}")
                        case Recorded(record):
                            recorded += 1
                            yield record
                        case Ended() as account:
                            if not recorded == account.recorded == account.due:
                                raise LevelInterrupted(
                                    f"the load generator lost requests: {account.due} were due, "
                                    f"{account.recorded} ended, {recorded} are on record"
                                )
                            is_whole = True
                            yield account
                        case Workers():
                            pass
                        case late:
                            yield late
                now = time.monotonic()
                if now > until:
                    raise LevelInterrupted(
                        f"the load generator did not start within {START_SECONDS:.0f} s"
                    )
                if now - ticked >= TICK_SECONDS and not is_whole:
                    ticked = now
                    yield None
        finally:
            self._conductor = None
            if not is_whole:
                self._end()

    def stop(self) -> None:
        """The level is decided: nothing more is sent, and what is on its way is ended."""
        if self._conductor is not None:
            self._order(Stop())

    def wait_for_workers(self, seconds: float, say: Callable[[list[str]], None]) -> None:
        """Until all that are expected have joined; `say` hears their names. LoadError: too few."""
        names: list[str] = []
        heard: deque[Wire] = deque()
        self._conductor = Conductor(
            {end: pipe.send for end, pipe in self._pipes.items()}, heard.append
        )
        until = time.monotonic() + seconds
        while len(names) < self._expect_workers:
            self._hear(TICK_SECONDS)
            while heard:
                if isinstance(wire := heard.popleft(), Workers):
                    names = wire.names
                    say(names)
            if time.monotonic() > until:
                raise LoadError(
                    f"{len(names)} of {self._expect_workers} workers joined within {seconds:g} s"
                )
        self._conductor = None

    def _start(self) -> None:
        command = [sys.executable, *LOCUST, "-u", "1", "-r", "1"]
        if self._listen is not None:
            host, port = self._listen
            try:  # tried first: Locust would say it in its log alone
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                socket.create_server((host, port), family=family).close()
            except OSError as problem:
                reason = problem.strerror or str(problem)
                raise LoadError(f"{host}:{port} cannot be listened on: {reason}") from problem
            place = f"[{host}]" if ":" in host else host
            command += ["--master", "--master-bind-host", place, "--master-bind-port", str(port)]
            command += ["--expect-workers", str(self._expect_workers)]
        for _ in range(self._processes):
            ours, its = socket.socketpair()
            variables = {PIPE_VARIABLE: str(its.fileno()), FOLDER_VARIABLE: os.getcwd()}
            with its:
                child = Child(
                    command,
                    cores=self._cores,
                    log=self._log,
                    environment=client_environment() | variables,
                    urgent=True,
                    pass_fds=(its.fileno(),),
                    folder=PACKAGE_ROOT,
                )
            self._children.append(child)
            self._pipes[ours] = Pipe(ours, Wire)

    def _order(self, order: Order) -> None:
        assert self._conductor is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # _hear says how it ended
            self._conductor.obey(order)

    def _hear(self, seconds: float) -> None:
        """What came within `seconds`. Raises LevelInterrupted where a process has ended."""
        assert self._conductor is not None
        for end in select.select(list(self._pipes), [], [], seconds)[0]:
            try:
                for wire in self._pipes[end].receive():
                    self._conductor.take(end, wire)
            except EOFError:
                child = self._children[list(self._pipes).index(end)]
                child.wait(5)
                how = child.how_it_ended()
                raise LevelInterrupted(f"the load generator ended early ({how})") from None

    def _end(self, timeout_seconds: float = 0.0) -> None:
        """Its processes; within `timeout_seconds` they may quit by themselves."""
        for end in self._pipes:
            end.close()
        for child in self._children:
            child.wait(timeout_seconds)
            child.stop(timeout_seconds)
        self._pipes.clear()
        self._children.clear()

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(10.0)


def client_environment() -> dict[str, str]:
    """For load generators: our packages first, and one thread for whatever numpy does."""
    return python_variables() | {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
    }
