"""A streaming endpoint with known behavior, which logs what it did to each request and when.

    python -m crossover.loadtests.selftest.reference_server '{"slots": 4}'        # prints its port
    python -m crossover.loadtests.selftest.reference_server '{"slots": 8, "step_times": {...}}'

GET /truth returns for each request ID when the request arrived, when each content chunk was
written, and the status. Times are on CLOCK_MONOTONIC, which all processes share. The server has no
model, answers "ab", and streams every answer.

Without a step-time model, the chunks of each answer come at fixed intervals. With one, requests are
batched as by an engine: each step takes the time that the model gives, and every decoding request
gets one token per step.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, SupportsIndex

import msgspec

from crossover.serving.capacity.step_time_model import StepTimeModel

clock = time.perf_counter
MODEL = "true-model"
STEP_TOKENS = 2048  # maximum prompt tokens of a step in which no request decodes
PREFILL_TOKENS = 256  # maximum prompt tokens of a step in which a request decodes
STALL_AT = 6  # index of the chunk before which an answer stalls
json_bytes = msgspec.json.Encoder().encode
Body = dict[str, Any]


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the server behaves. All times are in seconds."""

    ttft: float = 0.02  # from getting a slot to the first chunk
    gap: float = 0.005  # between chunks
    chunk_tokens: int = 1
    stall: float = 0.0  # extra gap before the chunk STALL_AT of every third answer
    cut_every: int = 0  # every n-th answer is cut off in its middle; 0: none
    reasoning_share: float = 0.0  # share of a chat answer's tokens that are reasoning
    slots: int = 1_000_000
    # Maximum requests that wait for a slot; more are answered with 429. None: no limit.
    waiting: int | None = None
    # Requests are batched with these step times. None: `ttft` and `gap` apply.
    step_times: StepTimeModel | None = None
    # With step times: time is divided into periods. In every second period, steps take `slower`
    # times as long, and the first step of each period takes `pause` longer.
    period: float = 2.0
    slower: float = 1.0
    pause: float = 0.0


class Received(asyncio.StreamReader):
    """A stream reader that records when its last bytes were received, which may be long before they
    are read."""

    moment = 0.0  # on `clock`

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.moment = clock()
        super().feed_data(data)


class ReferenceStream:
    """One request and its streamed answer.

    `entry` is the request's entry in the server's log. `body` is the request's JSON.
    """

    def __init__(
        self,
        truth: Truth,
        number: int,
        body: Body,
        entry: Body,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.truth, self.number, self.entry = truth, number, entry
        self.ended = asyncio.Event()
        self.is_cut_off = bool(truth.cut_every) and number % truth.cut_every == 0
        self.output_tokens = int(body.get("max_tokens") or 16)
        prompt = body.get("prompt") or ""
        self.messages = [str(message["content"]) for message in body.get("messages") or ()]
        self.is_chat = bool(self.messages)
        if self.is_chat:
            prompt = " ".join(self.messages)
        # Each word counts as a token.
        self.prompt_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        self.cached_tokens = 0  # tokens of the prompt that are those of an earlier conversation
        self.answer = ""
        self._reasoning_tokens = int(truth.reasoning_share * self.output_tokens)
        self.decoded_tokens = 0  # by a SlotBatch
        self.prompt_tokens_left = self.prompt_tokens  # that a SlotBatch has still to process
        self.sent_tokens = 0  # written to the client
        self._options = body.get("stream_options") or {}
        self.reader, self.writer = reader, writer

    @property
    def has_ended(self) -> bool:
        """Whether the answer is complete or cut off, or the client has closed the connection."""
        return self.ended.is_set() or self.reader.at_eof() or self.writer.is_closing()

    def write(self) -> None:
        """Write the next chunk and log its time. After the last chunk, end the answer."""
        if self.has_ended:
            return
        tokens = min(self.truth.chunk_tokens, self.output_tokens - self.sent_tokens)
        out = b"" if self.sent_tokens else self.head()
        self.sent_tokens += tokens
        counts = self.usage() if self._options.get("continuous_usage_stats") else {}
        text = "ab " * tokens
        if self.is_chat and self.sent_tokens > self._reasoning_tokens:
            self.answer += text
            self.entry.setdefault("first_answer", clock())
        out += self.event(self.choice(text) | counts)
        is_last = self.sent_tokens >= (
            self.output_tokens / 2 if self.is_cut_off else self.output_tokens
        )
        self.entry.setdefault("first_tokens", tokens)
        self.entry["tokens"] = self.sent_tokens
        self.entry["chunks"].append(clock())
        self.writer.write(out + self.end() if is_last else out)
        if is_last:
            self.entry["whole"] = not self.is_cut_off
            self.ended.set()
            if self.is_cut_off:
                self.writer.close()

    def head(self) -> bytes:
        """Return the status line and the headers of the response."""
        return (
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            f"Transfer-Encoding: chunked\r\nX-Request-Id: request-{self.number}\r\n\r\n"
        ).encode()

    def end(self) -> bytes:
        """Return what follows the last chunk: the finish reason, usage and [DONE]; nothing for an
        answer that is cut off."""
        if self.is_cut_off:
            return b""
        out = self.event(self.choice("", finish="length"))
        if self._options.get("include_usage"):
            out += self.event({"model": MODEL, "choices": []} | self.usage())
        return out + http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def usage(self) -> Body:
        """Return the token counts so far, as OpenAI's `usage` field."""
        counts: Body = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.sent_tokens}
        if self.is_chat:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return {"usage": counts | {"total_tokens": self.prompt_tokens + self.sent_tokens}}

    def choice(self, text: str, finish: str | None = None) -> Body:
        """Return a chunk with this text, as JSON of the route that was requested."""
        choice: Body = {"index": 0, "text": text, "finish_reason": finish}
        if self.is_chat:
            is_answer = self.sent_tokens > self._reasoning_tokens
            key = "content" if is_answer else "reasoning_content"
            choice = {"index": 0, "delta": {key: text}, "finish_reason": finish}
        return {"id": f"request-{self.number}", "model": MODEL, "choices": [choice]}

    def event(self, body: Body) -> bytes:
        """Return a server-sent event in a chunk of the response."""
        return http_chunk(b"data: " + json_bytes(body) + b"\n\n")


class SlotBatch:
    """Continuous batching with a step-time model: requests wait for a slot, have their prompt
    processed in pieces, and then decode one token per step.

    The owner calls `begin(now)` while the batch is idle and requests wait, and `end()` at `ends`.
    """

    def __init__(self, truth: Truth) -> None:
        self.waiting: deque[ReferenceStream] = deque()
        self.ends: float | None = None  # when the running step ends, on `clock`; None: idle
        self._truth = truth
        self._in_prefill: list[ReferenceStream] = []  # oldest first
        self._decoding: list[ReferenceStream] = []
        self._pieces: list[tuple[ReferenceStream, int]] = []  # prompt tokens of the running step
        self._period = 0

    def begin(self, now: float) -> None:
        """Begin a step at `now` with the requests there are; without any, the batch is idle."""
        step_times = self._truth.step_times
        assert step_times is not None
        self._in_prefill = [stream for stream in self._in_prefill if not stream.has_ended]
        self._decoding = [stream for stream in self._decoding if not stream.has_ended]
        decoding = self._decoding
        while self.waiting and len(self._in_prefill) + len(decoding) < self._truth.slots:
            self._in_prefill.append(self.waiting.popleft())
        remaining_tokens = PREFILL_TOKENS if decoding else STEP_TOKENS
        self._pieces = []
        for stream in self._in_prefill:
            if remaining_tokens > 0:
                piece_tokens = min(stream.prompt_tokens_left, remaining_tokens)
                self._pieces.append((stream, piece_tokens))
                remaining_tokens -= piece_tokens
        self.ends = None
        if self._pieces or decoding:
            seconds = step_times.seconds(
                rows=len(decoding),
                prompt_tokens=sum(piece_tokens for _, piece_tokens in self._pieces),
                context_tokens=sum(
                    stream.prompt_tokens + stream.decoded_tokens for stream in decoding
                ),
                passes=len(self._pieces) + bool(decoding),
            )
            period = int(now / self._truth.period)
            if period % 2:
                seconds *= self._truth.slower
            if period != self._period:
                seconds += self._truth.pause
            self._period = period
            self.ends = now + seconds

    def end(self) -> list[ReferenceStream]:
        """End the running step and begin the next one. Return the requests that got a token."""
        assert self.ends is not None
        with_token = list(self._decoding)
        for stream, piece_tokens in self._pieces:
            stream.prompt_tokens_left -= piece_tokens
            if not stream.prompt_tokens_left:
                self._in_prefill.remove(stream)
                with_token.append(stream)
        for stream in with_token:
            stream.decoded_tokens += 1
        self._decoding = [
            stream for stream in with_token if stream.decoded_tokens < stream.output_tokens
        ]
        self.begin(self.ends)
        return with_token


class ReferenceServer:
    """The server: slots, a queue of requests that wait for one, and the log."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.log: dict[str, Body] = {}
        self._slots = asyncio.Semaphore(truth.slots)
        self._waiting = 0
        self._batch = SlotBatch(truth)
        self._has_request = asyncio.Event()  # a request waits for the batch
        # The messages of each conversation so far, including the last answer.
        self._conversations: set[tuple[str, ...]] = set()

    async def run(self) -> None:
        """Listen on a free port of 127.0.0.1, print its number, and serve forever."""
        listening = await asyncio.get_running_loop().create_server(
            lambda: asyncio.StreamReaderProtocol(Received(), self._serve), "127.0.0.1", backlog=4096
        )
        print(listening.sockets[0].getsockname()[1], flush=True)
        await (listening.serve_forever() if self.truth.step_times is None else self._compute())

    async def _compute(self) -> None:
        """Run the steps of the batch, and write a chunk to each request that got a token."""
        batch = self._batch
        while True:
            self._has_request.clear()
            batch.begin(clock())
            while batch.ends is not None:
                await asyncio.sleep(batch.ends - clock())
                for stream in batch.end():
                    stream.write()
            if not batch.waiting:
                await self._has_request.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection, one after the other."""
        assert isinstance(reader, Received)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                pairs = [line.partition(":") for line in lines]
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split(" ")[1]
                status, response = self.respond(path, headers, body)
                if status == 200 and path.endswith("completions"):
                    number, request = len(self.log) + 1, msgspec.json.decode(body)
                    entry = {"arrived": reader.moment, "chunks": [], "status": 200}
                    self.log[f"request-{number}"] = entry
                    await self.answer(self.stream(path, number, request, entry, reader, writer))
                else:
                    answer(writer, status, response)
        writer.close()

    def respond(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        """Return status and JSON of a response that is not streamed."""
        if path == "/truth":
            return 200, self.log
        return 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    def stream(self, path: str, *fields: Any) -> ReferenceStream:
        """Return the stream of a request. `fields`: the other parameters of ReferenceStream."""
        return ReferenceStream(self.truth, *fields)

    async def answer(self, stream: ReferenceStream) -> None:
        """Serve one request to the end of its answer."""
        truth, messages = stream.truth, tuple(stream.messages)
        if messages[:-1] in self._conversations:
            stream.cached_tokens = len(" ".join(messages[:-1]).split())
        stream.entry |= {"messages": len(messages), "cached": stream.cached_tokens}
        if truth.step_times is not None:
            self._batch.waiting.append(stream)
            self._has_request.set()
            await stream.ended.wait()
        elif truth.waiting is not None and self._slots.locked() and self._waiting >= truth.waiting:
            stream.entry["status"] = 429
            answer(stream.writer, 429, {"error": {"message": "as told"}})
        else:
            self._waiting += 1
            await self._slots.acquire()
            self._waiting -= 1
            try:
                await self._write_on_schedule(stream)
            finally:
                self._slots.release()
            self._conversations.add((*messages, stream.answer))

    async def _write_on_schedule(self, stream: ReferenceStream) -> None:
        """Write the chunks of an answer at the times that `ttft`, `gap` and `stall` define."""
        truth = stream.truth
        next_chunk = clock() + truth.ttft
        chunk_count = 0
        while not stream.has_ended:
            if chunk_count == STALL_AT and stream.number % 3 == 0:
                next_chunk += truth.stall
            await asyncio.sleep(next_chunk - clock())
            stream.write()
            next_chunk += truth.gap
            chunk_count += 1


def http_chunk(data: bytes) -> bytes:
    """Return a chunk of a response with chunked transfer encoding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    """Write a response that is not streamed, with `body` as JSON."""
    data = json_bytes(body)
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def main() -> None:
    """Serve with the Truth on the command line, as JSON."""
    truth = msgspec.json.decode(sys.argv[1], type=Truth) if len(sys.argv) > 1 else Truth()
    gc.disable()  # a collection would delay every answer by milliseconds
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(ReferenceServer(truth).run())


if __name__ == "__main__":
    main()
