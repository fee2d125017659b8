"""The most of everything that a client can make large; what breaks a limit is a 4xx that names it.

A server for the open internet stands behind a proxy, which bounds connections, heads and time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import msgspec
from starlette.types import Receive, Scope

from serving.http.errors import ApiError, ClientGone

BYTES_PER_TOKEN = 32  # of JSON: a text of escapes such as \u4e00 has up to 12
HEADER_BYTES = 32 << 10
CLOSE = {"Connection": "close"}
_JSON_TYPE = re.compile(rb"application/(?:[\w.+-]+\+)?json(?:\s*;.*)?", re.IGNORECASE)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one request; `connections` and `waiting_for_load` of the process."""

    body_bytes: int | None = None  # None: by the tokens of all slots' contexts together
    body_seconds: float = 30.0  # from the head of a request to the end of its body
    connections: int = 4096
    waiting_for_load: int = 256  # requests for models that are being loaded
    sequences: int = 128  # prompts * n of one request
    answer_logprobs: int = 200_000  # log-probabilities of an answer that is not streamed
    deadline_seconds: float | None = None  # of every request; one may ask for a shorter deadline


def check_head(scope: Scope, headers: Mapping[bytes, bytes]) -> None:
    """Raises ApiError for a head that is too large, or that asks for another protocol: what then
    follows in the connection is no request of HTTP/1.1."""
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > HEADER_BYTES:
        text = f"the headers have {size} bytes; {HEADER_BYTES} are allowed"
        raise ApiError(431, text, "headers_too_large", headers=CLOSE)
    if scope["method"] == "POST" and b"upgrade" in headers:
        text = "Upgrade: this server speaks HTTP/1.1 alone; leave the header out"
        raise ApiError(400, text, "upgrade_refused", headers=CLOSE)


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, limits: Limits, slot_tokens: int
) -> bytes:
    """The body as it came. `slot_tokens`: of all slots' contexts together.

    Raises ApiError (408, 413, 415), ClientGone.
    """
    kind = headers.get(b"content-type", b"")
    if not _JSON_TYPE.fullmatch(kind.strip()):
        text = f"Content-Type {kind[:80].decode('latin-1')!r}; send application/json"
        raise ApiError(415, text, "unsupported_media_type")
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.strip().lower() != b"identity":
        text = f"Content-Encoding {encoding[:80].decode('latin-1')!r}; bodies are taken as they are"
        raise ApiError(415, text, "unsupported_content_encoding")
    most = limits.body_bytes or min(4 << 20, (64 << 10) + BYTES_PER_TOKEN * slot_tokens)
    length = headers.get(b"content-length", b"0")
    size = int(length) if length.isdigit() and int(length) > most else 0
    pieces: list[bytes] = []
    try:
        async with asyncio.timeout(limits.body_seconds):
            while size <= most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size <= most and not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        text = f"the body did not arrive within {limits.body_seconds:g} s"
        raise ApiError(408, text, "body_too_slow", headers=CLOSE) from None
    text = f"the body has {size} bytes or more; {most} are allowed"
    # The rest of a body is read and dropped, so that its sender gets to read the answer.
    raise ApiError(413, text, "body_too_large", headers=CLOSE if size > 4 * most else None)
