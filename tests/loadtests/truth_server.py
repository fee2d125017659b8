"""A streaming endpoint with known truth: it does what each request's `truth` field says and remembers when it did it.

`python -m tests.loadtests.truth_server '{"slots": 4}'` prints its port. GET /truth returns, for each request id, when the request arrived
and when each content chunk was written, on the clock that all processes of a machine share (CLOCK_MONOTONIC), so that a client's stamps
can be held against them one by one. A process of its own, so that it does not share an interpreter with what it judges.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Truth:
    """What the server does, unless a request's `truth` says otherwise."""

    ttft: float = 0.02  # from having a slot to the first chunk
    gap: float = 0.005  # between chunks
    chunk_tokens: int = 1
    stall_at: int | None = None  # before this chunk ...
    stall: float = 0.0  # ... this much longer
    fail: str | None = None  # cut | error | garbage | no_content | status:NNN | hang | slam
    usage: bool = True
    continuous: bool = True
    done: bool = True
    slots: int = 1_000_000
    refuse: tuple[str, ...] = ()  # body fields that are answered with 400
    tokenizer: str | None = "vllm"
    key: str | None = None
    cancels: bool = True  # a request whose client has gone gives its slot back; else it is served to its end
    case: str = ""  # nothing but a name: servers of different cases share no log
    headers_first: bool = False  # send the headers at once, the first chunk at its time


@dataclass
class Server:
    truth: Truth
    log: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: int = 0

    def __post_init__(self) -> None:
        logging.disable(logging.WARNING)  # asyncio warns of each write to a client that has gone
        self.slots = asyncio.Semaphore(self.truth.slots)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                arrived = time.perf_counter()
                method, path, _ = head.split("\r\n")[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if self.truth.key and headers.get("authorization") != f"bearer {self.truth.key}":
                    _answer(writer, 401, {"error": {"message": "no"}})
                elif method == "GET":
                    _answer(writer, 200, self.log if path == "/truth" else {"data": [{"id": "true-model", "max_model_len": 4096}]})
                elif path == "/tokenize":
                    self.tokenize(writer, json.loads(body))
                elif not await self.complete(writer, path, json.loads(body), arrived):
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def tokenize(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        words = [hash(word) % 1000 for word in body.get("prompt" if self.truth.tokenizer == "vllm" else "content", "").split()]
        if self.truth.tokenizer is None:
            _answer(writer, 404, {})
        else:
            _answer(writer, 200, {"tokens": words, "count": len(words)})

    async def complete(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], arrived: float) -> bool:
        truth = Truth(**(vars(self.truth) | body.get("truth", {})))
        self.requests += 1
        name = f"request-{self.requests}"
        entry = self.log[name] = {"arrived": arrived, "chunks": [], "body": {k: v for k, v in body.items() if k != "prompt"}}
        refused = next((key for key in truth.refuse if key in body or key in body.get("stream_options", {})), None)
        if refused:
            _answer(writer, 400, {"error": {"message": f"unknown field {refused}"}})
            return True
        if truth.fail and truth.fail.startswith("status:"):
            _answer(writer, int(truth.fail[7:]), {"error": {"message": "as told"}})
            return True
        if truth.fail == "slam":
            return False
        async with self.slots:
            if truth.cancels and writer.transport.is_closing():
                return False
            return await self.stream(writer, path, body, truth, name, entry)

    async def stream(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], truth: Truth, name: str, entry: Any) -> bool:
        chat = path.endswith("chat/completions")
        asked = body["max_tokens"]
        prompt = len(str(body.get("prompt") or body["messages"][-1]["content"]).split())
        options = body.get("stream_options", {})
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nX-Request-Id: {name}\r\n\r\n".encode()
        if truth.headers_first:
            writer.write(head)
            head = b""
        await asyncio.sleep(truth.ttft)
        if truth.fail == "hang":
            await asyncio.sleep(3600)
        if chat:
            writer.write(head + _event(_choice(chat, "", role=True)))
            head = b""
        sent = 0
        while sent < asked and truth.fail != "no_content":
            index = len(entry["chunks"])
            if index:
                await asyncio.sleep(truth.gap + (truth.stall if index == truth.stall_at else 0.0))
            if truth.cancels and writer.transport.is_closing():
                return False
            sent += min(truth.chunk_tokens, asked - sent)
            usage = {"prompt_tokens": prompt, "completion_tokens": sent}
            chunk = _choice(chat, "ab " * truth.chunk_tokens)
            if truth.continuous and options.get("continuous_usage_stats"):
                chunk["usage"] = usage
            entry["chunks"].append(time.perf_counter())
            writer.write(head + _event(chunk))
            head = b""
            if truth.fail in ("cut", "error", "garbage") and sent >= asked / 2:
                if truth.fail == "cut":
                    await writer.drain()
                    return False
                writer.write(_event({"error": {"message": "as told"}}) if truth.fail == "error" else _chunk(b"data: {nonsense\n\n"))
                break
        writer.write(head)
        if truth.done and truth.fail != "error":
            writer.write(_event(_choice(chat, "", finish="length")))
        if truth.usage and options.get("include_usage"):
            writer.write(_event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": sent}}))
        if truth.done and truth.fail != "error":
            writer.write(_chunk(b"data: [DONE]\n\n"))
        writer.write(b"0\r\n\r\n")
        return True


def _choice(chat: bool, text: str, role: bool = False, finish: str | None = None) -> dict[str, Any]:
    if chat:
        return {"choices": [{"index": 0, "delta": {"content": text} | ({"role": "assistant"} if role else {}), "finish_reason": finish}]}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def _event(body: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))


async def main() -> None:
    settings = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    server = await asyncio.start_server(Server(Truth(**settings)).serve, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
