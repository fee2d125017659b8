"""The address a server listens on, and files that appear whole or not at all."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from pathlib import Path

from serving.errors import ServingError

SEND_BUFFER_BYTES = 128 << 10  # of the kernel for one connection; Linux doubles it for its own bookkeeping


class CannotListen(ServingError):
    """The address is taken, or not this machine's."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 takes a free one. Raises CannotListen in one sentence."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, OverflowError, UnicodeError) as problem:
        raise CannotListen(f"cannot listen on {host}:{port}: {getattr(problem, 'strerror', None) or problem}") from problem
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Its connections inherit this. Else the kernel keeps megabytes for each reader that takes nothing, and nobody sees it stall.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(2048)
        listener.set_inheritable(False)
    except (OSError, OverflowError) as problem:
        listener.close()
        advice = "; --port 0 takes a free one" if getattr(problem, "errno", None) == errno.EADDRINUSE else ""
        raise CannotListen(f"cannot listen on {host}:{port}: {getattr(problem, 'strerror', None) or problem}{advice}") from problem
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    host = str(listener.getsockname()[0]).partition("%")[0]
    return ipaddress.ip_address(host).is_loopback


def url_of(listener: socket.socket, tls: bool = False) -> str:
    """The URL under which this machine reaches the socket; a wildcard address is named by its loopback."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def write_atomically(path: Path, text: str) -> None:
    """The whole text or nothing: written beside and renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
