"""What goes over a connection between the front and a replica. Pure.

    sent = frame(b"some data", is_last=True)
    Frames().fed(sent)                        # [Frame(b"some data", True)]

The front sends the replica's token, once, and then requests, one after the other: one frame each.
The replica answers with a frame that is the head, and with the body in one frame or more.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

Headers = list[tuple[bytes, bytes]]
TOKEN_BYTES = 32

_LENGTH = struct.Struct(">I")
_LAST = 1 << 31  # in the length: nothing of this answer follows


class Address(NamedTuple):
    """Where a replica is asked. `token`: what it wants to see first."""

    host: str
    port: int
    token: bytes


class Request(NamedTuple):
    """A request whose key and size the front has checked. `key`: the name of its key; None: the
    server has none. `peer`: serving.http.auth.peer_of it."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    key: str | None
    peer: str


class Head(NamedTuple):
    """How an answer begins."""

    status: int
    headers: Headers


class Frame(NamedTuple):
    data: bytes
    is_last: bool


def frame(data: bytes, is_last: bool = False) -> bytes:
    """`data` as it is sent: 4 bytes with its length before it."""
    return _LENGTH.pack(len(data) | (_LAST if is_last else 0)) + data


class Frames:
    """Frames out of bytes as they come."""

    def __init__(self) -> None:
        self._held = bytearray()

    def fed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now."""
        held = self._held
        held += data
        found = []
        at = 0
        while len(held) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, at)
            begin = at + _LENGTH.size
            end = begin + (length & ~_LAST)
            if end > len(held):
                break
            found.append(Frame(bytes(held[begin:end]), length >= _LAST))
            at = end
        del held[:at]
        return found


encode = msgspec.msgpack.Encoder().encode
request_of = msgspec.msgpack.Decoder(Request).decode
head_of = msgspec.msgpack.Decoder(Head).decode
