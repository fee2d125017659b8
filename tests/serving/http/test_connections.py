"""Many connections, and clients that leave: tests.bench.pressure.connections in small, the limit of
open files, and what a connection may make the parser do.
"""

import contextlib
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from serving.http.connections import SEND_BUFFER_BYTES, listen
from serving.http.limits import Limits
from tests.bench.pressure.connections import crowd, leavers, slot
from tests.bench.pressure.wire import run, serving
from tests.serving.fakes import FakeSupervisor, app_on, served
from tests.serving.http.test_app_streams import connected, read_all, read_until

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
WELL = b'"ok"}'
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def test_a_crowd_streams_at_once_and_a_third_of_it_leaves_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    arguments = (
        "--slots",
        "200",
        "--context",
        "512",
        "--no-prefix-reuse",
        "--option",
        "step_seconds=0.03",
    )
    with serving("fake", *arguments, folder=tmp_path) as server:
        found = run(crowd(server, streams=100, tokens=60))
        assert found["complete"] == 100 and found["nothing leaked"], found
        assert found["streaming at the same moment"] > 50
        found = run(leavers(server, requests=200, users=40))
        assert found["kept"] and 30 < found["left"] < 90, found


@pytest.mark.clock
def test_who_leaves_frees_the_slot_for_the_next_step(tmp_path: Path) -> None:
    """Two steps of 0.25 s: the rest of the one that runs, and the next one's own first. (Less than
    three: the machine may be busy.)
    """
    arguments = (
        "--slots",
        "1",
        "--context",
        "512",
        "--max-wait",
        "1000",
        "--option",
        "step_seconds=0.25",
    )
    with serving("fake", *arguments, folder=tmp_path) as server:
        found = run(slot(server, rounds=2, step_seconds=0.25))
    assert found["nothing leaked"] and 0 < found["at most"] < 3, found


@pytest.mark.parametrize(
    ("soft", "hard", "room"), [(200, 8192, 4096), (200, 1000, 904), (100, 100, 4)]
)
def test_the_limit_of_open_files_is_raised_as_far_as_connections_need_and_the_system_allows(
    soft: int, hard: int, room: int
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"the hard limit of open files is below {hard} here")
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
        "from serving.http.connections import room_for_connections; "
        "print(room_for_connections(4096), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(room), str(min(hard, max(soft, 4096 + 96))), str(hard)]


def test_the_kernel_keeps_little_for_a_reader_that_takes_nothing() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES


def test_fewer_connections_than_wanted_are_told(tmp_path: Path) -> None:
    serve = f"{sys.executable} -m serving fake --port 0 --ready-file {tmp_path}/ready"
    command = f"ulimit -n 300; exec {serve} --option fail_cause=backend_missing"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "at most 204 connections at once, not 4096" in done.stderr


def test_a_connection_beyond_the_limit_takes_the_place_of_one_without_a_request(
    supervisor: FakeSupervisor,
) -> None:
    """Whoever opens as many as are allowed, and sends nothing or a head without an end, keeps
    nobody out; the one that has waited longest goes.
    """
    limits = Limits(connections=2)
    with (
        served(app_on(supervisor, limits=limits), limits) as port,
        connected(port, GET) as used,
        connected(port, GET[:9]) as slow,
    ):
        read_until(used, WELL)
        for _ in range(2):  # after the first of them, the server has seen both
            used.sendall(GET)
            read_until(used, WELL)
        with connected(port, GET) as third:
            read_until(third, WELL)
            with contextlib.suppress(ConnectionError):
                assert read_all(slow) == b""
            used.sendall(GET)
            read_until(used, WELL)


def test_more_requests_than_may_wait_for_an_answer_end_their_connection(port: int) -> None:
    """There was no bound to them: 14,000 in one segment held the loop for 0.16 s, and each kept
    kilobytes."""
    with connected(port, GET * 17) as client:
        read_until(client, WELL, 17)
    found = b""
    with connected(port, GET * 5000) as client, contextlib.suppress(ConnectionError):
        while data := client.recv(65536):
            found += data
    assert found.count(b"HTTP/1.1 ") <= 17


def test_a_head_of_many_fields_is_not_read_to_its_end(port: int) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n%s\r\n"
    with connected(port, head % (b"a: b\r\n" * 127)) as client:
        assert read_until(client, b"}").startswith(b"HTTP/1.1 200 ")
    with connected(port, head % (b"a:\r\n" * 600)) as client:
        assert b"more than 128 headers" in read_all(client)


def _in_chunks(body: bytes, size: int) -> Iterable[bytes]:
    for start in range(0, len(body), size):
        piece = body[start : start + size]
        yield b"%x\r\n%s\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def test_a_body_comes_in_chunks_of_some_size(port: int, supervisor: FakeSupervisor) -> None:
    """256 kB of chunks of one byte held the loop for 0.35 s."""
    small = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    large = json.dumps({"prompt": "hello", "max_tokens": 1, "user": "x" * 70_000}).encode()
    with connected(port, CHUNKED, *_in_chunks(small, 1), CHUNKED, *_in_chunks(large, 40)) as client:
        found = read_until(client, b'"usage"', 2)
    assert found.count(b"HTTP/1.1 200 ") == 2
    assert [len(one.prompt) for one in supervisor.submitted] == [2, 5]
    with connected(port, CHUNKED + b"1\r\nx\r\n" * 2000) as client:
        assert b"chunks_too_small" in read_all(client)
