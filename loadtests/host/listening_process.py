"""The process of this machine that serves a URL, so that its cores can be watched while it is
measured.

    listening_pid("http://127.0.0.1:8080")      # 4711; None: elsewhere, or not to be seen
"""

from __future__ import annotations

import os
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

import psutil

FORWARDERS = ("docker-proxy", "rootlessport", "slirp4netns", "pasta", "ssh")


def is_loopback(url: str) -> bool:
    """Return whether a URL is surely of this machine."""
    host = _parts(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def listening_pid(url: str) -> int | None:
    """Return the process that listens at a loopback URL.

    None: it is of another machine or user, it only forwards to a container or another machine, or
    it is this process.
    """
    if not is_loopback(url):
        return None
    parts = _parts(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            is_it = one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
            if not is_it or one.pid in (None, os.getpid()):
                continue
            if psutil.Process(one.pid).name() not in FORWARDERS:
                return int(one.pid)
    return None


def _parts(url: str) -> SplitResult:
    return urlsplit(url if "://" in url else f"http://{url}")
