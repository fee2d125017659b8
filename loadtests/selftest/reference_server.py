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
import contextlib
import heapq
import sys
import time
from collections import deque
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
        self._slots = asyncio.Semaphore(truth.slots)
        self._waiting = 0
        self._batch = Batch(truth, clock())
        self._is_asked = asyncio.Event()
        self._moments: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = 0
        self._alarm = Alarm()

    async def run(self) -> None:
        """For ever."""
        asyncio.get_running_loop().add_reader(self._alarm.fd, self._ring)
        listening = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096)
        print(listening.sockets[0].getsockname()[1], flush=True)
        await (listening.serve_forever() if self.truth.law is None else self._compute())

    async def _compute(self) -> None:
        """The steps of the Batch."""
        batch = self._batch
        while True:
            self._is_asked.clear()
            batch.begin(clock())
            while batch.ends is not None:
                await self._until(batch.ends)
                for stream in batch.end():
                    stream.write()
            if not batch.waiting:
                await self._is_asked.wait()

    async def _until(self, moment: float) -> None:
        """`moment` on `clock`."""
        self._order += 1
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._moments, (moment, self._order, future))
        if self._moments[0][1] == self._order:
            self._alarm.set(moment)
        await future

    def _ring(self) -> None:
        while self._moments and self._moments[0][0] <= clock():
            future = heapq.heappop(self._moments)[2]
            if not future.done():
                future.set_result(None)
        if self._moments:
            self._alarm.set(self._moments[0][0])
        else:
            self._alarm.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection: requests in, answers out, one at a time."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                pairs = [line.partition(":") for line in lines]
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                key, path = headers.get("authorization", ""), first.split(" ")[1]
                if path.endswith("completions") and self.truth.key in (None, key[7:]):
                    await self._complete(path, msgspec.json.decode(body), clock(), reader, writer)
                else:
                    _answer(writer, *self._say(path, key, body))
        writer.close()

    def _say(self, path: str, key: str, body: bytes) -> tuple[int, Any]:
        truth = self.truth
        if truth.key and key != f"Bearer {truth.key}":
            return 401, {"error": {"message": "no"}}
        if path == "/truth":
            return 200, self.log
        if path == "/metrics" or (path == "/tokenize" and truth.tokenizer is None):
            return 404, {}
        if path == "/tokenize":
            asked = msgspec.json.decode(body)
            words = asked.get("prompt" if truth.tokenizer == "vllm" else "content", "").split()
            return 200, {"tokens": [len(word) for word in words], "count": len(words)}
        return 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    async def _complete(
        self,
        path: str,
        body: dict[str, Any],
        arrived: float,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        truth = self.truth
        if "truth" in body:
            truth = msgspec.convert(msgspec.to_builtins(truth) | body["truth"], Truth)
        number = len(self.log) + 1
        entry = self.log[f"request-{number}"] = {"arrived": arrived, "chunks": [], "status": 200}
        fields = body.keys() | (body.get("stream_options") or {}).keys()
        is_failing = number > truth.fail_after and number % truth.fail_every == 0
        fail = (truth.fail or "") if is_failing else ""
        stream = Stream(reader, writer, truth, path, body, fail, number, entry)
        if fail == "slam":
            entry["status"] = 0
            writer.transport.abort()
            return
        if fields & set(truth.refuse):
            entry["status"] = 400
        elif fail.startswith("status:"):
            entry["status"] = int(fail[7:])
        elif truth.waiting is not None and self._slots.locked() and self._waiting >= truth.waiting:
            entry["status"] = 429
        if entry["status"] != 200:
            _answer(writer, entry["status"], {"error": {"message": "as told"}})
        elif truth.law is not None:
            self._batch.waiting.append(stream)
            self._is_asked.set()
            await stream.over.wait()
        else:
            self._waiting += 1
            await self._slots.acquire()
            self._waiting -= 1
            try:
                await self._alone(stream)
            finally:
                self._slots.release()

    async def _alone(self, stream: Stream) -> None:
        """An answer with chunks at its own times."""
        if stream.fail == "hang":
            await stream.reader.read(1)
            return
        truth, stalled = stream.truth, 0.0
        first = clock() + truth.ttft
        written = 0
        while not stream.is_over:
            if written == truth.stall_at and stream.number % truth.stall_every == 0:
                stalled = truth.stall
            await self._until(first + written * truth.gap + stalled)
            stream.write()
            written += 1


class Stream:
    """One answer on its way."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        truth: Truth,
        path: str,
        body: dict[str, Any],
        fail: str,
        number: int,
        entry: dict[str, Any],
    ) -> None:
        self.reader, self.truth, self.fail, self.number = reader, truth, fail, number
        self.over = asyncio.Event()
        self.made = 0  # steps of a Batch that gave it a token
        self.left = 0  # prompt tokens that a Batch has still to compute
        self._writer = writer
        self._entry = entry
        self._is_chat = path.endswith("chat/completions")
        self.output_tokens = int(body.get("max_tokens") or 16)
        prompt = body.get("prompt")
        if self._is_chat:
            prompt = " ".join(str(one.get("content")) for one in body["messages"])
        self.prompt_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt or [])
        self._options = (body.get("stream_options") or {}) if truth.usage else {}
        self._sent = 0
        entry["body"] = {key: value for key, value in body.items() if key != "prompt"}
        if truth.echo:
            entry["prompt"] = prompt

    @property
    def is_over(self) -> bool:
        """Whole, cut off, or its client has gone."""
        return self.over.is_set() or self.reader.at_eof() or self._writer.is_closing()

    def write(self) -> None:
        """The next chunk, and the end of the answer behind the last."""
        if self.is_over:
            return
        truth, chunks, fail = self.truth, self._entry["chunks"], self.fail
        out = b""
        if not chunks:
            out = (
                "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                f"Transfer-Encoding: chunked\r\nX-Request-Id: request-{self.number}\r\n\r\n"
            ).encode()
            if self._is_chat:
                out += self._event(self._choice("", role="assistant"))
        if fail != "no_content":
            tokens = min(truth.chunk_tokens, self.output_tokens - self._sent)
            self._sent += tokens
            counts = self._usage() if self._options.get("continuous_usage_stats") else {}
            word = f"w{self.number} " if truth.echo else "ab "
            out += self._event(self._choice(word * tokens) | counts)
            if not chunks:
                self._entry["first_tokens"] = tokens
            self._entry["tokens"] = self._sent
            chunks.append(clock())
        breaks = fail in ("cut", "error", "garbage") and self._sent >= self.output_tokens / 2
        is_last = breaks or fail == "no_content" or self._sent >= self.output_tokens
        is_cut = is_last and fail == "cut"
        self._writer.write(out + self._last() if is_last and not is_cut else out)
        if is_last:
            self._entry["whole"] = not is_cut
            self.over.set()
        if is_cut:
            self._writer.close()

    def _last(self) -> bytes:
        """The end of the answer, as it was told to be."""
        out = b""
        if self.fail == "error":
            out += self._event({"error": {"message": "as told"}})
        elif self.fail == "garbage":
            out += _chunk(b"data: {nonsense\n\n")
        is_done = self.truth.done and self.fail != "error"
        if is_done:
            out += self._event(self._choice("", finish="length"))
        if self._options.get("include_usage"):
            out += self._event({"model": MODEL, "choices": []} | self._usage())
        if is_done:
            out += _chunk(b"data: [DONE]\n\n")
        return out + b"0\r\n\r\n"

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
        return {"id": f"request-{self.number}", "model": MODEL, "choices": [choice]}

    def _event(self, body: dict[str, Any]) -> bytes:
        return _chunk(b"data: " + json_bytes(body) + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json_bytes(body)
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def main() -> None:
    truth = msgspec.json.decode(sys.argv[1], type=Truth) if len(sys.argv) > 1 else Truth()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Server(truth).run())


if __name__ == "__main__":
    main()
