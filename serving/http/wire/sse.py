"""Server-sent events, and the JSON in them.

head, tail = content_frame(chunk)             # of a chunk whose text is MARK
data = head + encode("hello") + tail          # one content event
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
PIECE = 4096  # values that are encoded at once
MARK = "\u0001text\u0001"

encode = msgspec.json.Encoder().encode
_MARK_JSON = encode(MARK)


def in_pieces(values: Sequence[Any]) -> msgspec.Raw:
    """A long list as JSON; for a thread beside the event loop, which a whole list would hold up."""
    pieces = (encode(values[at : at + PIECE])[1:-1] for at in range(0, len(values), PIECE))
    return msgspec.Raw(b"[%s]" % b",".join(pieces))


def event(value: Any) -> bytes:
    """One server-sent event with `value` as JSON."""
    return b"data: " + encode(value) + b"\n\n"


def content_frame(chunk: Any) -> tuple[bytes, bytes]:
    """The event of a chunk whose text is `MARK`, cut at the text.

    Only the text differs between the content chunks of one choice: the rest is encoded once.
    """
    head, found, tail = event(chunk).partition(_MARK_JSON)
    assert found, "the chunk does not hold MARK"
    return head, tail
