"""A streaming endpoint with known truth: it remembers when it did what it was told to do.

    python -m loadtests.selftest.reference_server '{"slots": 4}'        # prints its port
    python -m loadtests.selftest.reference_server '{"slots": 8, "law": {"base_seconds": 0.005}}'

GET /truth returns for each request id when it arrived, when each content chunk was written, and
its status, on CLOCK_MONOTONIC, which all processes share. One thread and a kernel timer: the truth
is exact to some 50 us. It has no model, answers "ab", and every answer is a stream.

Without a law each answer has its own chunks at their times. With one, requests are batched as an
engine does: steps whose length the law says, one token a step to each that decodes.
"""

from __future__ import annotations

import asyncio
import heapq
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
    usage: bool = True  # token counts at the end of a stream, and beside every chunk
    done: bool = True
    slots: int = 1_000_000
    # requests that may wait for a slot; more are answered with 429. None: any number
    waiting: int | None = None
    refuse: tuple[str, ...] = ()  # body fields that are answered with 400
    tokenizer: str | None = "vllm"
    key: str | None = None
    case: str = ""  # nothing but a name: servers of different cases share no log
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
    """Slots, a queue, moments, and the account of what happened."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.log: dict[str, dict[str, Any]] = {}
        self._busy = 0
        self._waiting: deque[Stream] = deque()
        self._batch = Batch(truth, clock()) if truth.law is not None else None
        self._moments: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._alarm = Alarm()

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._alarm.fd, self._ring)
        listening = await loop.create_server(lambda: Connection(self), "127.0.0.1", 0, backlog=4096)
        print(listening.sockets[0].getsockname()[1], flush=True)
        await listening.serve_forever()

    def at(self, moment: float, what: Callable[[], None]) -> None:
        """Calls `what` at `moment` on `clock`."""
        self._order += 1
        heapq.heappush(self._moments, (moment, self._order, what))
        if self._moments[0][1] == self._order:
            self._alarm.set(moment)

    def _ring(self) -> None:
        while self._moments and self._moments[0][0] <= clock():
            heapq.heappop(self._moments)[2]()
        if self._moments:
            self._alarm.set(self._moments[0][0])
        else:
            self._alarm.stop()

    def enter(self, stream: Stream) -> bool:
        """A slot, or a place in the queue. False: the queue is full."""
        if (batch := self._batch) is not None:
            batch.waiting.append(stream)
            if batch.ends is None:
                batch.begin(clock())
                self._await_step(batch)
            return True
        if self._busy < self.truth.slots:
            self._busy += 1
            stream.begin()
            return True
        self._waiting = deque(other for other in self._waiting if not other.is_over)
        if self.truth.waiting is not None and len(self._waiting) >= self.truth.waiting:
            return False
        self._waiting.append(stream)
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
        self._busy -= 1
        while self._waiting:
            stream = self._waiting.popleft()
            if not stream.is_over:
                self._busy += 1
                stream.begin()
                return


class Connection(asyncio.Protocol):
    """One client's connection: requests in, answers out, one at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.transport: Any = None
        self.stream: Stream | None = None
        self._in = bytearray()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, problem: Exception | None) -> None:
        if self.stream is not None:
            self.stream.end(False)

    def data_received(self, data: bytes) -> None:
        self._in += data
        self.take(clock())

    def take(self, arrived: float) -> None:
        """Acts on each request that is here in full."""
        while self.stream is None and (end := self._in.find(b"\r\n\r\n")) >= 0:
            first, *lines = self._in[:end].decode("latin-1").split("\r\n")
            pairs = [line.partition(":") for line in lines]
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            whole = end + 4 + int(headers.get("content-length", 0))
            if len(self._in) < whole:
                return
            body = bytes(self._in[end + 4 : whole])
            del self._in[:whole]
            method, path, _ = first.split(" ")
            self._act(method, path, headers, body, arrived)

    def _answer(self, status: int, body: Any) -> None:
        data = json_bytes(body)
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n"
        self.transport.write(head.encode() + data)

    def _act(
        self, method: str, path: str, headers: dict[str, str], body: bytes, arrived: float
    ) -> None:
        truth = self.server.truth
        if truth.key and headers.get("authorization") != f"Bearer {truth.key}":
            self._answer(401, {"error": {"message": "no"}})
        elif path == "/truth":
            self._answer(200, self.server.log)
        elif path == "/metrics" or (path == "/tokenize" and truth.tokenizer is None):
            self._answer(404, {})
        elif method == "GET":
            self._answer(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif path == "/tokenize":
            asked = msgspec.json.decode(body)
            words = asked.get("prompt" if truth.tokenizer == "vllm" else "content", "").split()
            self._answer(200, {"tokens": [len(word) for word in words], "count": len(words)})
        else:
            self._complete(path, msgspec.json.decode(body), arrived)

    def _complete(self, path: str, body: dict[str, Any], arrived: float) -> None:
        server = self.server
        truth = server.truth
        if "truth" in body:
            truth = msgspec.convert(msgspec.to_builtins(truth) | body["truth"], Truth)
        number = len(server.log) + 1
        entry = server.log[f"request-{number}"] = {"arrived": arrived, "chunks": [], "status": 200}
        fields = body.keys() | (body.get("stream_options") or {}).keys()
        is_failing = number > truth.fail_after and number % truth.fail_every == 0
        fail = (truth.fail or "") if is_failing else ""
        stream = Stream(self, truth, path, body, fail, number, entry)
        if fail == "slam":
            entry["status"] = 0
            self.transport.abort()
            return
        if fields & set(truth.refuse):
            entry["status"] = 400
        elif fail.startswith("status:"):
            entry["status"] = int(fail[7:])
        else:
            self.stream = stream
            if server.enter(stream):
                return
            self.stream = None
            entry["status"] = 429
        self._answer(entry["status"], {"error": {"message": "as told"}})


class Stream:
    """One answer on its way."""

    def __init__(
        self,
        client: Connection,
        truth: Truth,
        path: str,
        body: dict[str, Any],
        fail: str,
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
        prompt = body.get("prompt")
        if self._is_chat:
            prompt = " ".join(str(one.get("content")) for one in body["messages"])
        self.prompt_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt or [])
        self._options = (body.get("stream_options") or {}) if truth.usage else {}
        self._sent = 0
        self._has_slot = False
        self._first = 0.0  # when the first chunk is due
        self._stalled = 0.0
        entry["body"] = {key: value for key, value in body.items() if key != "prompt"}
        if truth.echo:
            entry["prompt"] = prompt

    def begin(self) -> None:
        """It has a slot now, where there is no Batch."""
        self._has_slot = True
        if self._fail != "hang":
            self._first = clock() + self._truth.ttft
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

    def write(self) -> None:
        """The next chunk, and the end of the answer behind the last."""
        if self.is_over or self._fail == "hang":
            return
        truth, chunks = self._truth, self._entry["chunks"]
        out = b""
        if not chunks:
            out = (
                "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                f"Transfer-Encoding: chunked\r\nX-Request-Id: request-{self._number}\r\n\r\n"
            ).encode()
            if self._is_chat:
                out += self._event(self._choice("", role="assistant"))
        if self._fail != "no_content":
            tokens = min(truth.chunk_tokens, self.output_tokens - self._sent)
            self._sent += tokens
            counts = self._usage() if self._options.get("continuous_usage_stats") else {}
            word = f"w{self._number} " if truth.echo else "ab "
            out += self._event(self._choice(word * tokens) | counts)
            if not chunks:
                self._entry["first_tokens"] = tokens
            self._entry["tokens"] = self._sent
            chunks.append(clock())
        breaks = self._fail in ("cut", "error", "garbage") and self._sent >= self.output_tokens / 2
        if not (breaks or self._fail == "no_content" or self._sent >= self.output_tokens):
            self._client.transport.write(out)
            return
        is_cut = self._fail == "cut"
        self._client.transport.write(out if is_cut else out + self._last())
        self.end(not is_cut)
        if is_cut:
            self._client.transport.close()

    def _last(self) -> bytes:
        """The end of the answer, as it was told to be."""
        out = b""
        if self._fail == "error":
            out += self._event({"error": {"message": "as told"}})
        elif self._fail == "garbage":
            out += self._chunk(b"data: {nonsense\n\n")
        is_done = self._truth.done and self._fail != "error"
        if is_done:
            out += self._event(self._choice("", finish="length"))
        if self._options.get("include_usage"):
            out += self._event({"model": MODEL, "choices": []} | self._usage())
        if is_done:
            out += self._chunk(b"data: [DONE]\n\n")
        return out + b"0\r\n\r\n"

    def end(self, whole: bool) -> None:
        """It is over: whole, cut off, or its client has gone."""
        if not self.is_over:
            self.is_over = True
            self._entry["whole"] = whole
            if self._has_slot:
                self._client.server.leave()
            if whole:
                self._client.stream = None
                self._client.take(clock())

    def _usage(self) -> dict[str, Any]:
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self._sent}
        return {"usage": counts | {"total_tokens": self.prompt_tokens + self._sent}}

    def _choice(
        self, text: str, role: str | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self._is_chat:
            said = {"delta": ({"role": role} if role else {}) | {"content": text}}
        choice = {"index": 0, "finish_reason": finish} | said
        return {"id": f"request-{self._number}", "model": MODEL, "choices": [choice]}

    def _event(self, body: dict[str, Any]) -> bytes:
        return self._chunk(b"data: " + json_bytes(body) + b"\n\n")

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data)


def main() -> None:
    truth = msgspec.json.decode(sys.argv[1], type=Truth) if len(sys.argv) > 1 else Truth()
    try:
        asyncio.run(Server(truth).run())
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
