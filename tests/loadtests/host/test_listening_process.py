"""The process behind a URL of this machine: a real one, that listens on a real port."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from crossover.loadtests.host.child_processes import Child
from crossover.loadtests.host.listening_process import is_this_machine, listening_pid

LISTEN = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


def test_the_process_that_listens_is_found_by_its_port(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Child([sys.executable, "-c", LISTEN], log=log) as child:
        while not (text := log.read_text()).endswith("\n"):
            assert child.poll() is None
        port = int(text)
        for host in ("127.0.0.1", "localhost"):
            assert listening_pid(f"http://{host}:{port}/v1") == child.pid
        assert listening_pid(f"http://192.0.2.1:{port}") is None
    assert listening_pid(f"http://127.0.0.1:{port}") is None  # it is gone


def test_this_process_is_not_watched_as_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert listening_pid(f"http://127.0.0.1:{own.getsockname()[1]}") is None


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000", True),
        ("localhost:8000", True),
        ("http://[::1]:8000/v1", True),
        ("http://127.9.9.9", True),
        ("http://10.0.0.5:8000", False),
        ("https://localhost.example.com", False),
    ],
)
def test_only_loopback_is_surely_this_machine(url: str, is_here: bool) -> None:
    assert is_this_machine(url) == is_here
