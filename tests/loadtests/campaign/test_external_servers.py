"""Engines of others as real processes: those that serve, and those that fail in each way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from loadtests.campaign.external_servers import (
    HOST,
    Engine,
    StartedEngine,
    argv,
    free_port,
    holds_gpu,
    told_version,
)
from loadtests.errors import ServerFailed, ServerLost

SCRIPT = Path(__file__).with_name("scripted_server.py")
COMMAND = f"{sys.executable} -I -S {SCRIPT} {{port}}"
Start = Callable[..., tuple[StartedEngine, str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`running, url = start("never-ready", variables=["X"])`."""
    running: list[StartedEngine] = []

    def begin(*faults: str, **keys: object) -> tuple[StartedEngine, str]:
        engine = Engine(name="scripted", command=" ".join((COMMAND, *faults)), **keys)  # type: ignore[arg-type]
        port = free_port()
        words = argv(engine.command, {"port": port})
        cores = sorted(os.sched_getaffinity(0))[:1]
        running.append(StartedEngine(engine, words, cores, tmp_path / "log", stop_seconds=0.3))
        return running[-1], f"http://{HOST}:{port}"

    yield begin
    for one in running:
        one.stop()


def wait(engine: StartedEngine, url: str, seconds: float = 20.0) -> list[str]:
    said: list[str] = []
    engine.wait_ready(url, lambda what, _: said.append(what), seconds)
    return said


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_one_that_serves(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "visible")
    monkeypatch.setenv("NOT_MINE", "hidden")
    engine, url = start(variables=["MINE"], environment={"SET": "by the campaign"})
    wait(engine, url)
    (pid,) = engine.pids()
    seen = psutil.Process(pid).environ()
    assert seen["MINE"] == "visible" and seen["SET"] == "by the campaign" and "PATH" in seen
    assert not {"NOT_MINE", "PYTHONPATH", "PYTHONSAFEPATH"} & set(seen)
    assert psutil.Process(pid).cpu_affinity() == sorted(os.sched_getaffinity(0))[:1]
    assert told_version(url) == "0.0.7 (scripted)" and engine.trouble() is None
    assert engine.device() == "cpu"
    engine.stop()
    assert gone([pid, engine.pid]) and (tmp_path / "log").read_text() == "loading\n"
    assert "ended by SIGTERM" in (engine.trouble() or "")


def test_never_ready(start: Start) -> None:
    engine, url = start("never-ready")
    with pytest.raises(ServerFailed, match="not ready within 0.6 s: .*/health answered 503; .*log"):
        wait(engine, url, 0.6)


def test_an_end_at_the_start(start: Start) -> None:
    engine, url = start("dies-at-start")
    with pytest.raises(ServerFailed, match=r"did not start \(exit status 1: no such model\)"):
        wait(engine, url)
    engine, url = start("never-ready")
    while not engine.pids():
        time.sleep(0.01)
    os.kill(engine.pids()[0], signal.SIGKILL)
    with pytest.raises(ServerLost, match="killed while it started .*SIGKILL"):
        wait(engine, url)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    engine = Engine(name="x", command="no-such-program {port}")
    running = StartedEngine(engine, ["no-such-program", "1"], (), tmp_path / "log")
    with pytest.raises(ServerFailed, match="no-such-program cannot be run: No such file"):
        wait(running, "http://127.0.0.1:1")
    running.stop()


def test_deaf_to_sigterm(start: Start, tmp_path: Path) -> None:
    """It is killed with all that it started, also what has left its process group."""
    engine, url = start("deaf")
    wait(engine, url)
    pids = engine.pids()
    assert len(pids) == 2
    began = time.monotonic()
    engine.stop()
    assert gone(pids) and time.monotonic() - began < 5
    assert "not ended 0.3 s after SIGTERM: killed" in (tmp_path / "log").read_text()


def test_the_end_of_its_parent_is_its_end(tmp_path: Path) -> None:
    """A runner that is killed leaves no engine behind, deaf or not."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from loadtests.campaign.external_servers import Engine\n"
        "from loadtests.campaign.external_servers import StartedEngine\n"
        "words = sys.argv[2:]\n"
        "one = StartedEngine(Engine(name='x', command=''), words, (), Path(sys.argv[1]), 0.3)\n"
        "while len(one.pids()) < 2: time.sleep(0.01)\n"
        "print(*one.pids(), one.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    words = [sys.executable, "-I", "-S", str(SCRIPT), str(free_port()), "deaf"]
    runner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log"), *words], stdout=subprocess.PIPE
    )
    assert runner.stdout is not None
    with runner:
        pids = [int(word) for word in runner.stdout.readline().split()]
        runner.kill()
    until = time.monotonic() + 10
    while not gone(pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert len(pids) == 3 and gone(pids)


def test_a_gpu_is_seen_by_the_files_that_it_holds_open(tmp_path: Path) -> None:
    for pid, name in (("1", "/dev/nvidia0"), ("2", "/dev/null")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd" / "3").symlink_to(name)
    assert holds_gpu(1, tmp_path) and not holds_gpu(2, tmp_path) and not holds_gpu(3, tmp_path)


def test_a_port_is_free_when_it_is_given() -> None:
    with socket.socket() as one:
        one.bind((HOST, free_port()))
