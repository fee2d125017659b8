"""A streaming endpoint with known truth: it remembers when it did what it was told to do.

    python -m crossover.loadtests.selftest.reference_server '{"slots": 4}'        # prints its port
    python -m crossover.loadtests.selftest.reference_server '{"slots": 8, "step_times": {...}}'

GET /truth returns for each request id when it arrived, when each content chunk was written, and
its status, on CLOCK_MONOTONIC, which all processes share. It has no model, answers "ab", and every
answer is a stream.

Without a step-time model each answer has its own chunks at their times. With one, requests are
batched as an engine does: steps whose length the step-time model says, one token a step to each
that decodes.
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
STEP_TOKENS = 2048  # most prompt tokens of a step in which nobody decodes
PREFILL_TOKENS = 256  # most of one in which somebody does
STALL_AT = 6
json_bytes = msgspec.json.Encoder().encode
Body = dict[str, Any]


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the server does. Times in seconds."""

    ttft: float = 0.02  # from having a slot to the first chunk
    gap: float = 0.005  # between chunks
    chunk_tokens: int = 1
    stall: float = 0.0  # before the chunk STALL_AT of every third answer this much longer
    cut_every: int = 0  # one of so many answers is cut off in its middle; 0: none
    reasoning_share: float = 0.0  # of an answer's tokens on the chat route, before the answer
    slots: int = 1_000_000
    # requests that may wait for a slot; more are answered with 429. None: any number
    waiting: int | None = None
    # Of continuous batching. None: ttft and gap
    step_times: StepTimeModel | None = None
    period: float = 2.0  # under a step-time model, every second of these ...
    slower: float = 1.0  # ... has steps that take so many times as long
    pause: float = 0.0  # that the first step of each takes longer


class Received(asyncio.StreamReader):
    """Knows when its last bytes left the kernel, however long they wait to be read."""

    moment = 0.0

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.moment = clock()
        super().feed_data(data)


class Stream:
    """One answer on its way."""

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
        self.over = asyncio.Event()
        self.breaks = bool(truth.cut_every) and number % truth.cut_every == 0
        self.output_tokens = int(body.get("max_tokens") or 16)
        prompt = body.get("prompt") or ""
        self.messages = [str(one["content"]) for one in body.get("messages") or ()]
        self.is_chat = bool(self.messages)
        if self.is_chat:  # a word is a token
            prompt = " ".join(self.messages)
        self.prompt_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        self.cached_tokens = 0  # words of the messages that are a whole conversation of before
        self.answer = ""
        self._reasoning_tokens = int(truth.reasoning_share * self.output_tokens)
        self.made = 0  # steps of a Batch that gave it a token
        self.left = self.prompt_tokens  # that a Batch has still to compute
        self.sent = 0
        self._options = body.get("stream_options") or {}
        self.reader, self.writer = reader, writer

    @property
    def is_over(self) -> bool:
        """Whole, cut off, or its client has gone."""
        return self.over.is_set() or self.reader.at_eof() or self.writer.is_closing()

    def write(self) -> None:
        """The next chunk, and the end of the answer behind the last."""
        if self.is_over:
            return
        tokens = min(self.truth.chunk_tokens, self.output_tokens - self.sent)
        out = b"" if self.sent else self.head()
        self.sent += tokens
        counts = self.usage() if self._options.get("continuous_usage_stats") else {}
        text = "ab " * tokens
        if self.is_chat and self.sent > self._reasoning_tokens:
            self.answer += text
            self.entry.setdefault("first_answer", clock())
        out += self.event(self.choice(text) | counts)
        is_last = self.sent >= (self.output_tokens / 2 if self.breaks else self.output_tokens)
        self.entry.setdefault("first_tokens", tokens)
        self.entry["tokens"] = self.sent
        self.entry["chunks"].append(clock())
        self.writer.write(out + self.end() if is_last else out)
        if is_last:
            self.entry["whole"] = not self.breaks
            self.over.set()
            if self.breaks:
                self.writer.close()

    def head(self) -> bytes:
        return (
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            f"Transfer-Encoding: chunked\r\nX-Request-Id: request-{self.number}\r\n\r\n"
        ).encode()

    def end(self) -> bytes:
        """What follows the last chunk: nothing where it is cut off."""
        if self.breaks:
            return b""
        out = self.event(self.choice("", finish="length"))
        if self._options.get("include_usage"):
            out += self.event({"model": MODEL, "choices": []} | self.usage())
        return out + http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def usage(self) -> Body:
        counts: Body = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.sent}
        if self.is_chat:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return {"usage": counts | {"total_tokens": self.prompt_tokens + self.sent}}

    def choice(self, text: str, finish: str | None = None) -> Body:
        choice: Body = {"index": 0, "text": text, "finish_reason": finish}
        if self.is_chat:
            is_answer = self.sent > self._reasoning_tokens
            key = "content" if is_answer else "reasoning_content"
            choice = {"index": 0, "delta": {key: text}, "finish_reason": finish}
        return {"id": f"request-{self.number}", "model": MODEL, "choices": [choice]}

    def event(self, body: Body) -> bytes:
        return http_chunk(b"data: " + json_bytes(body) + b"\n\n")


class Batch:
    """Continuous batching by a step-time model: sequences wait, have their prompt computed, decode.

    The owner calls `begin(now)` when it is idle and somebody waits, and `end()` at `ends`.
    """

    def __init__(self, truth: Truth) -> None:
        self.waiting: deque[Stream] = deque()
        self.ends: float | None = None  # of the step under way; None: idle
        self._truth = truth
        self._filling: list[Stream] = []  # oldest first
        self._decoding: list[Stream] = []
        self._pieces: list[tuple[Stream, int]] = []  # prompt tokens of the step
        self._period = 0

    def begin(self, now: float) -> None:
        """A step with what is there; idle where that is nothing."""
        step_times = self._truth.step_times
        assert step_times is not None
        self._filling = [one for one in self._filling if not one.is_over]
        rows = self._decoding = [one for one in self._decoding if not one.is_over]
        while self.waiting and len(self._filling) + len(rows) < self._truth.slots:
            self._filling.append(self.waiting.popleft())
        room = PREFILL_TOKENS if rows else STEP_TOKENS
        self._pieces = []
        for one in self._filling:
            if room > 0:
                self._pieces.append((one, min(one.left, room)))
                room -= self._pieces[-1][1]
        self.ends = None
        if self._pieces or rows:
            seconds = step_times.seconds(
                rows=len(rows),
                prompt_tokens=sum(piece for _, piece in self._pieces),
                context_tokens=sum(one.prompt_tokens + one.made for one in rows),
                passes=len(self._pieces) + bool(rows),
            )
            before, self._period = self._period, int(now / self._truth.period)
            seconds *= self._truth.slower if self._period % 2 else 1.0
            self.ends = now + seconds + self._truth.pause * (self._period != before)

    def end(self) -> list[Stream]:
        """The step is over and the next one begins: who has a token now."""
        assert self.ends is not None
        answered = list(self._decoding)
        for one, piece in self._pieces:
            one.left -= piece
            if not one.left:
                self._filling.remove(one)
                answered.append(one)
        for one in answered:
            one.made += 1
        self._decoding = [one for one in answered if one.made < one.output_tokens]
        self.begin(self.ends)
        return answered


class Server:
    """Slots, a queue, and the account of what happened."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.log: dict[str, Body] = {}
        self._slots = asyncio.Semaphore(truth.slots)
        self._waiting = 0
        self._batch = Batch(truth)
        self._is_asked = asyncio.Event()
        self._conversations: set[tuple[str, ...]] = set()  # messages, the last answer included

    async def run(self) -> None:
        """For ever."""
        listening = await asyncio.get_running_loop().create_server(
            lambda: asyncio.StreamReaderProtocol(Received(), self._serve), "127.0.0.1", backlog=4096
        )
        print(listening.sockets[0].getsockname()[1], flush=True)
        await (listening.serve_forever() if self.truth.step_times is None else self._compute())

    async def _compute(self) -> None:
        """The steps of the Batch."""
        batch = self._batch
        while True:
            self._is_asked.clear()
            batch.begin(clock())
            while batch.ends is not None:
                await asyncio.sleep(batch.ends - clock())
                for stream in batch.end():
                    stream.write()
            if not batch.waiting:
                await self._is_asked.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection: requests in, answers out, one at a time."""
        assert isinstance(reader, Received)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                pairs = [line.partition(":") for line in lines]
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split(" ")[1]
                status, said = self.say(path, headers, body)
                if status == 200 and path.endswith("completions"):
                    number, asked = len(self.log) + 1, msgspec.json.decode(body)
                    entry = {"arrived": reader.moment, "chunks": [], "status": 200}
                    self.log[f"request-{number}"] = entry
                    await self.answer(self.stream(path, number, asked, entry, reader, writer))
                else:
                    answer(writer, status, said)
        writer.close()

    def say(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        """Status and body of what is no stream."""
        if path == "/truth":
            return 200, self.log
        return 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    def stream(self, path: str, *asked: Any) -> Stream:
        return Stream(self.truth, *asked)

    async def answer(self, stream: Stream) -> None:
        """One request, to the end of its answer."""
        truth, said = stream.truth, tuple(stream.messages)
        if said[:-1] in self._conversations:
            stream.cached_tokens = len(" ".join(said[:-1]).split())
        stream.entry |= {"messages": len(said), "cached": stream.cached_tokens}
        if truth.step_times is not None:
            self._batch.waiting.append(stream)
            self._is_asked.set()
            await stream.over.wait()
        elif truth.waiting is not None and self._slots.locked() and self._waiting >= truth.waiting:
            stream.entry["status"] = 429
            answer(stream.writer, 429, {"error": {"message": "as told"}})
        else:
            self._waiting += 1
            await self._slots.acquire()
            self._waiting -= 1
            try:
                await self._at_its_times(stream)
            finally:
                self._slots.release()
            self._conversations.add((*said, stream.answer))

    async def _at_its_times(self, stream: Stream) -> None:
        truth, moment, written = stream.truth, clock() + stream.truth.ttft, 0
        while not stream.is_over:
            if written == STALL_AT and stream.number % 3 == 0:
                moment += truth.stall
            await asyncio.sleep(moment - clock())
            stream.write()
            moment += truth.gap
            written += 1


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json_bytes(body)
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


def main() -> None:
    truth = msgspec.json.decode(sys.argv[1], type=Truth) if len(sys.argv) > 1 else Truth()
    gc.disable()  # a collection holds every answer for milliseconds
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Server(truth).run())


if __name__ == "__main__":
    main()
