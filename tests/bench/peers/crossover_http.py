"""Our side over HTTP: `crossover serve` with the engine on cores of its own, and a client that
sends each request when it is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from serving.backends.backend_interface import EngineConfig
from tests.bench import closed_loop
from tests.bench.llama_server.compare import server
from tests.bench.paired import Figures
from tests.bench.peers.jobs import Job
from tests.bench.peers.match import Player


@contextlib.contextmanager
def served(
    config: EngineConfig, model: str, cores: Sequence[int], client_cores: Sequence[int]
) -> Iterator[Player]:
    """A player that is a server for as long as the block runs.

    The calling process, which is the client, moves to `client_cores`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(
            sys.executable,
            "-m",
            "crossover",
            "serve",
            model,
            "--backend",
            config.backend,
            "--format",
            config.weight_format,
        ),
        *(
            "--port",
            str(port),
            "--slots",
            str(config.slots),
            "--context",
            str(config.context_tokens),
        ),
        *("--cores", ",".join(map(str, cores)), "--api-cores", ",".join(map(str, client_cores))),
    ]
    os.sched_setaffinity(
        0, {*cores, *client_cores}
    )  # the server inherits it and divides it among its processes
    with (
        tempfile.TemporaryDirectory() as folder,
        server(command, port, "/ready", Path(folder, "log")) as url,
    ):
        os.sched_setaffinity(0, client_cores)
        yield lambda job: asyncio.run(_drive(url, model, job))


async def _drive(url: str, model: str, job: Job) -> Figures:
    parts = urlsplit(url)
    loop_start = time.perf_counter()

    async def one(due: float, prompt: list[int], output_tokens: int) -> closed_loop.Stream:
        wish = {
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        body = json.dumps(
            {**wish, "stream_options": {"include_usage": True}, "model": model}
        ).encode()
        await asyncio.sleep(max(0.0, due - (time.perf_counter() - loop_start)))
        return await closed_loop._one(str(parts.hostname), int(parts.port or 80), body, loop_start)

    done = await asyncio.gather(*map(one, job["arrivals"], job["prompts"], job["outputs"]))
    outcomes = zip(done, job["outputs"], strict=True)
    wrong = [
        stream.error or f"{stream.tokens} tokens"
        for stream, wanted in outcomes
        if stream.error or stream.tokens != wanted
    ]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(done)} requests failed: {wrong[:3]}")
    first = [stream.chunks[0] - due for stream, due in zip(done, job["arrivals"], strict=True)]
    gaps = sorted(
        b - a for stream in done for a, b in zip(stream.chunks, stream.chunks[1:], strict=False)
    )
    last = max(stream.chunks[-1] for stream in done)
    return {
        "output_tokens_per_second": sum(job["outputs"]) / (last - job["arrivals"][0]),
        "decode_tokens_per_second": None,  # a chunk may hold several tokens
        "ttft_p50_seconds": statistics.median(first),
        "ttft_max_seconds": max(first),
        "itl_p50_seconds": statistics.median(gaps),
        "itl_p99_seconds": gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
        "seconds": last,
    }
