"""The HTTP client of the benchmarks: one request is one write, its answer is read as it arrives.

    client = Client("127.0.0.1", 8000)
    outcome = await client.ask(post(prompt="x", max_tokens=8, stream=True))

It is plain asyncio streams without an HTTP library, so that the client costs little and the same
for every server. Times are those of the event loop's clock; latencies count from the scheduled time
of a request. It speaks what OpenAI-like servers have in common: POST with "stream": true answered
as chunked SSE, or a body with its length.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import numpy as np
import uvloop

READ_LIMIT_BYTES = 1 << 22
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def post(path: str = "/v1/completions", *, raw: bytes | None = None, **fields: Any) -> bytes:
    """One request as it goes over the wire."""
    content = json.dumps(fields).encode() if raw is None else raw
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


@dataclass(slots=True)
class Outcome:
    """What became of one request; missing is None."""

    due: float
    sent: float | None = None
    status: int | None = None
    retry_after: float | None = None
    backend: str = ""
    chunks: list[float] = field(default_factory=list)  # when pieces of text came
    tokens: int | None = None  # of output, as the server counts them
    finish: str | None = None
    last: float | None = None
    complete: bool = False  # the answer came to its proper end
    error: str | None = None
    body: bytes = b""  # of answers that are not streamed

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.due if self.chunks and self.status == 200 else None


T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work` on a loop of its own, whose connections are closed after it."""

    async def whole() -> T:
        try:
            return await work
        finally:
            while Client.made:
                Client.made.pop().close()
            await asyncio.sleep(0.05)

    return uvloop.run(whole())


class Client:
    """Sends requests to one server, over connections that it keeps."""

    made: ClassVar[list[Client]] = []

    def __init__(self, host: str, port: int, keep: bool = True) -> None:
        self.made.append(self)
        self._address, self._keep = (host, port), keep
        self._idle: list[Streams] = []

    async def ask(self, data: bytes, due: float | None = None) -> Outcome:
        """Send one request and read it to its end; an error of the connection is in the outcome's
        `error`."""
        loop = asyncio.get_running_loop()
        outcome = Outcome(loop.time() if due is None else due)
        reader, writer = streams = await self._connection()
        outcome.sent = loop.time()
        keep = False
        try:
            writer.write(data)
            keep = await self._read(reader, outcome)
        except (OSError, ValueError, IndexError, asyncio.IncompleteReadError) as problem:
            outcome.error = f"{type(problem).__name__}: {problem}"
        finally:
            outcome.last = loop.time()
            if keep and self._keep:
                self._idle.append(streams)
            else:
                writer.close()
        return outcome

    async def _connection(self) -> Streams:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        opening = asyncio.ensure_future(
            asyncio.open_connection(*self._address, limit=READ_LIMIT_BYTES)
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda done: done.result()[1].close())
            raise

    async def _read(self, reader: asyncio.StreamReader, outcome: Outcome) -> bool:
        """Read the answer into `outcome`. Return whether the connection may be used again."""
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        outcome.status = int(status.split()[1])
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        outcome.backend = headers.get("x-crossover-backend", "")
        if "retry-after-ms" in headers:
            outcome.retry_after = int(headers["retry-after-ms"]) / 1000
        keep = headers.get("connection") != "close"
        if "content-length" in headers:
            outcome.body = await reader.readexactly(int(headers["content-length"]))
            outcome.chunks.append(asyncio.get_running_loop().time())
            outcome.complete = True
            return keep
        async for line in reader:
            if line.startswith(b"data: {"):
                self._event(json.loads(line[6:]), outcome)
            elif line.startswith(b"data: [DONE]"):
                outcome.complete = outcome.error is None
            elif line == b"0\r\n":  # the last chunk
                await reader.readline()
                return keep
        return False

    @staticmethod
    def _event(event: dict[str, Any], outcome: Outcome) -> None:
        now = asyncio.get_running_loop().time()
        match event:
            case {"error": {"code": code}} | {"error": code}:
                outcome.error = str(code)
            case {"usage": {"completion_tokens": int(tokens)}}:
                outcome.tokens = tokens
        match event.get("choices"):
            case [{"text": text} | {"delta": {"content": text}} as choice, *_] if text:
                outcome.chunks.append(now)
                outcome.finish = choice.get("finish_reason") or outcome.finish
            case [{"finish_reason": str(reason)}, *_]:
                outcome.finish = reason

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


@dataclass(frozen=True)
class Result:
    """A closed loop's figures. Rates in tokens per second, times in seconds.

    `failed`: requests that ended in an error; `cut`: those whose answer broke off, or ended before
    it had the length asked for. Tokens of all of them count.
    """

    streams: int
    requests: int
    failed: int
    cut: int
    output_tokens_per_second: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    itl_p99: float
    seconds: float


def closed_loop(
    url: str,
    prompts: list[str],
    lengths: list[int],
    streams: int,
    model: str,
    most_seconds: float | None = None,
    **extra: Any,
) -> Result:
    """Send every prompt once, `streams` at a time, each for an answer of its length; none after
    `most_seconds`.

    Raises RuntimeError where no request brought a token.
    """
    parts = urlsplit(url)
    client = Client(str(parts.hostname), int(parts.port or 80), keep=False)
    fixed = {"temperature": 0, "stream": True, "ignore_eos": True, "model": model, **extra}
    usage = {"include_usage": True}
    queue = [
        (post(prompt=prompt, max_tokens=length, stream_options=usage, **fixed), length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ][::-1]
    done: list[tuple[Outcome, int]] = []

    async def user(end: float) -> None:
        while queue and asyncio.get_running_loop().time() < end:
            data, length = queue.pop()
            done.append((await client.ask(data), length))

    async def drive() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        end = math.inf if most_seconds is None else start + most_seconds
        await asyncio.gather(*(user(end) for _ in range(streams)))
        return loop.time() - start

    seconds = run(drive())
    begun = [one for one, _ in done if one.chunks and one.status == 200]
    if not begun:
        errors = [one.error or one.body[:200] for one, _ in done][:3]
        raise RuntimeError(f"none of {len(done)} requests brought a token: {errors}")
    tokens = [made(one, requested) for one, requested in done]
    failed = [one.error is not None or one.status != 200 or not one.chunks for one, _ in done]
    ttft = np.array([one.ttft for one in begun])
    gaps = np.concatenate([np.diff(one.chunks) for one in begun])
    return Result(
        streams=streams,
        requests=len(done),
        failed=sum(failed),
        cut=sum(
            not bad and got < requested
            for bad, got, (_, requested) in zip(failed, tokens, done, strict=True)
        ),
        output_tokens_per_second=sum(tokens) / seconds,
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p95=float(np.percentile(ttft, 95)),
        itl_p50=float(np.percentile(gaps, 50)),
        itl_p99=float(np.percentile(gaps, 99)),
        seconds=seconds,
    )


def made(outcome: Outcome, requested: int) -> int:
    """Return the tokens of an answer: as the server counts them; otherwise all that were requested,
    if the server says that the length ended it; otherwise one for each chunk, the minimum."""
    if outcome.tokens is not None:
        return outcome.tokens
    return requested if outcome.finish == "length" else len(outcome.chunks)
