"""Many connections, and clients that leave: tests.bench.pressure.connections in small, and the
limit of open files.
"""

import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from serving.http.connections import SEND_BUFFER_BYTES, listen
from tests.bench.pressure.connections import crowd, leavers, slot
from tests.bench.pressure.wire import run, serving


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
