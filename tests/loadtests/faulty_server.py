"""The reference server with the faults and the dialects that endpoints have.

python -m tests.loadtests.faulty_server '{"fail": "status:500", "fail_every": 4}'
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

from crossover.loadtests.selftest import reference_server
from crossover.loadtests.selftest.reference_server import (
    Body,
    ReferenceServer,
    ReferenceStream,
    http_chunk,
)


class Truth(reference_server.Truth, frozen=True, forbid_unknown_fields=True):
    """A request's `truth` says otherwise for that request."""

    fail: str = ""  # cut | error | garbage | no_content | status:NNN | hang | slam
    fail_every: int = 1  # one of so many requests fails
    fail_after: int = 0  # requests before the first that fails
    usage: bool = True  # token counts at the end of a stream, and beside every chunk
    done: bool = True
    refuse: tuple[str, ...] = ()  # body fields that are answered with 400
    key: str | None = None
    case: str = ""  # nothing but a name: servers of different cases share no log


class FaultyStream(ReferenceStream):
    def __init__(self, fail: str, path: str, truth: Truth, number: int, body: Body, *more: Any):
        self.fail, self.is_chat = fail, path.endswith("chat/completions")
        if self.is_chat:
            body["prompt"] = " ".join(str(one.get("content")) for one in body["messages"])
        if not truth.usage:
            body.pop("stream_options", None)
        super().__init__(truth, number, body, *more)
        self.faults = truth
        self.is_cut_off = fail in ("cut", "error", "garbage")
        self.entry["body"] = {key: value for key, value in body.items() if key != "prompt"}
        self.entry["prompt"] = body.get("prompt")

    def write(self) -> None:
        if self.fail != "no_content":
            super().write()
        elif not self.has_ended:
            self.writer.write(self.head() + self.end())
            self.ended.set()

    def head(self) -> bytes:
        role = self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        return super().head() + (role if self.is_chat else b"")

    def end(self) -> bytes:
        if self.fail == "error":
            return self.event({"error": {"message": "as told"}}) + b"0\r\n\r\n"
        if self.fail == "garbage":
            return http_chunk(b"data: {nonsense\n\n") + b"0\r\n\r\n"
        return super().end() if self.faults.done else b"0\r\n\r\n"


class FaultyServer(ReferenceServer):
    truth: Truth

    def respond(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        key = self.truth.key
        if key and headers.get("authorization") != f"Bearer {key}":
            return 401, {"error": {"message": "no"}}
        return super().respond(path, headers, body)

    def stream(self, path: str, *arguments: Any) -> ReferenceStream:
        number, body = arguments[:2]
        truth = msgspec.structs.replace(self.truth, **body.get("truth", {}))
        is_failing = number > truth.fail_after and number % truth.fail_every == 0
        fields = body.keys() | (body.get("stream_options") or {}).keys()
        fail = "status:400" if fields & set(truth.refuse) else truth.fail if is_failing else ""
        return FaultyStream(fail, path, truth, *arguments)

    async def answer(self, stream: ReferenceStream) -> None:
        assert isinstance(stream, FaultyStream)
        fail, writer = stream.fail, stream.writer
        if fail == "slam":
            writer.transport.abort()
        elif fail == "hang":
            await stream.reader.read(1)
        elif fail.startswith("status:"):
            status = stream.entry["status"] = int(fail[7:])
            reference_server.answer(writer, status, {"error": {"message": "as told"}})
        else:
            await super().answer(stream)


if __name__ == "__main__":
    asyncio.run(FaultyServer(msgspec.json.decode(sys.argv[1], type=Truth)).run())
