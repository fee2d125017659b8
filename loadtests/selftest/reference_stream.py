"""One answer of the reference server: chunks, stalls and failures as `Truth` says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

clock = time.perf_counter
MODEL = "true-model"
json_bytes = msgspec.json.Encoder().encode


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the server does, unless a request's `truth` says otherwise. Times in seconds."""

    ttft: float = 0.02  # from having a slot to the first chunk
    gap: float = 0.005  # between chunks
    chunk_tokens: int = 1
    stall_at: int | None = None  # before this chunk ...
    stall: float = 0.0  # ... this much longer ...
    stall_every: int = 1  # ... in one of so many requests
    fail: str | None = None  # cut | error | garbage | no_content | status:NNN | hang | slam
    fail_every: int = 1  # one of so many requests fails
    usage: bool = True
    continuous: bool = True
    done: bool = True
    slots: int = 1_000_000
    # requests that may wait for a slot; more are answered with 429. None: any number
    waiting: int | None = None
    refuse: tuple[str, ...] = ()  # body fields that are answered with 400
    tokenizer: str | None = "vllm"
    key: str | None = None
    # a request whose client has gone gives its slot back; else it is served to its end
    cancels: bool = True
    case: str = ""  # nothing but a name: servers of different cases share no log
    headers_first: bool = False  # send the headers at once, the first chunk at its time
    echo: bool = (
        False  # request 7 is answered "w7 w7 ...", not "ab": shows which turn was sent back
    )


class Loop(Protocol):
    """The server: its clock and its slots."""

    def at(self, moment: float, what: Callable[[], None]) -> None: ...

    def leave(self) -> None: ...


class Client(Protocol):
    """The connection that the answer leaves by."""

    gone: bool

    def send(self, data: bytes) -> None: ...

    def answer(self, status: int, body: Any) -> None: ...

    def close(self) -> None: ...

    def ended(self) -> None: ...


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `entry` is its line of the log, which the answer completes."""

    path: str
    body: dict[str, Any]
    truth: Truth
    fail: str | None
    name: str
    number: int
    entry: dict[str, Any]


class Stream:
    """One answer on its way."""

    def __init__(self, client: Client, loop: Loop, asked: Asked) -> None:
        self._client = client
        self._loop = loop
        self._truth = asked.truth
        self._fail = asked.fail
        self._name = asked.name
        self._number = asked.number
        self._entry = asked.entry
        body = asked.body
        self._chat = asked.path.endswith("chat/completions")
        self._asked = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        self._streams = bool(body.get("stream"))
        prompt = body.get("prompt")
        if self._chat:
            prompt = " ".join(str(one.get("content")) for one in body["messages"])
        self._prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt or [])
        options = body.get("stream_options") or {}
        self._usage_each = self._truth.continuous and bool(options.get("continuous_usage_stats"))
        self._usage_last = self._truth.usage and (
            bool(options.get("include_usage")) or not self._streams
        )
        self._sent = 0
        self._has_slot = False
        self._started = False  # the headers have left
        self._over = False
        self._first = 0.0  # when the first chunk is due
        self._stalled = 0.0
        self._entry["body"] = {key: value for key, value in body.items() if key != "prompt"}
        if self._truth.echo:
            self._entry["prompt"] = prompt

    def is_gone(self) -> bool:
        return self._client.gone and self._truth.cancels

    def client_gone(self) -> None:
        """The client has closed the connection."""
        if self._truth.cancels and self._has_slot:
            self._end(False)

    def begin(self) -> None:
        """It has a slot now."""
        self._has_slot = True
        self._entry["began"] = now = clock()
        if self._fail == "hang":
            return
        if self._truth.headers_first and self._streams:
            self._client.send(self._head())
        self._first = now + self._truth.ttft
        self._loop.at(self._first, self._step)

    def _head(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return (
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            f"X-Request-Id: {self._name}\r\n\r\n"
        ).encode()

    def _step(self) -> None:
        """Writes one chunk and says when the next is due."""
        if self._over:
            return
        truth, chunks = self._truth, self._entry["chunks"]
        out = b""
        if self._streams:
            out = self._head()
            if not chunks and self._chat:
                out += _event(self._choice("", role=True))
        if self._fail == "no_content":
            self._last(out)
            return
        tokens = min(truth.chunk_tokens, self._asked - self._sent)
        self._sent += tokens
        if self._streams:
            out += _event(
                self._choice(self._words(tokens), usage=self._usage() if self._usage_each else None)
            )
        failing = self._fail in ("cut", "error", "garbage") and self._sent >= self._asked / 2
        if not chunks:
            self._entry["first_tokens"] = tokens
        self._entry["tokens"] = self._sent
        chunks.append(clock())
        if failing or self._sent >= self._asked:
            self._last(out)
            return
        if self._streams:
            self._client.send(out)
        if len(chunks) == truth.stall_at and self._number % truth.stall_every == 0:
            self._stalled = truth.stall
        self._loop.at(self._first + len(chunks) * truth.gap + self._stalled, self._step)

    def _last(self, out: bytes) -> None:
        """The end of the answer, as it was told to be; `out` goes before it."""
        done = self._truth.done and self._fail != "error"
        if self._fail == "cut":
            self._client.send(out)
            self._client.close()
            self._end(False)
            return
        if not self._streams:
            self._client.answer(
                200, self._choice(self._words(self._sent), finish="length", usage=self._usage())
            )
            self._end(True)
            return
        if self._fail == "error":
            out += _event({"error": {"message": "as told"}})
        elif self._fail == "garbage":
            out += _chunk(b"data: {nonsense\n\n")
        if done:
            out += _event(self._choice("", finish="length"))
        if self._usage_last:
            out += _event(
                {
                    "id": self._name,
                    "object": "usage",
                    "model": MODEL,
                    "choices": [],
                    "usage": self._usage(),
                }
            )
        if done:
            out += _chunk(b"data: [DONE]\n\n")
        self._client.send(out + b"0\r\n\r\n")
        self._end(True)

    def _end(self, whole: bool) -> None:
        if not self._over:
            self._over = True
            self._entry["whole"] = whole
            self._loop.leave()
            if whole and not self._client.gone:
                self._client.ended()

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._sent,
            "total_tokens": self._prompt + self._sent,
        }

    def _words(self, tokens: int) -> str:
        if self._truth.echo:
            return "".join(f"w{self._number} " for _ in range(tokens))
        return "ab " * tokens

    def _choice(
        self,
        text: str,
        role: bool = False,
        finish: str | None = None,
        usage: dict[str, int] | None = None,
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        kind = "text_completion"
        if self._chat and self._streams:
            said = {"delta": {"role": "assistant", "content": text} if role else {"content": text}}
            kind = "chat.completion.chunk"
        elif self._chat:
            said = {"message": {"role": "assistant", "content": text}}
            kind = "chat.completion"
        body: dict[str, Any] = {"id": self._name, "object": kind, "created": 0, "model": MODEL}
        body["choices"] = [{"index": 0, "finish_reason": finish} | said]
        if usage is not None:
            body["usage"] = usage
        return body


def _event(body: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + json_bytes(body) + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
