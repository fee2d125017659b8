"""One request over server-sent events, timed: bytes out, chunks in, one RequestRecord.

    pool = connect("http://127.0.0.1:8000")
    wire = post_bytes(pool, "/v1/completions", body)
    asked = RequestRecord(cell="c", level="l", index=0, scheduled_seconds=0.0)
    record = stream(pool, wire, asked, origin=clock(), timeout_seconds=60)

The clock of a request starts when it was **due**. Every piece of the answer is stamped when its
bytes left the kernel, before it is parsed, so chunks that arrived together carry one time.

A chunk is content when a reader sees something of it (text, reasoning, a part of a list, a tool
call) or, where the server counts as it goes, when its count has grown; role, usage and `[DONE]` are
not content. An answer has ended well with [DONE] or with a finish reason of OpenAI's API. It has
failed with an error of whatever form, whose words are kept.
"""

from __future__ import annotations

import gevent
import msgspec

from crossover.loadtests.load_generator.completion_chunk import (
    Choice,
    Chunk,
    ReasoningWatch,
    Usage,
    decode_chunk,
    is_error,
    printable_words,
    read_chunk,
    read_json,
    shows,
    usage_of_event,
    words_of,
    words_of_body,
    words_of_event,
)
from crossover.loadtests.load_generator.http_connection import Pool, clock
from crossover.loadtests.records.request_record import RequestRecord

MAX_STRAY_BYTES = 8192  # of a refusal, or of what belongs to no event: its words are in them
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
END_REASONS = frozenset(("stop", "length", "tool_calls", "content_filter", "function_call"))
# As vLLM and SGLang, OpenRouter and DeepSeek say that an answer was given up.
FAILURE_REASONS = frozenset(
    ("abort", "canceled", "cancelled", "failed", "timeout", "insufficient_system_resource")
)


def is_failure(reason: str | None) -> bool:
    """Whether a finish reason says that an answer was given up."""
    name = (reason or "").lower()
    return name in FAILURE_REASONS or name.endswith("error")


class GaveUp(BaseException):
    """Thrown into a request that is still on its way when the drain time is over."""


class Answer(msgspec.Struct):
    """What has come back so far: the connection's Reader."""

    status: int | None = None
    contents: list[float] = []  # stamps of content, on `clock`
    first_answer: float | None = None  # stamp of the first content that is no reasoning
    first_chunk_tokens: int | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    is_done: bool = False
    error: str | None = None
    error_message: str | None = None
    backend: str | None = None
    request_id: str | None = None
    location: str | None = None  # where a redirection points to
    encoding: str | None = None  # of a body that is compressed, though that was not asked for
    received: float = 0.0  # when the last piece left the kernel
    is_stream: bool = False  # status 2xx
    is_plain: bool = False  # no event is under way: the next piece may be a whole one
    has_content: bool = False
    is_watched: bool = True  # `watch` is told of content
    watch: ReasoningWatch = msgspec.field(default_factory=ReasoningWatch)
    skips_line_feed: bool = False  # the last piece ended with a CR
    is_begun: bool = False
    pending: bytearray = bytearray()  # an event that is not whole yet, or the body of a refusal
    stray: bytearray = bytearray()  # lines that belong to no event

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.is_plain = self.is_stream = 200 <= status < 300
        for name, value in headers:
            match name.lower():
                case b"x-crossover-backend":
                    self.backend = value.decode("latin-1")
                case b"x-request-id":
                    self.request_id = value.decode("latin-1")
                case b"location":
                    self.location = value.decode("latin-1")
                case b"content-encoding" if value.strip().lower() not in (b"", b"identity"):
                    self.is_plain, self.encoding = False, value.decode("latin-1")

    def body(self, data: bytes, received: float) -> bool:
        """True once there is content: until then somebody waits for its first."""
        if (
            self.is_plain
            and data.startswith(b"data:")
            and (
                data.find(b"\n\n") == len(data) - 2  # nearly always: one whole event
                or data.find(b"\r\n\r\n") == len(data) - 4
            )
        ):
            data = data[5:]
            try:
                chunk = decode_chunk(data)
            except UNREADABLE:
                self._read_lines(b"data:" + data, received)
            else:
                self._read_chunk(chunk, data, received)
        elif self.is_stream and self.encoding is None:
            self._read_lines(data, received)
        else:
            self.pending += data[: MAX_STRAY_BYTES - len(self.pending)]
            return True
        return self.has_content

    def ended(self) -> None:
        """The answer is whole: what is left of it, and whether it may end so."""
        if self.encoding is not None:
            why = f"the body is compressed ({self.encoding}), but the request did not ask for it"
            self.fail("stream_error" if self.is_stream else f"http_{self.status}", why)
            return
        if not self.is_stream:
            self.error = "refused" if self.status == 429 else f"http_{self.status}"
            self.error_message = words_of_body(bytes(self.pending)) or None
            if self.error_message is None and self.location is not None:
                self.error_message = printable_words(f"redirected to {self.location}")
            return
        if self.pending:  # an event without the blank line after it counts where it is whole
            self._read_event(bytes(self.pending), self.received, is_last=True)
        has_ended = self.is_done or (self.finish_reason or "").lower() in END_REASONS
        stray = self._read_stray()
        if is_failure(self.finish_reason):
            self.fail("cut_off", f"the server ended it: finish_reason {self.finish_reason}")
        elif not has_ended:
            why = "the stream ended without [DONE] and without a finish reason"
            self.fail("cut_off", f"{why}: {stray}" if stray else why)

    def fail(self, error: str, message: str) -> None:
        """The first thing that went wrong is the one that is kept."""
        if self.error is None:
            self.error, self.error_message = error, message

    def _read_lines(self, data: bytes, received: float) -> None:
        """Events in any form that WHATWG's standard allows: lines end with LF, CR or CRLF, events
        with a blank line.
        """
        if self.is_done:
            return
        self.received = received
        if self.skips_line_feed and data.startswith(b"\n"):
            data = data[1:]
        self.skips_line_feed = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        pending = self.pending
        if pending:
            before = len(pending) - 1
            pending += data
            if pending.find(b"\n\n", before) < 0:
                return
            data = bytes(pending)
        *events, rest = data.split(b"\n\n")
        for event in events:
            self._read_event(event, received)
        pending[:] = rest
        self.is_plain = not rest and not self.is_done

    def _read_event(self, event: bytes, received: float, is_last: bool = False) -> None:
        """One event: its lines, without the blank one."""
        if self.is_done:
            return
        if not self.is_begun:
            self.is_begun = True
            event = event.removeprefix(b"\xef\xbb\xbf")
        parts: list[bytes] = []
        name = b""
        for line in event.split(b"\n"):
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                parts.append(value)
            elif field == b"event":
                name = value
            elif field == b"error":  # as llama-server once wrote it
                self.fail("stream_error", words_of_body(value))
            elif field not in (b"", b"id", b"retry"):
                self.stray += (line + b"\n")[: MAX_STRAY_BYTES - len(self.stray)]
        data = b"\n".join(parts).strip()
        if name.lower().endswith(b"error"):
            self.fail("stream_error", words_of_body(data) or "an error event without a message")
        elif data.startswith(b"[DONE]"):
            self.is_done = True
        elif data:
            self._read_data(data, received, is_last)

    def _read_data(self, data: bytes, received: float, is_last: bool) -> None:
        """The data of an event that came in several lines or pieces, or that is not ordinary."""
        try:
            chunk: Chunk | None = decode_chunk(data)
        except UNREADABLE:
            try:
                chunk = read_chunk(data)
            except ValueError as problem:
                if not is_last:
                    words = printable_words(data.decode(errors="replace"))
                    self.fail("stream_error", f"an event is not JSON ({problem}): {words}")
                return
        if chunk is not None:
            self._read_chunk(chunk, data, received)

    def _read_chunk(self, chunk: Chunk, data: bytes, received: float) -> None:
        """`data`: of the event, for what the struct does not hold."""
        choices, usage, count = chunk.choices, chunk.usage, None
        if chunk.error or chunk.x_groq:
            if chunk.error:
                self.fail("stream_error", words_of_event(data))
                return
            if isinstance(chunk.x_groq, dict) and chunk.x_groq.get("error"):
                self.fail("stream_error", words_of(chunk.x_groq["error"]))
        if usage is not None:
            count = usage.completion_tokens
            if not count or not usage.prompt_tokens:
                usage = self._usage_over_earlier(data)
                count = None if usage is None else usage.completion_tokens
        if not choices:
            self._read_without_choices(data, received)
            return
        is_content = False
        for choice in choices:
            if choice.finish_reason is not None:
                self._finish(choice)
                usage = usage or self._usage_over_earlier(data)
            delta = choice.delta or choice.message
            if delta is None:
                piece = choice.text
            else:
                piece = delta.content or delta.reasoning_content or delta.reasoning or choice.text
            if piece.__class__ is str and piece:
                is_content = True
            elif shows(piece) or (delta is not None and delta.shows):
                is_content = True
            if choice.error:
                self.fail("stream_error", words_of(choice.error))
        if is_content or (count is not None and self._has_grown(count)):
            if self.is_watched:  # so is the first content
                self._begin(chunk, count, received)
            self.contents.append(received)
        if usage is not None:
            self.usage = usage

    def _begin(self, chunk: Chunk, count: int | None, received: float) -> None:
        """Content, at least till that of the answer itself has come."""
        if not self.has_content:
            self.has_content = True
            self.first_chunk_tokens = count or None
        if self.watch.reads_answer(chunk):
            if self.first_answer is None:
                self.first_answer = received
            self.is_watched = self.watch.texts is not None

    def _has_grown(self, count: int) -> bool:
        """Whether a chunk without text is a token all the same, by a server that counts as it goes;
        or the answer is nothing but tokens that are not shown.
        """
        before = 0 if self.usage is None else self.usage.completion_tokens or 0
        return count > before and (self.first_chunk_tokens is not None or not self.has_content)

    def _finish(self, choice: Choice) -> None:
        """A finish reason: null and "" are none, and take none away that came before."""
        reason = choice.finish_reason
        words = ""
        if isinstance(reason, dict):  # as SGLang once wrote it
            words, reason = words_of(reason.get("message") or ""), reason.get("type")
        if isinstance(reason, str) and reason and not is_failure(self.finish_reason):
            self.finish_reason = printable_words(reason)
        if words and is_failure(self.finish_reason):
            self.fail("cut_off", f"the server ended it: {words}")

    def _usage_over_earlier(self, data: bytes) -> Usage | None:
        """Counts in other spellings and places, and earlier ones where an event has not all."""
        usage = usage_of_event(data)
        return usage if usage is None or self.usage is None else usage.over(self.usage)

    def _read_without_choices(self, data: bytes, received: float) -> None:
        """Counts at the end of a stream, an error, or nothing at all."""
        try:
            chunk = read_chunk(data)
        except ValueError as problem:  # in a field that nobody needed so far
            self.fail("stream_error", f"an event is not JSON: {problem}")
            return
        if chunk is not None and chunk.error:
            self.fail("stream_error", words_of(chunk.error))
        usage = self._usage_over_earlier(data)
        if usage is None or chunk is None:
            return
        if usage.completion_tokens and not self.has_content:
            self._begin(chunk, usage.completion_tokens, received)
            self.contents.append(received)
        self.usage = usage

    def _read_stray(self) -> str:
        """What the server said outside of events, where that may be why it ended."""
        stray = bytes(self.stray)
        for text in (stray, *stray.splitlines()) if stray else ():
            try:
                said = read_json(text)
            except ValueError:
                continue
            if isinstance(said, list):
                said = next((one for one in said if isinstance(one, dict)), None)
            if isinstance(said, dict) and is_error(said):
                self.fail("stream_error", words_of(said))
            elif isinstance(said, dict) and said.get("choices"):
                self.fail("stream_error", "the endpoint answered in one piece, not in a stream")
        return words_of_body(stray)


def stream(
    pool: Pool,
    wire: bytes,
    asked: RequestRecord,
    origin: float,
    timeout_seconds: float,
    watch: ReasoningWatch | None = None,
) -> RequestRecord:
    """Send `wire` and read its stream to the end. What server or network do is `record.error`.

    `asked`: what is known of the request before. All times count from `origin`, on `clock`.
    `watch`: keeps the answer's text, where that is wanted.
    """
    seen = Answer() if watch is None else Answer(watch=watch)
    sent = clock()
    try:
        with gevent.Timeout(timeout_seconds):
            pool.exchange(wire, seen)
        seen.ended()
    except gevent.Timeout:
        if not seen.is_done:
            seen.fail("timeout", f"not finished after {timeout_seconds:g} s")
    except GaveUp as problem:
        if not seen.is_done:
            seen.fail("timeout", str(problem))
    except OSError as problem:
        if not seen.is_done:
            kind = "connection" if seen.status is None else "cut_off"
            seen.fail(kind, f"{type(problem).__name__}: {problem}")
    ended = clock()
    if not seen.contents:
        seen.fail("empty", "the stream ended normally but had no content")
    contents = [round(moment - origin, 6) for moment in seen.contents]
    answer = seen.first_answer
    usage = seen.usage or Usage()
    return msgspec.structs.replace(
        asked,
        scheduled_seconds=round(asked.scheduled_seconds, 6),
        sent_seconds=round(sent - origin, 6),
        first_content_seconds=contents[0] if contents else None,
        last_content_seconds=contents[-1] if contents else None,
        ended_seconds=round(ended - origin, 6),
        first_answer_seconds=None if answer is None else round(answer - origin, 6),
        content_seconds=contents,
        first_chunk_tokens=seen.first_chunk_tokens,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        status=seen.status,
        error=seen.error,
        error_message=seen.error_message,
        finish_reason=seen.finish_reason,
        backend=seen.backend,
        request_id=seen.request_id,
    )
