"""A load generator: a child process with Locust in it, and the runner's end of its pipe.

    with LoadGenerator(log=path, cores=layout.client) as generator:
        for told in generator.run(plan):         # Started, RequestRecords, None ..., Ended
            ...

It stays for one level after the other.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from loadtests.errors import LevelInterrupted
from loadtests.host.child_processes import Child
from loadtests.load_generator.load_plan import (
    Begin,
    Ended,
    Failed,
    LoadPlan,
    Order,
    Prepare,
    Ready,
    Recorded,
    Started,
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
    """Starts at once, and imports Locust while its parent goes on."""

    def __init__(self, *, log: Path | None = None, cores: tuple[int, ...] = ()) -> None:
        self._log, self._cores = log, cores
        self._is_running = False  # a level
        self._start()

    @property
    def pid(self) -> int:
        """Of its process, for the sampler."""
        return self._child.pid

    def run(self, plan: LoadPlan) -> Iterator[Told]:
        """What it tells of a level as it comes, and None about every TICK_SECONDS.

        The last is Ended. Where it is left early, its process is ended, and the next level gets a
        new one. Raises LevelInterrupted when it fails, loses requests or ends.
        """
        if self._is_running:  # a level that was left in the middle
            self._end()
        if self._child.poll() is not None:
            self._start()
        self._is_running = True
        recorded, ticked = 0, time.monotonic()
        try:
            self._order(Prepare(plan))
            while self._is_running:
                for wire in self._heard():
                    match wire:
                        case Ready():
                            self._order(Begin(time.perf_counter() + LEAD_SECONDS))
                            yield Started(time.time() + LEAD_SECONDS)
                        case Recorded(record):
                            recorded += 1
                            yield record
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

    def _start(self) -> None:
        locustfile = f"{PACKAGE_ROOT}/loadtests/locustfile.py"
        command = [sys.executable, "-m", "locust", "-f", locustfile]
        ours, its = socket.socketpair()
        with its:
            self._child = Child(
                [*command, "--headless", "--only-summary", "--loglevel", "WARNING"],
                environment={
                    FOLDER_VARIABLE: os.getcwd(),
                    PIPE_VARIABLE: str(its.fileno()),
                    "OPENBLAS_NUM_THREADS": "1",
                },
                log=self._log,
                cores=self._cores,
                urgent=True,
                folder=PACKAGE_ROOT,
                pass_fds=(its.fileno(),),
            )
        self._pipe = Pipe(ours, Wire)

    def _order(self, order: Order) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # _heard says how it ended
            self._pipe.send(order)

    def _heard(self) -> list[Wire]:
        """What came within a tick. Raises LevelInterrupted where the process has ended."""
        if not select.select([self._pipe.socket], [], [], TICK_SECONDS)[0]:
            return []
        try:
            return self._pipe.receive()
        except EOFError:
            self._child.wait(5)
            how = self._child.how_it_ended()
            raise LevelInterrupted(f"the load generator ended early ({how})") from None

    def _end(self, timeout_seconds: float = 0.0) -> None:
        """The process; within `timeout_seconds` it may quit by itself."""
        self._pipe.socket.close()
        self._child.wait(timeout_seconds)
        self._child.stop(timeout_seconds)
        self._is_running = False

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(10.0)
