"""What the pressure benchmarks share: a server as a child process, a raw client on uvloop, and what
a process holds at the moment.

    with serving("fake", "--slots", "8", folder=folder) as server:
        client = Client(server.port)
        outcome = await client.ask(body(prompt="x", max_tokens=8, stream=True))

The client is no HTTP library: one request is one write, its answer is looked at only as far as its
times and its end need, connections are kept for the next request. So it costs a fraction of what
the server spends, and 10 x the capacity can be offered from one core.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import uvloop

from loadtests.host.child_processes import Child
from models.isolated import python_path
from serving.hardware.cpu_topology import parse_cores

T = TypeVar("T")
_END_OF_CHUNKS = b"0\r\n\r\n"


@dataclass
class Server:
    """A `crossover serve` that is ready."""

    port: int
    api: int  # process ids
    engine: int
    child: Child

    def log(self) -> str:
        return self.child.log.read_text()


@contextmanager
def serving(
    model: str, *arguments: str, folder: Path, ready_seconds: float = 120.0
) -> Iterator[Server]:
    """`crossover serve MODEL ...` on a free port; ends it after the block.

    Raises RuntimeError where it does not start.
    """
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "serving",
        model,
        "--port",
        "0",
        "--ready-file",
        str(ready),
        *arguments,
    ]
    with Child(
        command, log=folder / "server.log", environment={"PYTHONPATH": python_path()}
    ) as child:
        until = time.monotonic() + ready_seconds
        while not ready.exists() and child.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if not ready.exists():
            raise RuntimeError(f"the server did not start: {child.log.read_text()}")
        about = json.loads(ready.read_text())
        yield Server(int(about["url"].rpartition(":")[2]), about["pid"], about["engine_pid"], child)


@contextmanager
def on_cores(cores: str) -> Iterator[None]:
    """This process on some cores, as `--cores` names them ("": all), so that it disturbs no others.

    For after the server's start, which would inherit it.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, parse_cores(cores) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(work: Coroutine[Any, Any, T]) -> T:
    async def whole() -> T:
        try:
            return await work
        finally:
            await asyncio.sleep(0.01)  # connections that were just closed are gone now

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(whole())


def post(path: str = "/v1/completions", *, raw: bytes | None = None, **fields: object) -> bytes:
    """One request as it goes over the wire."""
    content = json.dumps(fields).encode() if raw is None else raw
    return (
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        b"%d\r\n\r\n"
        % (
            path.encode(),
            len(content),
        )
        + content
    )


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are of the event loop's clock; missing is None."""

    due: float
    sent: float | None = None
    status: int | None = None
    # the first byte of the body: the first token, where the answer is streamed
    first: float | None = None
    last: float | None = None
    retry_after: float | None = None
    complete: bool = False  # the answer came to its proper end
    body: bytes = b""  # kept for answers that are not streamed

    @property
    def ttft(self) -> float | None:
        return None if self.first is None or self.status != 200 else self.first - self.due


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.transport: asyncio.Transport
        self.closed = False
        self._outcome: Outcome | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = b""
        self._left: int | None = None  # bytes of the body still to come; None: chunked
        self._tail = b""
        self._pieces: list[bytes] = []
        self.keep = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def send(self, data: bytes, outcome: Outcome) -> asyncio.Future[None]:
        self._outcome, self._head, self._left, self._tail, self._pieces = (
            outcome,
            b"",
            None,
            b"",
            [],
        )
        self._done = self.loop.create_future()
        self.transport.write(data)
        return self._done

    def data_received(self, data: bytes) -> None:
        outcome = self._outcome
        if outcome is None:
            return
        if outcome.status is None:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._read_head(head, outcome)
        if not data and self._left != 0:
            return
        if outcome.first is None:
            outcome.first = self.loop.time()
        if self._left is None:
            self._tail = (self._tail + data)[-16:]
            if self._tail.endswith(_END_OF_CHUNKS):
                outcome.complete = b"[DONE]" in self._tail
                self._finish()
        else:
            self._pieces.append(data)
            self._left -= len(data)
            if self._left <= 0:
                outcome.body, outcome.complete = b"".join(self._pieces), True
                self._finish()

    def _read_head(self, head: bytes, outcome: Outcome) -> None:
        lines = head.split(b"\r\n")
        for line in lines[1:]:
            name, _, value = line.partition(b": ")
            match name.lower():
                case b"content-length":
                    self._left = int(value)
                case b"retry-after-ms":
                    outcome.retry_after = int(value) / 1000
                case b"connection":
                    self.keep = value.lower() != b"close"
        outcome.status = int(lines[0][9:12])

    def _finish(self) -> None:
        assert self._outcome is not None
        self._outcome.last = self.loop.time()
        self._outcome = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._outcome is not None:
            self._finish()


class Client:
    """Sends requests over connections that it keeps."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[_Connection] = []
        self._loop = asyncio.get_running_loop()

    async def ask(self, data: bytes, due: float | None = None) -> Outcome:
        """One request to its end.

        `due`: when it should have left (the loop's clock); its times count from there.
        """
        outcome = Outcome(self._loop.time() if due is None else due)
        connection = await self.connection()
        outcome.sent = self._loop.time()
        try:
            await connection.send(data, outcome)
        except asyncio.CancelledError:
            connection.transport.abort()
            raise
        if connection.keep and not connection.closed:
            self._idle.append(connection)
        else:
            connection.transport.close()
        return outcome

    async def connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and not connection.transport.is_closing():
                return connection
        _, made = await self._loop.create_connection(
            lambda: _Connection(self._loop), "127.0.0.1", self._port
        )
        return made

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()


@dataclass(frozen=True)
class Held:
    """What a process holds and has used. Sizes in bytes, CPU in seconds since it started."""

    rss_bytes: int
    # of RSS what no other process shares: shared libraries' pages come and go with other processes
    private_bytes: int
    descriptors: int
    threads: int
    cpu_seconds: float


def held(pid: int) -> Held:
    process = psutil.Process(pid)
    memory, times = process.memory_full_info(), process.cpu_times()
    return Held(
        memory.rss, memory.uss, process.num_fds(), process.num_threads(), times.user + times.system
    )


async def metrics(client: Client) -> dict[str, float]:
    """The server's own numbers, summed over labels; without histograms' buckets."""
    found: dict[str, float] = {}
    for line in (await client.ask(get("/metrics"))).body.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if line and not line.startswith("#") and "_bucket{" not in name:
            key = name.partition("{")[0]
            found[key] = found.get(key, 0.0) + float(value)
    return found


async def until_idle(client: Client, seconds: float = 60.0) -> dict[str, float]:
    """Waits until nothing is in flight but the question; the numbers then.

    Raises RuntimeError where that does not come to pass.
    """
    until = time.monotonic() + seconds
    while True:
        found = await metrics(client)
        busy = [
            found[f"crossover_{name}"] for name in ("num_requests_running", "num_requests_waiting")
        ]
        if found["crossover_http_requests_open"] == 1 and not any(busy):
            return found
        if time.monotonic() > until:
            raise RuntimeError(
                f"still busy after {seconds:g} s: {busy} running and waiting, "
                f"{found['crossover_http_requests_open']} open"
            )
        await asyncio.sleep(0.05)


def mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
