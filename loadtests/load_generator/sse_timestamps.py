"""One request over server-sent events, timed: bytes out, chunks in, one RequestRecord.

    pool = connect("http://127.0.0.1:8000")
    wire = post_bytes(pool, "/v1/completions", body)
    unsent = RequestRecord(cell="c", level="l", index=0, scheduled_seconds=0.0)
    record = stream(pool, wire, unsent, origin=clock(), timeout_seconds=60)

Latencies count from the scheduled time of a request. Each piece of the answer is stamped when its
bytes are read from the kernel, before it is parsed, so chunks that arrived together have the same
time.

A chunk is content if a reader would see something of it (text, reasoning, a part of a list, a tool
call) or, if the server counts tokens in every chunk, if the count has grown. Role, usage and
`[DONE]` are not content. An answer is complete with [DONE] or with a finish reason of OpenAI's API.
It has failed if there is an error in any form; the server's message is recorded.
"""

from __future__ import annotations

import errno
import os

import gevent
import msgspec

from crossover.loadtests.errors import LoadError
from crossover.loadtests.load_generator.completion_chunk import (
    MAX_WORDS,
    Chunk,
    ChunkChoice,
    ChunkUsage,
    ReasoningWatch,
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
from crossover.loadtests.load_generator.endpoint_access import redact
from crossover.loadtests.load_generator.http_connection import (
    Inflater,
    Pool,
    ResponseTooLarge,
    clock,
    is_inflatable,
)
from crossover.loadtests.records.request_record import RequestRecord

# Limits of one answer, by its output tokens. The hundreds of bytes of a token's event are far below
# the limit, and even a server that sends each character alone sends fewer events.
MAX_BYTES, MAX_BYTES_PER_TOKEN = 4 << 20, 1 << 10
MAX_EVENTS, MAX_EVENTS_PER_TOKEN = 1000, 4
MAX_EVENT_BYTES = 1 << 20  # of one event
UNKNOWN_TOKENS = 4096  # output tokens, where the record does not say how many were requested
MAX_STRAY_BYTES = 8192  # kept of an error response, and of lines that belong to no event
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# Errors of a connection that a limit of this machine prevents: open files, or ports.
CLIENT_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
END_REASONS = frozenset(("stop", "length", "tool_calls", "content_filter", "function_call"))
# Finish reasons of vLLM, SGLang, OpenRouter and DeepSeek for an answer that was aborted.
FAILURE_REASONS = frozenset(
    ("abort", "canceled", "cancelled", "failed", "timeout", "insufficient_system_resource")
)


def is_failure(reason: str | None) -> bool:
    """Whether a finish reason says that the server aborted the answer."""
    name = (reason or "").lower()
    return name in FAILURE_REASONS or name.endswith("error")


class GaveUp(BaseException):
    """Raised in the greenlet of a request that is still in flight when the drain time is over."""


class Answer(msgspec.Struct):
    """The response so far, as read from the connection (a reader of Connection.exchange)."""

    max_bytes: int = MAX_BYTES + UNKNOWN_TOKENS * MAX_BYTES_PER_TOKEN
    max_events: int = MAX_EVENTS + UNKNOWN_TOKENS * MAX_EVENTS_PER_TOKEN
    status: int | None = None
    contents: list[float] = []  # arrival times of content chunks, on `clock`
    first_answer: float | None = None  # arrival time of the first content that is not reasoning
    first_chunk_tokens: int | None = None
    usage: ChunkUsage | None = None
    finish_reason: str | None = None
    is_done: bool = False
    error: str | None = None
    error_message: str | None = None
    backend: str | None = None
    engine: int | None = None
    request_id: str | None = None
    location: str | None = None  # target of a redirect
    # Requests ask for no compression, but some proxies compress anyway.
    inflater: Inflater | None = None  # of a body in gzip or deflate
    encoding: str | None = None  # of a body in any other encoding
    received: float = 0.0  # when the last piece was read from the kernel
    is_stream: bool = False  # status 2xx
    is_plain: bool = False  # no event is incomplete, so the next piece may be a whole event
    has_content: bool = False
    is_watched: bool = True  # `watch` reads every chunk with content
    watch: ReasoningWatch = msgspec.field(default_factory=ReasoningWatch)
    skips_line_feed: bool = False  # the last piece ended with a CR
    is_begun: bool = False  # the first event has been read
    pending: bytearray = bytearray()  # an incomplete event, or the body of an error response
    stray: bytearray = bytearray()  # lines that belong to no event
    other_events: int = 0  # those that did not come alone in a piece, and those without choices

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Read the status and the headers."""
        self.status = status
        self.is_plain = self.is_stream = 200 <= status < 300
        for name, value in headers:
            match name.lower():
                case b"x-crossover-backend":
                    self.backend = _header_text(value)
                case b"x-crossover-engine" if value.strip().isdigit():
                    self.engine = int(value)
                case b"x-request-id":
                    self.request_id = _header_text(value)
                case b"location":
                    self.location = _header_text(value.partition(b"?")[0])  # may repeat the query
                case b"content-encoding" if value.strip().lower() not in (b"", b"identity"):
                    if is_inflatable(value):
                        self.inflater = Inflater(self.max_bytes)
                    else:
                        self.is_plain, self.encoding = False, _header_text(value)

    def body(self, data: bytes, received: float, is_inflated: bool = False) -> bool:
        """Read a piece of the body. Return whether the next pieces may be read later, which is so
        once there is content: the first content must be stamped at once. Raises ResponseTooLarge.
        """
        if self.inflater is not None and not is_inflated:
            try:
                for text in self.inflater.feed(data):
                    self.body(text, received, is_inflated=True)
            except ValueError as problem:
                self.fail("stream_error", str(problem))
            return self.has_content
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

    def check_size(self) -> None:
        """Raise ResponseTooLarge if there were more events than the answer can have."""
        if max(len(self.contents), self.other_events) > self.max_events:
            raise ResponseTooLarge(f"the answer has more than {self.max_events} events")

    def ended(self) -> None:
        """Read what is left at the end of the response, and check that the answer is complete."""
        if self.encoding is not None:
            reason = f"the body is compressed ({self.encoding}), but the request did not ask for it"
            self.fail("stream_error" if self.is_stream else f"http_{self.status}", reason)
            return
        if not self.is_stream:
            self.error = "refused" if self.status == 429 else f"http_{self.status}"
            self.error_message = words_of_body(bytes(self.pending)) or None
            if self.error_message is None and self.location is not None:
                self.error_message = printable_words(f"redirected to {self.location}")
            return
        if self.pending:  # the last event counts without the blank line after it, if it is whole
            self._read_event(bytes(self.pending), self.received, is_last=True)
        has_ended = self.is_done or (self.finish_reason or "").lower() in END_REASONS
        stray = self._read_stray()
        if is_failure(self.finish_reason):
            self.fail("cut_off", f"the server ended it: finish_reason {self.finish_reason}")
        elif not has_ended:
            reason = "the stream ended without [DONE] and without a finish reason"
            self.fail("cut_off", f"{reason}: {stray}" if stray else reason)

    def fail(self, error: str, message: str) -> None:
        """Record an error, unless an earlier one is recorded."""
        if self.error is None:
            self.error, self.error_message = error, message

    def _read_lines(self, data: bytes, received: float) -> None:
        """Read events in any form of WHATWG's standard: lines end with LF, CR or CRLF, and events
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
            search_start = len(pending) - 1
            pending += data
            if pending.find(b"\n\n", search_start) < 0:
                if len(pending) > MAX_EVENT_BYTES:
                    raise ResponseTooLarge(f"an event has more than {MAX_EVENT_BYTES} bytes")
                return
            data = bytes(pending)
        *events, incomplete_event = data.split(b"\n\n")
        self.other_events += len(events)
        self.check_size()
        for event in events:
            self._read_event(event, received)
        pending[:] = incomplete_event
        self.is_plain = not incomplete_event and not self.is_done

    def _read_event(self, event: bytes, received: float, is_last: bool = False) -> None:
        """Read one event, without the blank line after it. `is_last`: it may be incomplete."""
        if self.is_done:
            return
        if not self.is_begun:
            self.is_begun = True
            event = event.removeprefix(b"\xef\xbb\xbf")
        data_lines: list[bytes] = []
        name = b""
        for line in event.split(b"\n"):
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data_lines.append(value)
            elif field == b"event":
                name = value
            elif field == b"error":  # older versions of llama-server
                self.fail("stream_error", words_of_body(value))
            elif field not in (b"", b"id", b"retry"):
                self.stray += (line + b"\n")[: MAX_STRAY_BYTES - len(self.stray)]
        data = b"\n".join(data_lines).strip()
        if name.lower().endswith(b"error"):
            self.fail("stream_error", words_of_body(data) or "an error event without a message")
        elif data.startswith(b"[DONE]"):
            self.is_done = True
        elif data:
            self._read_data(data, received, is_last)

    def _read_data(self, data: bytes, received: float, is_last: bool) -> None:
        """Read an event's data. What the fast decoder refuses, the tolerant one reads.

        `is_last`: the data may be cut off, so it is no error if it is not JSON.
        """
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
        """Read a chunk. `data`: of its event, for fields that the struct does not have."""
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
            if self.is_watched:
                self._watch_content(chunk, count, received)
            self.contents.append(received)
        if usage is not None:
            self.usage = usage

    def _watch_content(self, chunk: Chunk, count: int | None, received: float) -> None:
        """Note the first content and the first content of the answer itself. `count`: the server's
        count of output tokens so far, if it gives one."""
        if not self.has_content:
            self.has_content = True
            self.first_chunk_tokens = count or None
        if self.watch.reads_answer(chunk):
            if self.first_answer is None:
                self.first_answer = received
            self.is_watched = self.watch.texts is not None

    def _has_grown(self, count: int) -> bool:
        """Whether the server's count shows that a chunk without visible content has a token. This
        needs a server that counts in every chunk, or an answer without any visible content.
        """
        earlier_count = 0 if self.usage is None else self.usage.completion_tokens or 0
        is_counting = self.first_chunk_tokens is not None
        return count > earlier_count and (is_counting or not self.has_content)

    def _finish(self, choice: ChunkChoice) -> None:
        """Read a finish reason. null and "" do not replace an earlier one."""
        reason = choice.finish_reason
        message = ""
        if isinstance(reason, dict):  # older versions of SGLang
            message, reason = words_of(reason.get("message") or ""), reason.get("type")
        if isinstance(reason, str) and reason and not is_failure(self.finish_reason):
            self.finish_reason = printable_words(reason)
        if message and is_failure(self.finish_reason):
            self.fail("cut_off", f"the server ended it: {message}")

    def _usage_over_earlier(self, data: bytes) -> ChunkUsage | None:
        """Return the token counts of an event, wherever it has them, completed with earlier ones;
        None: the event has none."""
        usage = usage_of_event(data)
        return usage if usage is None or self.usage is None else usage.over(self.usage)

    def _read_without_choices(self, data: bytes, received: float) -> None:
        """Read an event without choices: token counts at the end of a stream, an error, or
        nothing."""
        self.other_events += 1
        try:
            chunk = read_chunk(data)
        except ValueError as problem:  # in a part that decode_chunk skipped
            self.fail("stream_error", f"an event is not JSON: {problem}")
            return
        if chunk is not None and chunk.error:
            self.fail("stream_error", words_of(chunk.error))
        usage = self._usage_over_earlier(data)
        if usage is None or chunk is None:
            return
        if usage.completion_tokens and not self.has_content:
            self._watch_content(chunk, usage.completion_tokens, received)
            self.contents.append(received)
        self.usage = usage

    def _read_stray(self) -> str:
        """Return what the server sent outside of events, which may say why the stream ended. If it
        is an error or a complete answer, record that as the failure."""
        stray = bytes(self.stray)
        for text in (stray, *stray.splitlines()) if stray else ():
            try:
                value = read_json(text)
            except ValueError:
                continue
            if isinstance(value, list):
                value = next((item for item in value if isinstance(item, dict)), None)
            if isinstance(value, dict) and is_error(value):
                self.fail("stream_error", words_of(value))
            elif isinstance(value, dict) and value.get("choices"):
                self.fail("stream_error", "the endpoint answered in one piece, not in a stream")
        return words_of_body(stray)


def _header_text(value: bytes) -> str:
    """Return a header's value as a record has it."""
    return value[:MAX_WORDS].decode("latin-1")


def stream(
    pool: Pool,
    wire: bytes,
    unsent_record: RequestRecord,
    origin: float,
    timeout_seconds: float,
    watch: ReasoningWatch | None = None,
) -> RequestRecord:
    """Send `wire`, read its stream to the end, and return the record of the request. Errors of the
    server and the network are in `record.error`; none is raised. Raises LoadError if a limit of
    this machine prevents the connection, since that is no failure of the server.

    `unsent_record`: the fields known before sending. Times in it and in the result count from
    `origin`, on `clock`. `watch`: keeps the text of the answer.
    """
    tokens = unsent_record.requested_output_tokens or UNKNOWN_TOKENS
    answer = Answer(
        max_bytes=MAX_BYTES + tokens * MAX_BYTES_PER_TOKEN,
        max_events=MAX_EVENTS + tokens * MAX_EVENTS_PER_TOKEN,
    )
    if watch is not None:
        answer.watch = watch
    sent = clock()
    try:
        with gevent.Timeout(timeout_seconds):
            pool.exchange(wire, answer)
        answer.ended()
    except gevent.Timeout:
        if not answer.is_done:
            answer.fail("timeout", f"not finished after {timeout_seconds:g} s")
    except GaveUp as problem:
        if not answer.is_done:
            answer.fail("timeout", str(problem))
    except OSError as problem:
        if problem.errno in CLIENT_LIMITS:
            raise LoadError(
                f"no further connection can be opened ({os.strerror(problem.errno)}). Raise the "
                "limit of open files (ulimit -n), or lower the rate or the concurrency"
            ) from problem
        if not answer.is_done:
            error = "connection" if answer.status is None else "cut_off"
            answer.fail(error, f"{type(problem).__name__}: {problem}")
    except Exception as problem:  # whatever a server sent: a request that was sent has a record
        answer.fail("stream_error", f"{type(problem).__name__}: {problem}")
    ended = clock()
    if not answer.contents:
        answer.fail("empty", "the stream ended normally but had no content")
    contents = [round(moment - origin, 6) for moment in answer.contents]
    first_answer = answer.first_answer
    usage = answer.usage or ChunkUsage()
    message = answer.error_message
    return msgspec.structs.replace(
        unsent_record,
        scheduled_seconds=round(unsent_record.scheduled_seconds, 6),
        sent_seconds=round(sent - origin, 6),
        first_content_seconds=contents[0] if contents else None,
        last_content_seconds=contents[-1] if contents else None,
        ended_seconds=round(ended - origin, 6),
        first_answer_seconds=None if first_answer is None else round(first_answer - origin, 6),
        content_seconds=contents,
        first_chunk_tokens=answer.first_chunk_tokens,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        status=answer.status,
        error=answer.error,
        error_message=None if message is None else redact(message, pool.values),
        finish_reason=answer.finish_reason,
        backend=answer.backend,
        engine=answer.engine,
        request_id=answer.request_id,
    )
