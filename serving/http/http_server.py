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

MAX_CONNECTIONS = 4096
RESERVED_DESCRIPTORS = 96  # file descriptors for engines, open files and the event loop
# Seconds that responses get to reach their clients when the server ends. Then the connections are
# closed: a client that does not read would hold the server.
CLOSING_SECONDS = 5.0
SEND_BUFFER_BYTES = 128 << 10  # of one connection in the kernel; Linux doubles it


class CannotListen(ServingError):
    """The address is in use, or does not belong to this machine."""


def server_options(connections: int = MAX_CONNECTIONS) -> dict[str, Any]:
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
        # Seconds. Only if closing the connections does not end the requests: uvicorn then cancels
        # them, and logs a traceback of each.
        "timeout_graceful_shutdown": round(CLOSING_SECONDS) + 5,
        "limit_concurrency": connections + 1,  # uvicorn refuses the connection that reaches it
        "backlog": connections,
    }


def allow_connections() -> int:
    """Raise this process's limit of open files as far as MAX_CONNECTIONS need it and the hard limit
    allows; return how many connections it then can have."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = max(soft_limit, min(MAX_CONNECTIONS + RESERVED_DESCRIPTORS, hard_limit))
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard_limit))
    return max(1, min(MAX_CONNECTIONS, descriptors - RESERVED_DESCRIPTORS))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free port. Raises CannotListen."""
    try:
        candidates = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = candidates[0]
        is_ipv6 = family == socket.AF_INET6
        # uvicorn calls listen() again, with the backlog of `server_options`.
        listener = socket.create_server(
            address, family=family, backlog=2048, dualstack_ipv6=is_ipv6
        )
    except (OSError, UnicodeError) as problem:
        error_number = getattr(problem, "errno", None)
        why = str(problem)
        if error_number is not None and error_number > 0:  # negative: name resolution failed
            why = os.strerror(error_number)  # unlike str(problem), without the address
        advice = ". --port 0 takes a free port" if error_number == errno.EADDRINUSE else ""
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
    host = host.strip().lower()
    if host.startswith("["):  # an IPv6 address, [::1]:8000
        name = host[1:].partition("]")[0]
    else:
        name = host.partition(":")[0]
    name = name.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def url_of(listener: socket.socket) -> str:
    """Return the URL of the socket on this machine. A wildcard address such as 0.0.0.0 becomes the
    loopback address."""
    address = _address_of(listener)
    port = listener.getsockname()[1]
    host = str(address)
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


def _address_of(listener: socket.socket) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(str(listener.getsockname()[0]))


@contextlib.asynccontextmanager
async def serving(
    app: Any, listener: socket.socket, on_signal: Callable[[], None]
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve on the socket until the block is left; the task ends if the server ended by itself.

    SIGTERM and SIGINT call `on_signal`.
    """
    server = uvicorn.Server(uvicorn.Config(app, **server_options(allow_connections())))
    # uvicorn would handle the signals itself and stop before running requests have finished.
    setattr(server, "capture_signals", contextlib.nullcontext)  # noqa: B010
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, on_signal)
    # Frozen objects are left out of later garbage collections, which delay tokens.
    gc.collect()
    gc.freeze()
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield task
    server.should_exit = True
    await asyncio.wait([task], timeout=CLOSING_SECONDS)
    for connection in [*server.server_state.connections]:
        connection.transport.abort()
    await task
