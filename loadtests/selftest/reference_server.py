"""A streaming endpoint with known truth: it remembers when it did what it was told to do.

    python -m loadtests.selftest.reference_server '{"slots": 4}'        # prints its port

GET /truth returns for each request id when it arrived, when each content chunk was written, and
its status, on CLOCK_MONOTONIC, which all processes share. One thread over epoll and a kernel
timer: the truth is exact to some 20 us. It has no model and answers "ab".
"""

from __future__ import annotations

import heapq
import select
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from loadtests.host.timerfd import Alarm
from loadtests.selftest.reference_stream import MODEL, Asked, Stream, Truth, clock, json_bytes


class Server:
    """The loop: sockets and moments in, bytes and stamps out."""

    def __init__(self, truth: Truth, host: str = "127.0.0.1", port: int = 0) -> None:
        self.truth = truth
        self.log: dict[str, dict[str, Any]] = {}
        self.requests = 0
        self.busy = 0
        self.waiting: deque[Stream] = deque()
        self._moments: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._alarm = Alarm()
        self._epoll = select.epoll()
        self._listener = socket.create_server((host, port), backlog=4096)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._connections: dict[int, Connection] = {}
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._epoll.register(self._alarm.fd, select.EPOLLIN)

    def at(self, moment: float, what: Callable[[], None]) -> None:
        """Calls `what` at `moment` on `clock`."""
        self._order += 1
        heapq.heappush(self._moments, (moment, self._order, what))

    def run(self) -> None:
        """For ever."""
        armed = 0.0
        while True:
            if self._moments and self._moments[0][0] != armed:
                armed = self._moments[0][0]
                self._alarm.set(armed)
            for fd, event in self._epoll.poll():
                if fd == self._alarm.fd:
                    armed = 0.0
                    self._alarm.stop()
                    while self._moments and self._moments[0][0] <= clock():
                        heapq.heappop(self._moments)[2]()
                elif fd == self._listener.fileno():
                    self._accept()
                elif (connection := self._connections.get(fd)) is not None:
                    connection.ready(event)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[sock.fileno()] = Connection(self, sock)
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def want_writes(self, fd: int, wanted: bool) -> None:
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def forget(self, fd: int) -> None:
        if self._connections.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def enter(self, stream: Stream) -> bool:
        """A slot, or a place in the queue. False: the queue is full."""
        if self.busy < self.truth.slots:
            self.busy += 1
            stream.begin()
            return True
        self.waiting = deque(other for other in self.waiting if not other.is_gone())
        if self.truth.waiting is not None and len(self.waiting) >= self.truth.waiting:
            return False
        self.waiting.append(stream)
        return True

    def leave(self) -> None:
        """A slot is free."""
        self.busy -= 1
        while self.waiting:
            stream = self.waiting.popleft()
            if not stream.is_gone():
                self.busy += 1
                stream.begin()
                return


class Connection:
    """One client's connection: requests in, answers out, one at a time."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.server = server
        self.gone = False
        self.stream: Stream | None = None
        self._sock = sock
        self._fd = sock.fileno()
        self._in = bytearray()
        self._out = bytearray()  # what the kernel did not take yet
        self._last = False  # the client wants no further answer on this connection

    def ready(self, event: int) -> None:
        if event & select.EPOLLOUT:
            self.send(b"")
        if event & ~select.EPOLLOUT:
            try:
                data = self._sock.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            self._in += data
            self._take(clock())

    def send(self, data: bytes) -> None:
        """All of it, now or as the kernel takes it."""
        if self.gone:
            return
        had = bool(self._out)
        self._out += data
        try:
            sent = self._sock.send(self._out)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        del self._out[:sent]
        if bool(self._out) != had:
            self.server.want_writes(self._fd, bool(self._out))

    def answer(self, status: int, body: Any, retry: bool = False) -> None:
        data = json_bytes(body)
        more = "Retry-After: 1\r\n" if retry else ""
        head = (
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
            f"{more}Content-Length: {len(data)}\r\n\r\n"
        )
        self.send(head.encode() + data)

    def close(self) -> None:
        if not self.gone:
            self.gone = True
            self.server.forget(self._fd)
            self._sock.close()
            if self.stream is not None:
                self.stream.client_gone()

    def ended(self) -> None:
        """The answer that was on its way is whole."""
        self.stream = None
        if self._last:
            self.close()
        elif self._in:
            self._take(clock())

    def _take(self, arrived: float) -> None:
        """Acts on each request that is here in full."""
        while self.stream is None and not self.gone:
            end = self._in.find(b"\r\n\r\n")
            if end < 0:
                return
            first, *lines = self._in[:end].decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines)
            }
            whole = end + 4 + int(headers.get("content-length", 0))
            if len(self._in) < whole:
                return
            body = bytes(self._in[end + 4 : whole])
            del self._in[:whole]
            method, path, _ = first.split(" ")
            self._last = headers.get("connection", "").lower() == "close"
            self._act(method, path.partition("?")[0], headers, body, arrived)

    def _act(
        self, method: str, path: str, headers: dict[str, str], body: bytes, arrived: float
    ) -> None:
        truth = self.server.truth
        if truth.key and headers.get("authorization") != f"Bearer {truth.key}":
            self.answer(401, {"error": {"message": "no"}})
        elif path == "/truth":
            self.answer(200, self.server.log)
        elif method == "GET":
            self.answer(
                200,
                {
                    "object": "list",
                    "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}],
                },
            )
        elif path == "/tokenize":
            self._tokenize(msgspec.json.decode(body))
        else:
            self._complete(path, msgspec.json.decode(body), arrived)
        if self.stream is None and self._last:
            self.close()

    def _tokenize(self, body: dict[str, Any]) -> None:
        kind = self.server.truth.tokenizer
        words = body.get("prompt" if kind == "vllm" else "content", "").split()
        if kind is None:
            self.answer(404, {})
        else:
            self.answer(
                200, {"tokens": [sum(word.encode()) % 1000 for word in words], "count": len(words)}
            )

    def _complete(self, path: str, body: dict[str, Any], arrived: float) -> None:
        server = self.server
        truth = server.truth
        if "truth" in body:
            truth = msgspec.convert(msgspec.to_builtins(truth) | body["truth"], Truth)
        server.requests += 1
        name = f"request-{server.requests}"
        entry = server.log[name] = {"arrived": arrived, "chunks": [], "status": 200, "body": body}
        refused = next(
            (
                key
                for key in truth.refuse
                if key in body or key in (body.get("stream_options") or {})
            ),
            None,
        )
        fail = truth.fail if server.requests % truth.fail_every == 0 else None
        if refused:
            entry["status"] = 400
            self.answer(400, {"error": {"message": f"unknown field {refused}"}})
        elif fail and fail.startswith("status:"):
            entry["status"] = int(fail[7:])
            self.answer(int(fail[7:]), {"error": {"message": "as told"}})
        elif fail == "slam":
            entry["status"] = 0
            self.close()
        else:
            asked = Asked(
                path=path,
                body=body,
                truth=truth,
                fail=fail,
                name=name,
                number=server.requests,
                entry=entry,
            )
            self.stream = Stream(self, server, asked)
            if not server.enter(self.stream):
                self.stream = None
                entry["status"] = 429
                self.answer(429, {"error": {"message": "the queue is full"}}, retry=True)


def main() -> None:
    truth = msgspec.json.decode(sys.argv[1], type=Truth) if len(sys.argv) > 1 else Truth()
    server = Server(truth)
    print(server.port, flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
