"""Connections between the front and replicas: noticed to be dead, and encrypted where Ray's are.

With RAY_USE_TLS=1 both sides show the certificate that Ray's own connections have on their node
(RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY), and each asks for one of RAY_TLS_CA_CERT.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl

DEAD_SECONDS = 20  # of silence of the other machine, until a connection counts as lost
_PROBES = 4


def watch(transport: asyncio.BaseTransport) -> None:
    """Have the kernel close the connection where the other machine is gone without a word."""
    of: socket.socket = transport.get_extra_info("socket")
    of.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    of.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_SECONDS // _PROBES)
    of.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_SECONDS // _PROBES)
    of.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES - 1)
    of.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000)


def server_tls() -> ssl.SSLContext | None:
    """For a replica; None without RAY_USE_TLS."""
    return _context(ssl.PROTOCOL_TLS_SERVER)


def client_tls() -> ssl.SSLContext | None:
    """For the front; None without RAY_USE_TLS."""
    return _context(ssl.PROTOCOL_TLS_CLIENT)


def _context(kind: int) -> ssl.SSLContext | None:
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.SSLContext(kind)
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
    context.verify_mode = ssl.CERT_REQUIRED
    return context
