"""A streaming endpoint with known truth: it does what each request's `truth` field says and remembers when it did it.

    python -m loadtests.truth_server '{"slots": 4}'        # prints its port

GET /truth returns, for each request id, when the request arrived, when each content chunk was written and with what status it was answered,
on the clock that all processes of a machine share (CLOCK_MONOTONIC), so that a client's stamps can be held against them one by one. It
is what `crossover selftest` measures, and what our own tests and the comparison with other load generators run against.

A process of its own, so that it does not share an interpreter with what it judges; one thread over epoll and a kernel timer, with no
framework between a stamp and its send, so that the truth is exact to some 20 us. Not a model server: it has no model and answers "ab".
"""

from __future__ import annotations

import heapq
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from loadtests.alarm import Alarm

clock = time.perf_counter
MODEL = "true-model"
_json = msgspec.json.Encoder().encode


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the server does, unless a request's `truth` says otherwise. Times in seconds."""

    ttft: float = 0.02  # from having a slot to the first chunk
    gap: float = 0.005  # between chunks
    chunk_tokens: int = 1
    stall_at: int | None = None  # before this chunk ...
    stall: float = 0.0  # ... this much longer ...
    stall_every: int = 1  # ... in every so manieth request
    fail: str | None = None  # cut | error | garbage | no_content | status:NNN | hang | slam
    fail_every: int = 1  # so many requests for one that fails
    usage: bool = True
    continuous: bool = True
    done: bool = True
    slots: int = 1_000_000
    waiting: int | None = None  # requests that may wait for a slot; more are answered with 429. None: any number
    refuse: tuple[str, ...] = ()  # body fields that are answered with 400
    tokenizer: str | None = "vllm"
    key: str | None = None
    cancels: bool = True  # a request whose client has gone gives its slot back; else it is served to its end
    case: str = ""  # nothing but a name: servers of different cases share no log
    headers_first: bool = False  # send the headers at once, the first chunk at its time
    echo: bool = False  # the answer's words are w0 w1 w2 ... of the request's number, not "ab": a conversation can be followed


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
        data = _json(body)
        more = "Retry-After: 1\r\n" if retry else ""
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{more}Content-Length: {len(data)}\r\n\r\n"
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
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            whole = end + 4 + int(headers.get("content-length", 0))
            if len(self._in) < whole:
                return
            body = bytes(self._in[end + 4 : whole])
            del self._in[:whole]
            method, path, _ = first.split(" ")
            self._last = headers.get("connection", "").lower() == "close"
            self._act(method, path.partition("?")[0], headers, body, arrived)

    def _act(self, method: str, path: str, headers: dict[str, str], body: bytes, arrived: float) -> None:
        truth = self.server.truth
        if truth.key and headers.get("authorization") != f"Bearer {truth.key}":
            self.answer(401, {"error": {"message": "no"}})
        elif path == "/truth":
            self.answer(200, self.server.log)
        elif method == "GET":
            self.answer(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}]})
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
            self.answer(200, {"tokens": [sum(word.encode()) % 1000 for word in words], "count": len(words)})

    def _complete(self, path: str, body: dict[str, Any], arrived: float) -> None:
        server = self.server
        truth = server.truth
        if "truth" in body:
            truth = msgspec.convert(msgspec.to_builtins(truth) | body["truth"], Truth)
        server.requests += 1
        name = f"request-{server.requests}"
        entry = server.log[name] = {"arrived": arrived, "chunks": [], "status": 200, "body": body}
        refused = next((key for key in truth.refuse if key in body or key in (body.get("stream_options") or {})), None)
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
            self.stream = Stream(self, path, body, truth, fail, name, server.requests, entry)
            if not server.enter(self.stream):
                self.stream = None
                entry["status"] = 429
                self.answer(429, {"error": {"message": "the queue is full"}}, retry=True)


class Stream:
    """One answer on its way."""

    def __init__(
        self, connection: Connection, path: str, body: dict[str, Any], truth: Truth, fail: str | None, name: str, number: int, entry: Any
    ) -> None:
        self._connection, self._truth, self._fail, self._entry, self._name, self._number = connection, truth, fail, entry, name, number
        self._chat = path.endswith("chat/completions")
        self._asked = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        self._streams = bool(body.get("stream"))
        prompt = body.get("prompt") if not self._chat else " ".join(str(one.get("content")) for one in body["messages"])
        self._prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt or [])
        options = body.get("stream_options") or {}
        self._usage_each = truth.continuous and bool(options.get("continuous_usage_stats"))
        self._usage_last = truth.usage and (bool(options.get("include_usage")) or not self._streams)
        self._sent = 0
        self._started = False  # the headers have left
        self._over = False
        self._first = 0.0  # when the first chunk is due
        self._stalled = 0.0
        entry["body"] = {key: value for key, value in body.items() if key != "prompt"}
        if truth.echo:
            entry["prompt"] = prompt

    def is_gone(self) -> bool:
        return self._connection.gone and self._truth.cancels

    def client_gone(self) -> None:
        """The client has closed the connection."""
        if self._truth.cancels and self._started_slot:
            self._end(False)

    _started_slot = False  # it has a slot

    def begin(self) -> None:
        """It has a slot now."""
        server = self._connection.server
        self._started_slot = True
        self._entry["began"] = now = clock()
        if self._fail == "hang":
            return
        if self._truth.headers_first and self._streams:
            self._connection.send(self._head())
        self._first = now + self._truth.ttft
        server.at(self._first, self._step)

    def _head(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return (
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            f"X-Request-Id: {self._name}\r\n\r\n"
        ).encode()  # fmt: skip

    def _step(self) -> None:
        """Writes one chunk and says when the next is due."""
        if self._over:
            return
        truth, chunks = self._truth, self._entry["chunks"]
        out = b""
        if self._streams:
            out = self._head()
            if not chunks and self._chat:
                out += _event(self._choice("", role=True))
        if self._fail == "no_content":
            self._last(out)
            return
        tokens = min(truth.chunk_tokens, self._asked - self._sent)
        self._sent += tokens
        if self._streams:
            out += _event(self._choice(self._words(tokens), usage=self._usage() if self._usage_each else None))
        failing = self._fail in ("cut", "error", "garbage") and self._sent >= self._asked / 2
        if not chunks:
            self._entry["first_tokens"] = tokens
        self._entry["tokens"] = self._sent
        chunks.append(clock())
        if failing or self._sent >= self._asked:
            self._last(out)
            return
        if self._streams:
            self._connection.send(out)
        if len(chunks) == truth.stall_at and self._number % truth.stall_every == 0:
            self._stalled = truth.stall
        self._connection.server.at(self._first + len(chunks) * truth.gap + self._stalled, self._step)

    def _last(self, out: bytes) -> None:
        """The end of the answer, as it was told to be; `out` goes before it."""
        done = self._truth.done and self._fail != "error"
        if self._fail == "cut":
            self._connection.send(out)
            self._connection.close()
            self._end(False)
            return
        if not self._streams:
            self._connection.answer(200, self._choice(self._words(self._sent), finish="length", usage=self._usage()))
            self._end(True)
            return
        if self._fail == "error":
            out += _event({"error": {"message": "as told"}})
        elif self._fail == "garbage":
            out += _chunk(b"data: {nonsense\n\n")
        if done:
            out += _event(self._choice("", finish="length"))
        if self._usage_last:
            out += _event({"id": self._name, "object": "usage", "model": MODEL, "choices": [], "usage": self._usage()})
        if done:
            out += _chunk(b"data: [DONE]\n\n")
        self._connection.send(out + b"0\r\n\r\n")
        self._end(True)

    def _end(self, whole: bool) -> None:
        if not self._over:
            self._over = True
            self._entry["whole"] = whole
            self._connection.server.leave()
            if whole and not self._connection.gone:
                self._connection.ended()

    def _usage(self) -> dict[str, int]:
        return {"prompt_tokens": self._prompt, "completion_tokens": self._sent, "total_tokens": self._prompt + self._sent}

    def _words(self, tokens: int) -> str:
        if self._truth.echo:
            return "".join(f"w{self._number} " for _ in range(tokens))
        return "ab " * tokens

    def _choice(self, text: str, role: bool = False, finish: str | None = None, usage: dict[str, int] | None = None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text} if role or not self._streams else {"content": text}
        said: dict[str, Any] = {"delta" if self._streams else "message": message} if self._chat else {"text": text}
        kind = ("chat.completion" + (".chunk" if self._streams else "")) if self._chat else "text_completion"
        body: dict[str, Any] = {"id": self._name, "object": kind, "created": 0, "model": MODEL}
        body["choices"] = [{"index": 0, "finish_reason": finish} | said]
        if usage is not None:
            body["usage"] = usage
        return body


def _event(body: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + _json(body) + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


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
