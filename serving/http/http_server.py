"""The HTTP server under the app: uvicorn's, with our signals; and its listening socket.

async with server.serving(listen("127.0.0.1", 8000), holds, on_signal):
    await server.ended        # a signal came, or the server ended by itself
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
from prometheus_client import Histogram

from serving.errors import ServingError
from serving.http.body_limits import Limits
from serving.metrics import watch_loop

OTHER_DESCRIPTORS = 96  # beside connections: engines, files that are being read, the loop's own
SEND_BUFFER_BYTES = 128 << 10  # of one connection in the kernel; Linux doubles it
KEEP_ALIVE_SECONDS = 75  # of a connection with nothing on it


class CannotListen(ServingError):
    """The address is taken, or not this machine's."""


def server_options(limits: Limits) -> dict[str, Any]:
    """Arguments of uvicorn.Config that belong to this app, whoever runs it."""
    return {
        "http": "httptools",
        "loop": "uvloop",
        "ws": "none",
        "lifespan": "off",
        "log_config": None,  # the server's own log takes uvicorn's lines too
        "log_level": "error",  # a line for each wrong request is a stranger's to write
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # nothing here believes X-Forwarded-For
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": 5,
        "limit_concurrency": limits.connections + 1,  # uvicorn refuses the one that reaches it
        "backlog": min(limits.connections, 4096),
    }


def room_for_connections(wanted: int) -> int:
    """Connections that this process may have, `wanted` at most; raises its limit of descriptors.

    Raises ServingError where hardly any is left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    least = OTHER_DESCRIPTORS + 2
    if soft < least:
        raise ServingError(f"{least} descriptors at least are needed, ulimit -n says {soft}")
    return min(wanted, soft - OTHER_DESCRIPTORS)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 takes a free one. Raises CannotListen in one sentence."""
    try:
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        family, *_, address = socket.getaddrinfo(host, port, type=kind, flags=flags)[0]
        listener = socket.create_server(
            address, family=family, backlog=2048, dualstack_ipv6=family == socket.AF_INET6
        )
    except (OSError, OverflowError, UnicodeError) as problem:
        taken = getattr(problem, "errno", None) == errno.EADDRINUSE
        advice = "; --port 0 takes a free one" if taken else ""
        number = getattr(problem, "errno", None)  # else the sentence has the address again
        why = os.strerror(number) if number and number > 0 else problem
        raise CannotListen(f"cannot listen on {host}:{port}: {why}{advice}") from problem
    # Connections inherit this. Else the kernel keeps megabytes for a reader that stalls.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    host = str(listener.getsockname()[0]).partition("%")[0]
    return ipaddress.ip_address(host).is_loopback


def url_of(listener: socket.socket) -> str:
    """The URL under which this machine reaches the socket; a wildcard address is its loopback."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer:
    """`ended` is done once a signal came, or the server ended by itself. `signals`: how many."""

    def __init__(self, app: Any, limits: Limits) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, **server_options(limits)))
        # Signals are ours: drain, then close.
        setattr(self._server, "capture_signals", contextlib.nullcontext)  # noqa: B010
        self.signals = 0
        self.ended: asyncio.Future[None]
        self.aborting: asyncio.Future[Any] | None = None  # kept, or it would be collected

    @contextlib.asynccontextmanager
    async def serving(
        self, listener: socket.socket, holds: Histogram, on_signal: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Listen until the block is left. `holds` observes how long the event loop was held."""
        loop = asyncio.get_running_loop()
        self.ended = loop.create_future()

        def end(*_: Any) -> None:
            if not self.ended.done():
                self.ended.set_result(None)

        def signalled() -> None:
            self.signals += 1
            end()
            on_signal()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled)
        gc.collect()
        gc.freeze()  # no collection walks through what is there now while tokens wait
        watching = asyncio.create_task(watch_loop(holds))
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        serving.add_done_callback(end)
        yield
        watching.cancel()
        self._server.should_exit = True
        await serving
