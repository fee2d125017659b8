"""The process of this machine that serves a URL, so that its cores can be watched while it is
measured.

    listening_pid("http://127.0.0.1:8080")      # 4711; None: on another machine, or not visible
"""

from __future__ import annotations

import os
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

import psutil

# Processes that forward connections to a container or to another machine.
FORWARDERS = ("docker-proxy", "rootlessport", "slirp4netns", "pasta", "ssh")


def is_this_machine(url: str) -> bool:
    """Return whether a URL certainly refers to this machine."""
    host = _parts(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def listening_pid(url: str) -> int | None:
    """Return the id of the process that listens at a loopback URL.

    None: it runs on another machine or under another user, it is one of FORWARDERS, or it is this
    process.
    """
    if not is_this_machine(url):
        return None
    parts = _parts(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr:
                continue
            pid = connection.pid
            if connection.laddr.port != port or pid is None or pid == os.getpid():
                continue
            if psutil.Process(pid).name() not in FORWARDERS:
                return int(pid)
    return None


def _parts(url: str) -> SplitResult:
    return urlsplit(url if "://" in url else f"http://{url}")
