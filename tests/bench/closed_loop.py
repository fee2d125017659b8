"""A small closed-loop client for benchmarks against peers: N streams, each sends its next request
when the last one ended.

Plain asyncio sockets and no HTTP library, so that the client's own cost is small and the same for
every server. Times start before the first byte leaves. Speaks only what the peers have in common:
POST /v1/completions with "stream": true, answered as chunked SSE.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np


@dataclass
class Stream:
    """What one request did; times in seconds from the start of the run.

    `finish`: the server's finish_reason; None where it gave none.
    """

    sent: float
    asked: int  # tokens of output
    chunks: list[float] = field(default_factory=list)
    tokens: int | None = None
    finish: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Result:
    """One run's figures. Rates in tokens per second, times in seconds.

    `failed`: requests that ended in an error; `cut`: those whose
    answer broke off, or ended before it had the length asked for. Tokens of all of them count."""

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


async def _one(host: str, port: int, body: bytes, asked: int, start: float) -> Stream:
    stream = Stream(sent=time.perf_counter() - start, asked=asked)
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
            b"application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            % len(body)
            + body
        )
        status = await reader.readline()
        if b" 200 " not in status:
            stream.error = (
                status.decode(errors="replace").strip()
                or "the connection was closed without an answer"
            )
            return stream
        async for line in reader:
            if not line.startswith(b"data: {"):
                if line.startswith(b"data: [DONE]"):
                    break
                continue
            now = time.perf_counter() - start
            event = json.loads(line[6:])
            if event.get("usage"):
                stream.tokens = event["usage"]["completion_tokens"]
            choices = event.get("choices") or []
            if choices:
                stream.finish = choices[0].get("finish_reason") or stream.finish
                if choices[0].get("text"):
                    stream.chunks.append(now)
            elif event.get("error"):
                stream.error = str(event["error"])[:200]
    except OSError as problem:
        stream.error = f"{type(problem).__name__}: {problem}"
    finally:
        if writer is not None:
            writer.close()
    return stream


async def _drive(
    url: str, bodies: list[tuple[bytes, int]], streams: int
) -> tuple[list[Stream], float]:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    queue = list(reversed(bodies))
    done: list[Stream] = []
    start = time.perf_counter()

    async def user() -> None:
        while queue:
            done.append(await _one(str(parts.hostname), int(parts.port or 80), *queue.pop(), start))

    await asyncio.gather(*(user() for _ in range(streams)))
    return done, time.perf_counter() - start


def run(
    url: str,
    prompts: list[str],
    output_tokens: int | list[int],
    streams: int,
    model: str = "",
    **extra: object,
) -> Result:
    """Send every prompt once, `streams` at a time; output length (of all, or of each prompt) fixed
    by ignore_eos, where the server knows
    it. Raises RuntimeError where no request at all brought a token."""
    lengths = [output_tokens] * len(prompts) if isinstance(output_tokens, int) else output_tokens
    bodies = [
        json.dumps(
            {
                "prompt": prompt,
                "max_tokens": length,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                "stream_options": {"include_usage": True},
                "model": model,
                **extra,
            }
        ).encode()
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    done, seconds = asyncio.run(_drive(url, list(zip(bodies, lengths, strict=True)), streams))
    begun = [stream for stream in done if stream.chunks]
    if not begun:
        raise RuntimeError(
            f"none of {len(done)} requests brought a token: {[stream.error for stream in done][:3]}"
        )
    ttft = np.array([stream.chunks[0] - stream.sent for stream in begun])
    gaps = np.concatenate([np.diff(stream.chunks) for stream in begun])
    return Result(
        streams=streams,
        requests=len(done),
        failed=sum(stream.error is not None or not stream.chunks for stream in done),
        cut=sum(
            stream.error is None and 0 < len(stream.chunks) and made(stream) < stream.asked
            for stream in done
        ),
        output_tokens_per_second=sum(made(stream) for stream in done) / seconds,
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p95=float(np.percentile(ttft, 95)),
        itl_p50=float(np.percentile(gaps, 50)),
        itl_p99=float(np.percentile(gaps, 99)),
        seconds=seconds,
    )


def made(stream: Stream) -> int:
    """The tokens of an answer: as the server counts them; else all that were asked for, where it
    says that the length ended it; else one
    for each chunk with text, which is the least there can be."""
    if stream.tokens is not None:
        return stream.tokens
    return stream.asked if stream.finish == "length" else len(stream.chunks)
