"""A load generator: a child process with Locust in it, and the runner's end of its pipe.

    with LoadGenerator(log=path, cores=layout.client) as generator:
        for told in generator.run(plan):         # Started, RequestRecords, Late, None ..., Ended
            ...
            generator.stop()                     # the level is decided

It stays for one level after the other. With `processes`, or with `listen`, it is Locust's master,
and so many of Locust's workers send: of this machine, or those that join from elsewhere
(locust_workers.py). To the runner all of them are one.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
    Share,
    Started,
    Stop,
    Told,
    Wire,
)
from models.isolated import PACKAGE_ROOT

TICK_SECONDS = 0.1
LEAD_SECONDS = 0.05  # between "begin" and t0: the message must have reached every process
PIPE_VARIABLE = "CROSSOVER_PIPE"  # the number of its file descriptor
# Locust takes modules and a locust.conf from the folder it starts in: it starts in ours, and goes
# to this one once it has read its options.
FOLDER_VARIABLE = "CROSSOVER_FOLDER"
_READ_BYTES = 1 << 18


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


def url_host(host: str) -> str:
    """An IPv6 address stands in brackets."""
    return f"[{host}]" if ":" in host else host


class Pipe:
    """One end: a JSON line a message. `incoming` is the union of what the other end sends.

    A process killed within a message loses that message only.
    """

    def __init__(self, end: socket.socket, incoming: object) -> None:
        self.socket = end
        self._decode = msgspec.json.Decoder(incoming).decode
        self._encode = msgspec.json.Encoder().encode
        self._unread = b""
        self._sending = threading.Lock()  # another greenlet may be in the middle of a message

    def send(self, message: Order | Wire) -> None:
        data = self._encode(message) + b"\n"
        with self._sending:
            self.socket.sendall(data)

    def receive(self) -> list[Any]:
        """Messages that have come; waits for bytes. Raises EOFError after the last."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except ConnectionResetError:  # the other end died with bytes unread
            data = b""
        if not data:
            raise EOFError("the other end of the pipe is closed")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [self._decode(line) for line in lines]


class LoadGenerator:
    """Starts at once, and imports Locust while its parent goes on.

    `processes`: how many share a level. `listen`: (host, port) where these join from elsewhere.
    Raises LoadError where nothing can listen there.
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
        self._pipe: Pipe | None = None
        self._is_running = False  # a level
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
        if self._is_running:  # a level that was left in the middle
            self._end()
        if not self._children:
            self._start()
        self._is_running = True
        recorded, ticked = 0, time.monotonic()
        try:
            self._order(Share(plan, shares=self._processes))
            while self._is_running:
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
                            self._is_running = False
                            yield wire
                if time.monotonic() - ticked >= TICK_SECONDS and self._is_running:
                    ticked = time.monotonic()
                    yield None
        finally:
            if self._is_running:
                self._end()

    def stop(self) -> None:
        """The level is decided: nothing more is sent, and what is on its way is ended."""
        if self._is_running:
            self._order(Stop())

    def _start(self) -> None:
        is_master = self._processes > 1 or self._listen is not None
        host, port = self._listen or ("127.0.0.1", 0)
        options: list[str] = []
        if is_master:
            try:  # tried first: Locust would say it in its log alone
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                with socket.create_server((host, port), family=family) as free:
                    port = free.getsockname()[1]
            except OSError as problem:
                reason = problem.strerror or str(problem)
                raise LoadError(f"{host}:{port} cannot be listened on: {reason}") from problem
            place, number = url_host(host), str(port)
            options = ["--master", "--master-bind-host", place, "--master-bind-port", number]
        ours, its = socket.socketpair()
        with its:
            variables, passed = {PIPE_VARIABLE: str(its.fileno())}, (its.fileno(),)
            child = locust_child(*options, variables=variables, pass_fds=passed, **self._settings)
        self._children.append(child)
        self._pipe = Pipe(ours, Wire)
        if is_master and self._listen is None:
            options = ["--worker", "--master-host", host, "--master-port", str(port)]
            for _ in range(self._processes):
                self._children.append(locust_child(*options, variables={}, **self._settings))

    def _order(self, order: Order) -> None:
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # _heard says how it ended
            self._pipe.send(order)

    def _heard(self) -> list[Wire]:
        """What came within a tick. Raises LevelInterrupted where a process has ended."""
        assert self._pipe is not None
        try:
            if select.select([self._pipe.socket], [], [], TICK_SECONDS)[0]:
                return self._pipe.receive()
        except EOFError:
            self._children[0].wait(5)
        for child in self._children:
            if child.poll() is not None:
                how = child.how_it_ended()
                raise LevelInterrupted(f"the load generator ended early ({how})")
        return []

    def _end(self, timeout_seconds: float = 0.0) -> None:
        """Its processes; within `timeout_seconds` they may quit by themselves."""
        if self._pipe is not None:
            self._pipe.socket.close()
        for child in self._children:
            child.wait(timeout_seconds)
            child.stop(timeout_seconds)
        self._pipe = None
        self._children.clear()
        self._is_running = False

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(10.0)
