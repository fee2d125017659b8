"""A streaming endpoint with known truth: it remembers when it did what it was told to do.

    python -m loadtests.selftest.reference_server '{"slots": 4}'        # prints its port
    python -m loadtests.selftest.reference_server '{"slots": 8, "law": {"base_seconds": 0.005}}'

GET /truth returns for each request id when it arrived, when each content chunk was written, and
its status, on CLOCK_MONOTONIC, which all processes share. One thread over epoll and a kernel
timer: the truth is exact to some 20 us. It has no model and answers "ab".

Without a law each answer has its own chunks at their times. With one, requests are batched as an
engine does: steps whose length the law says, one token a step to each that decodes.
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

from loadtests.host.precise_timer import Alarm
from loadtests.simulation.step_law import StepLaw

clock = time.perf_counter
MODEL = "true-model"
STEP_TOKENS = 2048  # most prompt tokens of a step in which nobody decodes
json_bytes = msgspec.json.Encoder().encode


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the server does, unless a request's `truth` says otherwise. Times in seconds."""

    ttft: float = 0.02  # from having a slot to the first chunk
    gap: float = 0.005  # between chunks
    chunk_tokens: int = 1
    stall_at: int | None = None  # before this chunk ...
    stall: float = 0.0  # ... this much longer ...
    stall_every: int = 1  # ... in one of so many requests
    fail: str | None = None  # cut | error | garbage | no_content | status:NNN | hang | slam
    fail_every: int = 1  # one of so many requests fails
    fail_after: int = 0  # requests before the first that fails
    usage: bool = True
    continuous: bool = True
    done: bool = True
    slots: int = 1_000_000
    # requests that may wait for a slot; more are answered with 429. None: any number
    waiting: int | None = None
    refuse: tuple[str, ...] = ()  # body fields that are answered with 400
    tokenizer: str | None = "vllm"
    key: str | None = None
    # a request whose client has gone gives its slot back; else it is served to its end
    cancels: bool = True
    case: str = ""  # nothing but a name: servers of different cases share no log
    headers_first: bool = False  # send the headers at once, the first chunk at its time
    # request 7 is answered "w7 w7 ...", not "ab": shows which turn was sent back
    echo: bool = False
    law: StepLaw | None = None  # of continuous batching; None: ttft and gap
    prefill_tokens: int = 256  # most prompt tokens of a step in which somebody decodes
    whole_prompts: bool = False  # while prompts are computed nobody decodes
    speeds: tuple[tuple[float, float], ...] = ()  # (seconds, factor of all steps), repeated
    pause_every: float = 0.0  # seconds between moments at which ...
    pause: float = 0.0  # ... a step takes so much longer; 0: none does


class Batch:
    """Continuous batching by a law: sequences wait, have their prompt computed, decode.

    The owner calls `begin(now)` when it is idle and somebody waits, and `end()` at `ends`.
    """

    def __init__(self, truth: Truth, started: float) -> None:
        self.waiting: deque[Stream] = deque()
        self.ends: float | None = None  # of the step under way; None: idle
        self._truth = truth
        self._started = started
        self._paused = started
        self._filling: list[Stream] = []  # oldest first
        self._decoding: list[Stream] = []
        self._rows: list[Stream] = []
        self._pieces: list[tuple[Stream, int]] = []

    def begin(self, now: float) -> None:
        """A step with what is there; idle where that is nothing."""
        truth, law = self._truth, self._truth.law
        assert law is not None
        self._filling = [one for one in self._filling if not one.is_over]
        self._decoding = [one for one in self._decoding if not one.is_over]
        while self.waiting and len(self._filling) + len(self._decoding) < truth.slots:
            if not (one := self.waiting.popleft()).is_over:
                one.left = one.prompt_tokens
                self._filling.append(one)
        self.ends = None
        if not self._filling and not self._decoding:
            return
        self._rows = [] if truth.whole_prompts and self._filling else self._decoding
        room = truth.prefill_tokens if self._rows else STEP_TOKENS
        self._pieces = []
        for one in self._filling:
            if room > 0:
                self._pieces.append((one, min(one.left, room)))
                room -= self._pieces[-1][1]
        seconds = law.seconds(
            rows=len(self._rows),
            prompt_tokens=sum(piece for _, piece in self._pieces),
            context_tokens=sum(one.prompt_tokens + one.made for one in self._rows),
            passes=len(self._pieces) + bool(self._rows),
        )
        if truth.speeds:
            into = (now - self._started) % sum(length for length, _ in truth.speeds)
            for length, factor in truth.speeds:
                if into < length:
                    seconds *= factor
                    break
                into -= length
        if truth.pause and now - self._paused >= truth.pause_every:
            self._paused = now
            seconds += truth.pause
        self.ends = now + seconds

    def end(self) -> list[Stream]:
        """The step is over and the next one begins: who has a token now."""
        assert self.ends is not None
        answered = list(self._rows)
        for one, piece in self._pieces:
            one.left -= piece
            if not one.left:
                self._filling.remove(one)
                self._decoding = [*self._decoding, one]
                answered.append(one)
        for one in answered:
            one.made += 1
        self._decoding = [one for one in self._decoding if one.made < one.output_tokens]
        self.begin(self.ends)
        return answered


class Server:
    """The loop: sockets and moments in, bytes and stamps out."""

    def __init__(self, truth: Truth, host: str = "127.0.0.1", port: int = 0) -> None:
        self.truth = truth
        self.log: dict[str, dict[str, Any]] = {}
        self.requests = 0
        self.busy = 0
        self.waiting: deque[Stream] = deque()
        self._batch = Batch(truth, clock()) if truth.law is not None else None
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
        if (batch := self._batch) is not None:
            batch.waiting.append(stream)
            if batch.ends is None:
                batch.begin(clock())
                self._await_step(batch)
            return True
        if self.busy < self.truth.slots:
            self.busy += 1
            stream.begin()
            return True
        self.waiting = deque(other for other in self.waiting if not other.is_over)
        if self.truth.waiting is not None and len(self.waiting) >= self.truth.waiting:
            return False
        self.waiting.append(stream)
        return True

    def _await_step(self, batch: Batch) -> None:
        def step() -> None:
            for stream in batch.end():
                stream.write()
            self._await_step(batch)

        if batch.ends is not None:
            self.at(batch.ends, step)

    def leave(self) -> None:
        """A slot is free."""
        self.busy -= 1
        while self.waiting:
            stream = self.waiting.popleft()
            if not stream.is_over:
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

    def answer(self, status: int, body: Any, more: str = "") -> None:
        data = json_bytes(body)
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
            if self.stream is not None and self.server.truth.cancels:
                self.stream.end(False)

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
        elif path == "/metrics":
            self.answer(404, {})
        elif method == "GET":
            model = {"id": MODEL, "object": "model", "max_model_len": 4096}
            self.answer(200, {"object": "list", "data": [model]})
        elif path == "/tokenize" and truth.tokenizer is None:
            self.answer(404, {})
        elif path == "/tokenize":
            asked = msgspec.json.decode(body)
            words = asked.get("prompt" if truth.tokenizer == "vllm" else "content", "").split()
            tokens = [sum(word.encode()) % 1000 for word in words]
            self.answer(200, {"tokens": tokens, "count": len(words)})
        else:
            self._complete(path, msgspec.json.decode(body), arrived)
        if self.stream is None and self._last:
            self.close()

    def _complete(self, path: str, body: dict[str, Any], arrived: float) -> None:
        server = self.server
        truth = server.truth
        if "truth" in body:
            truth = msgspec.convert(msgspec.to_builtins(truth) | body["truth"], Truth)
        server.requests += 1
        number = server.requests
        entry = {"arrived": arrived, "chunks": [], "status": 200}
        server.log[f"request-{number}"] = entry
        fields = body.keys() | (body.get("stream_options") or {}).keys()
        refused = next((key for key in truth.refuse if key in fields), None)
        is_failing = number > truth.fail_after and number % truth.fail_every == 0
        fail = truth.fail if is_failing else None
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
            self.stream = Stream(self, truth, path, body, fail, number, entry)
            if not server.enter(self.stream):
                self.stream = None
                entry["status"] = 429
                self.answer(429, {"error": {"message": "the queue is full"}}, "Retry-After: 1\r\n")


class Stream:
    """One answer on its way."""

    def __init__(
        self,
        client: Connection,
        truth: Truth,
        path: str,
        body: dict[str, Any],
        fail: str | None,
        number: int,
        entry: dict[str, Any],
    ) -> None:
        self.is_over = False
        self.made = 0  # steps of a Batch that gave it a token
        self.left = 0  # prompt tokens that a Batch has still to compute
        self._client = client
        self._truth = truth
        self._fail = fail
        self._number = number
        self._entry = entry
        self._is_chat = path.endswith("chat/completions")
        self.output_tokens = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        self._streams = bool(body.get("stream"))
        prompt = body.get("prompt")
        if self._is_chat:
            prompt = " ".join(str(one.get("content")) for one in body["messages"])
        self.prompt_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt or [])
        options = body.get("stream_options") or {}
        self._usage_each = truth.continuous and bool(options.get("continuous_usage_stats"))
        self._usage_last = truth.usage and (bool(options.get("include_usage")) or not self._streams)
        self._sent = 0
        self._has_slot = False
        self._started = False  # the headers have left
        self._first = 0.0  # when the first chunk is due
        self._stalled = 0.0
        entry["body"] = {key: value for key, value in body.items() if key != "prompt"}
        if truth.echo:
            entry["prompt"] = prompt

    def begin(self) -> None:
        """It has a slot now, where there is no Batch."""
        self._has_slot = True
        self._entry["began"] = now = clock()
        if self._fail == "hang":
            return
        if self._truth.headers_first and self._streams:
            self._client.send(self._head())
        self._first = now + self._truth.ttft
        self._client.server.at(self._first, self._step)

    def _step(self) -> None:
        """Writes one chunk and says when the next is due."""
        truth = self._truth
        self.write()
        if self.is_over:
            return
        written = len(self._entry["chunks"])
        if written == truth.stall_at and self._number % truth.stall_every == 0:
            self._stalled = truth.stall
        due = self._first + written * truth.gap + self._stalled
        self._client.server.at(due, self._step)

    def _head(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return (
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            f"X-Request-Id: request-{self._number}\r\n\r\n"
        ).encode()

    def write(self) -> None:
        """The next chunk, and the end of the answer behind the last."""
        if self.is_over or self._fail == "hang":
            return
        truth, chunks = self._truth, self._entry["chunks"]
        out = b""
        if self._streams:
            out = self._head()
            if not chunks and self._is_chat:
                out += _event(self._choice("", role=True))
        if self._fail == "no_content":
            self._last(out)
            return
        tokens = min(truth.chunk_tokens, self.output_tokens - self._sent)
        self._sent += tokens
        if self._streams:
            out += _event(
                self._choice(self._words(tokens), usage=self._usage() if self._usage_each else None)
            )
        failing = self._fail in ("cut", "error", "garbage") and self._sent >= self.output_tokens / 2
        if not chunks:
            self._entry["first_tokens"] = tokens
        self._entry["tokens"] = self._sent
        chunks.append(clock())
        if failing or self._sent >= self.output_tokens:
            self._last(out)
        elif self._streams:
            self._client.send(out)

    def _last(self, out: bytes) -> None:
        """The end of the answer, as it was told to be; `out` goes before it."""
        done = self._truth.done and self._fail != "error"
        if self._fail == "cut":
            self._client.send(out)
            self.end(False)
            self._client.close()
            return
        if not self._streams:
            body = self._choice(self._words(self._sent), finish="length", usage=self._usage())
            self._client.answer(200, body)
            self.end(True)
            return
        if self._fail == "error":
            out += _event({"error": {"message": "as told"}})
        elif self._fail == "garbage":
            out += _chunk(b"data: {nonsense\n\n")
        if done:
            out += _event(self._choice("", finish="length"))
        if self._usage_last:
            out += _event({"model": MODEL, "choices": [], "usage": self._usage()})
        if done:
            out += _chunk(b"data: [DONE]\n\n")
        self._client.send(out + b"0\r\n\r\n")
        self.end(True)

    def end(self, whole: bool) -> None:
        """It is over: whole, cut off, or its client has gone."""
        if not self.is_over:
            self.is_over = True
            self._entry["whole"] = whole
            if self._has_slot:
                self._client.server.leave()
            if whole and not self._client.gone:
                self._client.ended()

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self._sent,
            "total_tokens": self.prompt_tokens + self._sent,
        }

    def _words(self, tokens: int) -> str:
        return (f"w{self._number} " if self._truth.echo else "ab ") * tokens

    def _choice(
        self,
        text: str,
        role: bool = False,
        finish: str | None = None,
        usage: dict[str, int] | None = None,
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self._is_chat and self._streams:
            said = {"delta": {"role": "assistant", "content": text} if role else {"content": text}}
        elif self._is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        body: dict[str, Any] = {"id": f"request-{self._number}", "created": 0, "model": MODEL}
        body["choices"] = [{"index": 0, "finish_reason": finish} | said]
        if usage is not None:
            body["usage"] = usage
        return body


def _event(body: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + json_bytes(body) + b"\n\n")


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
