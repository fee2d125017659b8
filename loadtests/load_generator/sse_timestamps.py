"""One request over server-sent events, timed: bytes out, chunks in, one RequestRecord.

    pool = connect("http://127.0.0.1:8000")
    wire = post_bytes(pool, "/v1/completions", body)
    asked = RequestRecord(cell="c", level="l", index=0, due_seconds=0.0)
    record = stream(pool, wire, asked, origin=clock(), timeout_seconds=60)

The clock of a request starts when it was **due**. Every piece of the answer is stamped when its
bytes left the kernel, before it is parsed, so chunks that arrived together carry one time. A chunk
is content when it carries text or, where the server counts as it goes, when its count has grown;
role, usage and `[DONE]` are not content.
"""

from __future__ import annotations

import gevent
import msgspec

from loadtests.load_generator.http_connection import Pool, clock
from loadtests.records.request_record import RequestRecord

ERROR_BYTES = 500  # most of a refusal's words


class GaveUp(BaseException):
    """Thrown into a request that is still on its way when the drain time is over."""


class _Text(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Text | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, gc=False):
    """What is read of one SSE event of /v1/completions or /v1/chat/completions."""

    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Answer(msgspec.Struct):
    """What has come back so far: the connection's Reader."""

    status: int | None = None
    contents: list[float] = []  # stamps of content, on `clock`
    first_chunk_tokens: int | None = None
    counted: int = 0  # tokens, as the server counts beside chunks
    usage: _Usage | None = None
    finish_reason: str | None = None
    is_done: bool = False
    error: str | None = None
    error_message: str | None = None
    backend: str | None = None
    request_id: str | None = None
    received: float = 0.0  # when the last piece left the kernel
    rest: bytes = b""  # a line that is not whole yet, or the body of a refusal

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        for name, value in headers:
            match name.lower():
                case b"x-crossover-backend":
                    self.backend = value.decode("latin-1")
                case b"x-request-id":
                    self.request_id = value.decode("latin-1")

    def body(self, data: bytes, received: float) -> bool:
        """True once there is content: until then somebody waits for its first."""
        if self.status != 200:
            self.rest += data[: ERROR_BYTES - len(self.rest)]
            return True
        self.received = received
        if self.rest:
            data = self.rest + data
        elif (
            data.startswith(b"data: {")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n\n")
        ):
            self._data(data[6:], received)  # nearly all there is: one whole event
            return bool(self.contents)
        lines = data.split(b"\n")
        self.rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._data(line[5:].strip(), received)
        return bool(self.contents)

    def ended(self) -> None:
        """The answer is whole: what is left of it, and whether it may end so."""
        if self.status != 200:
            self.error = "refused" if self.status == 429 else f"http_{self.status}"
            self.error_message = self.rest.decode(errors="replace").strip() or None
            return
        if self.rest:
            self.body(b"\n", self.received)
        if self.finish_reason in ("abort", "error"):  # as vLLM and SGLang say it
            self.fail("cut_off", f"the server ended it: finish_reason {self.finish_reason}")
        elif not self.is_done and self.finish_reason is None:
            self.fail("cut_off", "the stream ended without [DONE] and without a finish reason")

    def fail(self, error: str, message: str) -> None:
        """The first thing that went wrong is the one that is kept."""
        if self.error is None:
            self.error, self.error_message = error, message

    def _data(self, data: bytes, received: float) -> None:
        try:
            chunk = _decode_chunk(data)
        except msgspec.MsgspecError as problem:
            if data == b"[DONE]":
                self.is_done = True
            else:
                self.fail("stream_error", f"a chunk that is none: {problem}")
            return
        if chunk.error is not None:
            self.fail("stream_error", bytes(chunk.error).decode(errors="replace")[:ERROR_BYTES])
            return
        usage = chunk.usage
        if usage is not None:
            self.usage = usage
        if not chunk.choices:
            return
        is_content = False
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
            piece, delta = choice.text, choice.delta
            if delta is not None:
                piece = delta.content or delta.reasoning_content or delta.reasoning
                is_content = is_content or delta.tool_calls is not None
            is_content = is_content or bool(piece)
        count = usage.completion_tokens if usage is not None else None
        if is_content or (count is not None and count > self.counted):
            if not self.contents:
                self.first_chunk_tokens = count
            self.contents.append(received)
        if count is not None:
            self.counted = count


def stream(
    pool: Pool, wire: bytes, asked: RequestRecord, origin: float, timeout_seconds: float
) -> RequestRecord:
    """Send `wire` and read its stream to the end. What server or network do is `record.error`.

    `asked`: what is known of the request before. All times count from `origin`, on `clock`.
    """
    seen = Answer()
    sent = clock()
    try:
        with gevent.Timeout(timeout_seconds):
            pool.exchange(wire, seen)
        seen.ended()
    except gevent.Timeout:
        seen.fail("timeout", f"no end within {timeout_seconds:g} s")
    except GaveUp as problem:
        seen.fail("timeout", str(problem))
    except OSError as problem:
        if not seen.is_done:
            kind = "connection" if seen.status is None else "cut_off"
            seen.fail(kind, f"{type(problem).__name__}: {problem}")
    ended = clock()
    if not seen.contents:
        seen.fail("empty", "the stream ended well and held no content")
    contents = [round(moment - origin, 6) for moment in seen.contents]
    usage = seen.usage or _Usage()
    details = usage.prompt_tokens_details
    return msgspec.structs.replace(
        asked,
        due_seconds=round(asked.due_seconds, 6),
        sent_seconds=round(sent - origin, 6),
        first_content_seconds=contents[0] if contents else None,
        last_content_seconds=contents[-1] if contents else None,
        ended_seconds=round(ended - origin, 6),
        content_seconds=contents,
        first_chunk_tokens=seen.first_chunk_tokens,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=details.cached_tokens if details is not None else None,
        output_tokens=usage.completion_tokens,
        status=seen.status,
        error=seen.error,
        error_message=seen.error_message,
        finish_reason=seen.finish_reason,
        backend=seen.backend,
        request_id=seen.request_id,
    )
