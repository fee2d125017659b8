"""A load generator: a child process with Locust in it, and the runner's end of its pipe.

    with LoadGenerator(log=path, cores=layout.client) as generator:
        for told in generator.run(plan):         # Started, RequestRecords, None ..., Ended
            ...

It stays for one level after the other. A plan goes over the pipe as a line of JSON; Started,
Recorded and Ended, or Failed, come back, a line each. Where the pipe is closed it quits.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from crossover.loadtests.errors import LevelInterrupted
from crossover.loadtests.host.child_processes import Child
from crossover.loadtests.load_generator.level_messages import (
    Ended,
    Failed,
    GeneratorEvent,
    LoadPlan,
    Recorded,
    WireMessage,
)
from crossover.models.child_process import PACKAGE_ROOT

TICK_SECONDS = 0.1
PIPE_VARIABLE = "CROSSOVER_PIPE"  # the number of its file descriptor
# Locust takes modules and a locust.conf from the folder it starts in: it starts in ours, and goes
# to this one once it has read its options.
FOLDER_VARIABLE = "CROSSOVER_FOLDER"
_READ_BYTES = 1 << 18
_decode = msgspec.json.Decoder(WireMessage).decode


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

    def run(self, plan: LoadPlan) -> Iterator[GeneratorEvent]:
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
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # _heard says why
                self._pipe.sendall(msgspec.json.encode(plan) + b"\n")
            while self._is_running:
                for wire in self._heard():
                    match wire:
                        case Recorded(record):
                            recorded += 1
                            yield record
                        case Failed(problem):
                            raise LevelInterrupted(f"the load generator failed: {problem}")
                        case Ended():
                            if not recorded == wire.recorded == wire.due:
                                raise LevelInterrupted(
                                    f"the load generator lost requests: {wire.due} were scheduled, "
                                    f"{wire.recorded} ended, {recorded} are recorded"
                                )
                            self._is_running = False
                            yield wire
                        case _:
                            yield wire
                if time.monotonic() - ticked >= TICK_SECONDS and self._is_running:
                    ticked = time.monotonic()
                    yield None
        finally:
            if self._is_running:
                self._end()

    def _start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "locust",
            "-f",
            f"{PACKAGE_ROOT}/crossover/loadtests/locustfile.py",
        ]
        self._pipe, its = socket.socketpair()
        self._unread = b""
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
                cwd=PACKAGE_ROOT,
                pass_fds=(its.fileno(),),
            )

    def _heard(self) -> list[WireMessage]:
        """What came within a tick. Raises LevelInterrupted where the process has ended."""
        if not select.select([self._pipe], [], [], TICK_SECONDS)[0]:
            return []
        try:
            data = self._pipe.recv(_READ_BYTES)
        except ConnectionResetError:  # it died with bytes unread
            data = b""
        if not data:
            self._child.wait(5)
            how = self._child.how_it_ended()
            raise LevelInterrupted(f"the load generator ended early ({how})")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [_decode(line) for line in lines]

    def _end(self, timeout_seconds: float = 0.0) -> None:
        """The process; within `timeout_seconds` it may quit by itself."""
        self._pipe.close()
        self._child.wait(timeout_seconds)
        self._child.stop(timeout_seconds)
        self._is_running = False

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(10.0)
