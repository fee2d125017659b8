"""The HTTP server under the app: uvicorn with Crossover's signal handling, and its socket.

async with serving(app, listen("127.0.0.1", 8000), on_signal) as ended:
    await ended        # the server ended by itself
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn

from crossover.serving.errors import ServingError
from crossover.serving.http.http_protocol import HttpProtocol

CONNECTIONS = 4096
OTHER_DESCRIPTORS = 96  # file descriptors besides connections: engines, open files, the loop
SEND_BUFFER_BYTES = 128 << 10  # of one connection in the kernel; Linux doubles it


class CannotListen(ServingError):
    """The address is in use, or does not belong to this machine."""


def server_options(connections: int = CONNECTIONS) -> dict[str, Any]:
    """Return the arguments of uvicorn.Config that this app needs."""
    return {
        "http": HttpProtocol,
        "loop": "uvloop",
        "ws": "none",
        "lifespan": "off",
        "log_config": None,  # the server's own log takes uvicorn's lines too
        "log_level": "error",  # clients must not be able to fill the log with invalid requests
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # X-Forwarded-For is never trusted
        "timeout_keep_alive": 75,  # seconds that an idle connection stays open
        "timeout_graceful_shutdown": 5,
        "limit_concurrency": connections + 1,  # uvicorn refuses the one that reaches it
        "backlog": connections,
    }


def room_for_connections() -> int:
    """Return the maximum connections of this process, after raising its limit of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, min(CONNECTIONS + OTHER_DESCRIPTORS, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(1, min(CONNECTIONS, wanted - OTHER_DESCRIPTORS))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free port. Raises CannotListen."""
    try:
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        family, *_, address = socket.getaddrinfo(host, port, type=kind, flags=flags)[0]
        listener = socket.create_server(
            address, family=family, backlog=2048, dualstack_ipv6=family == socket.AF_INET6
        )
    except (OSError, UnicodeError) as problem:
        number = getattr(problem, "errno", None)  # str(problem) would repeat the address
        why = os.strerror(number) if number and number > 0 else problem
        advice = ". --port 0 takes a free port" if number == errno.EADDRINUSE else ""
        raise CannotListen(f"Cannot listen on {host}:{port}: {why}{advice}.") from problem
    # Connections inherit this; otherwise the kernel buffers megabytes for a stalled reader.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine can reach the socket."""
    return _address_of(listener).is_loopback


def is_local_name(host: str) -> bool:
    """Return whether a Host header names this machine: localhost or a loopback address, with or
    without a port."""
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    name = name.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def url_of(listener: socket.socket) -> str:
    """Return the URL of the socket on this machine; a wildcard address becomes the loopback."""
    address, port = _address_of(listener), listener.getsockname()[1]
    if address.is_unspecified:
        return f"http://{'[::1]' if address.version == 6 else '127.0.0.1'}:{port}"
    return f"http://{f'[{address}]' if address.version == 6 else address}:{port}"


def _address_of(listener: socket.socket) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(str(listener.getsockname()[0]))


@contextlib.asynccontextmanager
async def serving(
    app: Any, listener: socket.socket, on_signal: Callable[[], None]
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve on the socket until the block is left; the task ends if the server ended by itself.

    SIGTERM and SIGINT call `on_signal`.
    """
    server = uvicorn.Server(uvicorn.Config(app, **server_options(room_for_connections())))
    setattr(server, "capture_signals", contextlib.nullcontext)  # noqa: B010
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    gc.collect()
    gc.freeze()  # a collection must not walk through all present objects while tokens wait
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield task
    server.should_exit = True
    await task
