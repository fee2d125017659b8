"""An endpoint that answers each request with given bytes, as other servers write them.

    with scripted(lambda request: sse(b'data: {"choices":[]}')) as url:
        ...

A handler takes a request and returns the bytes of the whole answer. A connection is closed after an
answer that has neither a length nor chunks.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class ReceivedRequest:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any  # JSON; None: there was none


Handler = Callable[[ReceivedRequest], bytes]


@contextlib.contextmanager
def scripted(handler: Handler, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The URL of an endpoint that runs until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, handler, tls), daemon=True).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def answered(body: Any, status: int = 200, kind: str = "application/json") -> bytes:
    """An answer with a length: JSON, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def sse(*events: bytes, end: bytes = b"\n\n") -> bytes:
    """A chunked event stream, a chunk an event."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    written = [event + end for event in events]
    return (
        head
        + b"\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in written)
        + (b"0\r\n\r\n")
    )


def _accept(listener: socket.socket, handler: Handler, tls: ssl.SSLContext | None) -> None:
    while True:
        try:
            plain, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(plain, handler, tls), daemon=True).start()


def _serve(plain: socket.socket, handler: Handler, tls: ssl.SSLContext | None) -> None:
    if tls is not None:
        with plain.dup() as beside:
            try:
                plain = tls.wrap_socket(plain, server_side=True)
            except OSError:  # the client did not like the certificate, or has none
                # Closed with bytes unread, the connection would be reset before the client reads
                # the alert.
                beside.settimeout(5.0)
                with contextlib.suppress(OSError):
                    while beside.recv(65536):
                        pass
                return
    with plain, plain.makefile("rb") as stream, contextlib.suppress(OSError):
        while first := stream.readline():
            method, path, _ = first.decode().split(" ", 2)
            headers: dict[str, str] = {}
            while line := stream.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            data = stream.read(int(headers.get("content-length", 0)))
            answer = handler(
                ReceivedRequest(method, path, headers, json.loads(data) if data else None)
            )
            plain.sendall(answer)
            head = answer.partition(b"\r\n\r\n")[0].lower()
            if b"content-length" not in head and b"transfer-encoding" not in head:
                return
