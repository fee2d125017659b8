"""Locust as people start it, and the form of its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from loadtests.load_generator.http_connection import Pool, fetch
from loadtests.load_generator.locust_process import PIPE_VARIABLE

LOCUSTFILE = Path(__file__).parents[3] / "loadtests" / "locustfile.py"


def locust(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    """Locust as people start it, from a folder that holds none of our packages."""
    environment = {name: value for name, value in os.environ.items() if name != PIPE_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def swarm(page: Pool, form: str, host: str | None = None, *fields: str) -> tuple[int, Any]:
    """What Locust's form answers. `host`: another Host than the page's own."""
    head = page.headers if host is None else f"Host: {host}\r\n"
    kind = "Content-Type: application/x-www-form-urlencoded"
    lines = "\r\n".join([kind, f"Content-Length: {len(form)}", *fields])
    status, _, answer = fetch(page, f"POST /swarm HTTP/1.1\r\n{head}{lines}\r\n\r\n{form}".encode())
    return status, json.loads(answer)
