"""A load generator: a child process that runs Locust, and the runner's end of the pipe to it.

    with LoadGenerator(log=path, cores=layout.client) as generator:
        rows, ended = generator.level(plan, on_record=records.append)

The process runs one level after the other. A plan goes over the pipe as a line of JSON. Started,
Recorded and Ended, or Failed, come back, one line each. The process quits when the pipe is closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from crossover.loadtests.errors import LevelInterrupted
from crossover.loadtests.host.child_processes import Child
from crossover.loadtests.levels.level_columns import LevelRows
from crossover.loadtests.load_generator.level_messages import (
    Ended,
    Failed,
    LoadPlan,
    Recorded,
    Started,
    WireMessage,
)
from crossover.loadtests.records.request_record import RequestRecord
from crossover.models.child_process import PACKAGE_ROOT

TICK_SECONDS = 0.1
PIPE_VARIABLE = "CROSSOVER_PIPE"  # holds the number of the pipe's file descriptor
# Locust imports modules and reads a locust.conf from the folder it starts in. So it starts in the
# package's folder, and changes to the folder in this variable after it has read its options.
FOLDER_VARIABLE = "CROSSOVER_FOLDER"
_READ_BYTES = 1 << 18
_decode = msgspec.json.Decoder(WireMessage).decode


class LoadGenerator:
    """The process starts at once and imports Locust in the background.

    `log`: file for its output. `cores`: the CPU cores that it may use; (): all.
    """

    def __init__(self, *, log: Path | None = None, cores: tuple[int, ...] = ()) -> None:
        self._log, self._cores = log, cores
        self._start()

    @property
    def pid(self) -> int:
        """Process ID, for the resource sampler."""
        return self._child.pid

    def level(
        self,
        load: LoadPlan,
        *,
        on_start: Callable[[float], None] | None = None,
        on_record: Callable[[RequestRecord], None] | None = None,
        on_tick: Callable[[LevelRows], None] | None = None,
    ) -> tuple[LevelRows, Ended]:
        """Run a level. Return its requests, and the load generator's account of it.

        `on_start` is called with the Unix time at which the level starts, `on_record` with each
        record, and `on_tick` about every TICK_SECONDS with the requests so far. If one of them
        raises, the process is ended, and the next level gets a new one. Raises LevelInterrupted if
        the process fails, ends or loses requests.
        """
        if self._child.poll() is not None:
            self._start()
        rows, last_tick = LevelRows(), time.monotonic()
        try:
            # _received then raises the error with its reason.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._pipe.sendall(msgspec.json.encode(load) + b"\n")
            while True:
                for message in self._received():
                    match message:
                        case Started(unix_seconds):
                            if on_start is not None:
                                on_start(unix_seconds)
                        case Recorded(record):
                            rows.add(record)
                            if on_record is not None:
                                on_record(record)
                        case Failed(problem):
                            raise LevelInterrupted(f"the load generator failed: {problem}")
                        case Ended(due=due, recorded=recorded):
                            if not rows.count == recorded == due:
                                raise LevelInterrupted(
                                    f"the load generator lost requests: {due} were scheduled, "
                                    f"{recorded} ended, {rows.count} are recorded"
                                )
                            return rows, message
                if on_tick is not None and time.monotonic() - last_tick >= TICK_SECONDS:
                    last_tick = time.monotonic()
                    on_tick(rows)
        except BaseException:
            self._end()  # it may be in the middle of the level
            raise

    def _start(self) -> None:
        """Start the process, with one end of a new pipe."""
        command = [
            sys.executable,
            "-m",
            "locust",
            "-f",
            f"{PACKAGE_ROOT}/crossover/loadtests/locustfile.py",
        ]
        self._pipe, child_pipe = socket.socketpair()
        self._unread = b""
        with child_pipe:
            self._child = Child(
                [*command, "--headless", "--only-summary", "--loglevel", "WARNING"],
                environment={
                    FOLDER_VARIABLE: os.getcwd(),
                    PIPE_VARIABLE: str(child_pipe.fileno()),
                    "OPENBLAS_NUM_THREADS": "1",
                },
                log=self._log,
                cores=self._cores,
                urgent=True,
                cwd=PACKAGE_ROOT,
                pass_fds=(child_pipe.fileno(),),
            )

    def _received(self) -> list[WireMessage]:
        """Return the messages that came within a tick. Raises LevelInterrupted if the process has
        ended."""
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
        """End the process. It has `timeout_seconds` to quit by itself."""
        self._pipe.close()
        self._child.wait(timeout_seconds)
        self._child.stop(timeout_seconds)

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(10.0)
