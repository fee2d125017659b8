"""`crossover load` over several processes, which are real, over loopback; some are killed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from loadtests.campaign.progress import Progress
from loadtests.campaign.single_level import _wait_for_workers
from loadtests.cli.load_command import load
from loadtests.errors import LevelInterrupted, LoadError
from loadtests.generator.channel import LoadGenerator
from loadtests.generator.endpoint import Target
from loadtests.generator.http_client import connect, fetch, get_bytes
from loadtests.generator.launcher import GeneratorProcess, Listening, worker
from loadtests.generator.load_plan import LoadPlan
from loadtests.generator.messages import Recorded, Workers
from loadtests.generator.option_values import parse_arrivals, parse_place
from loadtests.generator.workers.member import allowed
from loadtests.host.processes import Child
from loadtests.metrics.level_summary import LATE_SECONDS
from loadtests.records.events import LevelAbandoned, of_kind
from loadtests.records.old_run_folder import LevelRecords, read_records
from loadtests.records.schema import RequestRecord
from loadtests.workload.arrivals import Poisson, due_times
from loadtests.workload.goodness_of_fit import check
from loadtests.workload.requests import Workload
from models.errors import CrossoverError
from tests.loadtests.campaign.checks import check_folder

Start = Callable[..., str]
ROOT = Path(__file__).parents[4]
LOAD = "--workload 16x8 --rate 60".split()
PING = {"sent": 0.0, "level": 1}


class Cluster:
    """A master and its workers as people start them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.place = f"127.0.0.1:{free.getsockname()[1]}"
        self.children: list[subprocess.Popen[str]] = []

    def start(self, *words: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [*before, sys.executable, "-m", "crossover", "load", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.children.append(child)
        return child

    def master(self, url: str, workers: int, *words: str) -> subprocess.Popen[str]:
        place = ("--master", "--bind", self.place, "--expect-workers", str(workers))
        return self.start(url, *LOAD, *words, *place, "--out", str(self.folder))

    def join(self, url: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return self.start(url, "--join", self.place, before=before)

    def run(self) -> Path:
        (folder,) = self.folder.glob("*-load")
        return folder

    def wait_for_records(self, least: int) -> None:
        """Until the level runs."""
        until = time.monotonic() + 90
        while sum(len(path.read_bytes().splitlines()) for path in self._records()) < least:
            assert time.monotonic() < until and self.children[0].poll() is None, self.said(0)
            time.sleep(0.05)

    def _records(self) -> list[Path]:
        return list(self.folder.glob("*-load/requests.jsonl"))

    def said(self, child: int) -> str:
        out = self.children[child].stdout
        assert out is not None
        return out.read()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for child in made.children:
        for one in (*psutil.Process(child.pid).children(True),) if child.poll() is None else ():
            one.kill()
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def finished(folder: Path) -> tuple[LevelRecords, list[LevelAbandoned]]:
    run = read_records(folder)
    (level,) = run.levels()
    return level, of_kind(run.events, LevelAbandoned)


def is_one_poisson_process(level: LevelRecords, rate: float) -> None:
    """Every due time of one seeded sequence, each once, and sent as a Poisson process."""
    start = level.started
    due = due_times(Poisson(), rate, start.window_seconds, start.seed, 60.0)
    counted = [r for r in level.requests if r.due_seconds < start.window_seconds]
    assert len({r.index for r in level.requests}) == len(level.requests)
    assert sorted(r.index for r in counted) == list(range(int(np.sum(due < start.window_seconds))))
    assert all(math.isclose(r.due_seconds, due[r.index], abs_tol=5e-3) for r in level.requests)
    sent = np.array([r.sent_seconds for r in counted if r.sent_seconds is not None])
    found = check(Poisson(), sent, rate, start.window_seconds, LATE_SECONDS)
    assert found.as_asked and found.cv is not None and 0.8 < found.cv < 1.2, found


def worker_of(joined: subprocess.Popen[str]) -> psutil.Process:
    """The Locust process that a `--join` started."""
    (child,) = psutil.Process(joined.pid).children()
    return child


def a_thousand_seconds_ahead() -> tuple[str, ...]:
    """A command's words to run it as if the machine had been booted earlier, where that can be."""
    words = ("unshare", "--time", "--monotonic", "1000", "--fork", "--kill-child")
    there = shutil.which("unshare")
    works = there and not subprocess.run([*words, "true"], capture_output=True).returncode
    return words if works else ()


def test_workers_that_joined_send_one_arrival_process_again_after_one_was_killed(
    truth_server: Start, cluster: Cluster
) -> None:
    url = truth_server(ttft=0.02, case="cluster")
    elsewhere = truth_server(ttft=0.02, case="masters-url")
    master = cluster.master(elsewhere, 2, "--duration", "3")
    doomed, _ = cluster.join(url), cluster.join(url, before=a_thousand_seconds_ahead())
    cluster.wait_for_records(10)
    (port,) = {
        one.laddr.ip
        for child in psutil.Process(master.pid).children(True)
        for one in child.net_connections()
        if one.status == "LISTEN"
    }
    assert port == "127.0.0.1", "nobody else can join"
    worker_of(doomed).kill()
    assert doomed.wait(30) == 2, "it says that it is gone"
    cluster.join(url)
    said = master.communicate(timeout=60)[0]
    assert master.returncode == 0, said
    assert re.search(r"worker \d on \S+ was lost in the middle of the level; measuring it", said)
    assert "2 of 2 workers are there" in said and "clock known to" in said
    check_folder(cluster.run())
    level, (abandoned,) = finished(cluster.run())
    assert (abandoned.level, level.name) == ("load#1.1", "load#1.2")
    assert "lost in the middle" in abandoned.reason
    is_one_poisson_process(level, 60.0)
    assert all(r.index % 2 == r.worker for r in level.requests)
    facts = level.finished.workers
    assert [one.worker for one in facts] == [0, 1]
    assert sum(one.due for one in facts) == len(level.requests)
    for one in facts:
        # The same time of day: what is said of its clock is nothing, within what is said of that.
        assert one.clock_uncertainty_seconds is not None and 0 < one.clock_uncertainty_seconds < 0.1
        assert one.clock_offset_seconds is not None and one.clock_moved_seconds is not None
        assert abs(one.clock_offset_seconds) <= one.clock_uncertainty_seconds + 1e-3
        assert abs(one.clock_moved_seconds) <= one.clock_uncertainty_seconds
        assert one.send_lag_p99_seconds is not None and one.cpu_share is not None

    def asked(server: str) -> int:
        with connect(server) as pool:
            log = json.loads(fetch(pool, get_bytes(pool, "/truth"))[2])
        return sum(entry["body"]["max_tokens"] == 8 for entry in log.values())

    assert asked(url) >= len(level.requests), "a worker sends to the URL of its own command"
    assert asked(elsewhere) <= 3, "and not to the master's, which probed it"
    for number in (2, 3):
        assert cluster.children[number].wait(60) == 0
        assert "the master has ended" in cluster.said(number)


@contextlib.contextmanager
def fleet(url: str, count: int, folder: Path) -> Iterator[tuple[LoadGenerator, list[Child]]]:
    """A master for four users, and workers that are there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listening = Listening(count, *free.getsockname())
    target = msgspec.json.encode(Target(url=url))
    with contextlib.ExitStack() as stack:
        process = GeneratorProcess(log=folder / "log", users=4, listening=listening)
        master = stack.enter_context(LoadGenerator(process))
        joined = [worker(listening.host, listening.port, target) for _ in range(count)]
        for one in joined:
            stack.enter_context(one)
        wait_for_workers(master, 60.0)
        with pytest.raises(LoadError, match=f"cannot listen on {listening.place}:"):
            GeneratorProcess(log=folder / "log", listening=listening)
        yield master, joined
        for one in (master.child, *joined):  # one may be stopped
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)


def wait_for_workers(master: LoadGenerator, seconds: float, least: int | None = None) -> None:
    assert master.listening is not None
    with Progress() as progress:
        _wait_for_workers(master, master.listening, seconds, progress, least)


def wait_until_there(master: LoadGenerator, count: int) -> None:
    until = time.monotonic() + 20
    for message in master.told():
        assert time.monotonic() < until
        if isinstance(message, Workers) and len(message.names) == count:
            return


def next_record(master: LoadGenerator, plan: LoadPlan | None = None) -> RequestRecord:
    """Of `plan`, or of the level that runs."""
    if plan is not None:
        master.tell(plan)
    until = time.monotonic() + 20
    for message in master.told():
        assert time.monotonic() < until, "neither a record, nor is a worker missed"
        if isinstance(message, Recorded):
            return message.record
    raise AssertionError("not reached")


def test_a_lost_worker_is_missed_at_once_and_the_others_send_the_next_level(
    truth_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a level and before it begins; in an open and in a closed loop."""
    url = truth_server(ttft=0.02, case="cluster")
    closed = LoadPlan(
        target=Target(url=url),
        workload=Workload(prompt_tokens=16, output_tokens=8),
        concurrency=4,
        window_seconds=60.0,
    )
    opened = msgspec.structs.replace(closed, concurrency=None, rate_per_second=60.0)
    with fleet(url, 3, tmp_path) as (master, (first, second, third)):
        next_record(master, opened)
        os.killpg(first.pid, signal.SIGKILL)
        with pytest.raises(LevelInterrupted, match=r"worker \d on \S+ was lost in the middle of"):
            while True:
                next_record(master)
        wait_for_workers(master, 1.2, least=1)
        assert "2 of 3 workers are there" in capsys.readouterr().err

        os.kill(second.pid, signal.SIGSTOP)  # it is there, and does not get ready
        with pytest.raises(LevelInterrupted, match="was lost before the beginning of the level"):
            next_record(master, opened)
        os.kill(second.pid, signal.SIGCONT)
        wait_until_there(master, 2)

        os.kill(second.pid, signal.SIGSTOP)
        master.tell(closed)
        time.sleep(0.5)
        os.kill(second.pid, signal.SIGKILL)
        with pytest.raises(LevelInterrupted, match="was lost before the beginning of the level"):
            next_record(master)
        assert next_record(master, closed).worker == 0
        seen = {next_record(master).worker for _ in range(20)}
        assert seen == {0}, "one sends it all, users included"

        os.kill(third.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(LevelInterrupted, match="was lost in the middle of the level"):
            while True:
                next_record(master)
        assert time.monotonic() - began > 4, "it is connected, and silent"
        with pytest.raises(LevelInterrupted, match="no worker is left"):
            next_record(master, opened)
        with pytest.raises(LevelInterrupted, match="0 of 3 workers joined"):
            wait_for_workers(master, 1.0, least=1)


@pytest.mark.parametrize(
    ("sent", "how"), [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "stands still")]
)
def test_a_process_that_does_not_get_as_far_as_to_connect_is_missed(
    sent: signal.Signals, how: str, tmp_path: Path
) -> None:
    with LoadGenerator(GeneratorProcess(log=tmp_path / "log", processes=2)) as master:
        until = time.monotonic() + 30
        while not (own := psutil.Process(master.child.pid).children()):
            assert time.monotonic() < until
            time.sleep(0.01)
        own[0].send_signal(sent)
        with pytest.raises(LevelInterrupted, match=f"a process of it {how} before the beginning"):
            for _ in master.told():
                assert time.monotonic() < until
        with contextlib.suppress(psutil.NoSuchProcess):
            own[0].kill()


def test_a_worker_that_joins_while_others_have_users_is_there(tmp_path: Path) -> None:
    """Locust's master gives it users in the same breath as the answer to "ready"."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as master:
        master.linger = 0
        port = master.bind_to_random_port("tcp://127.0.0.1")

        def receive() -> tuple[bytes, str]:
            assert master.poll(20_000), "the worker says no more"
            client, message = master.recv_multipart()
            return client, msgspec.msgpack.decode(message)[0]

        users = {
            "timestamp": time.time(),
            "user_classes_count": {"Traffic": 1},
            "host": None,
            "stop_timeout": 0.0,
            "parsed_options": {},
        }
        with worker("127.0.0.1", port, msgspec.json.encode(Target(url="http://mine"))) as joined:
            client, kind = receive()
            assert kind == "client_ready"
            for name, data in (("ack", {"index": 0}), ("spawn", users)):
                master.send_multipart([client, msgspec.msgpack.encode((name, data, None))])
            while receive()[1] != "spawning_complete":
                pass
            plan = LoadPlan(
                target=Target(url="http://mine"),
                workload=Workload(prompt_tokens=16, output_tokens=8),
                rate_per_second=1.0,
                window_seconds=1.0,
            )
            text = msgspec.json.encode(plan).decode()
            told = {"plan": text, "index": 0, "workers": 1, "level": 1}
            for name, data in (*[("crossover_prepare", told)] * 2, ("crossover_ping", PING)):
                master.send_multipart([client, msgspec.msgpack.encode((name, data, None))])
            said = []
            while said.count("heartbeat") < 2:
                said.append(receive()[1])
            # Told twice to prepare, it answers once: that http://mine cannot be reached.
            assert said.count("crossover_failed") == said.count("crossover_pong") == 1, said
            assert joined.poll() is None


def test_a_worker_that_missed_what_it_was_to_prepare_is_told_again(
    truth_server: Start, cluster: Cluster
) -> None:
    """One that has just joined does not listen yet to more than Locust's own messages."""
    started = cluster.master(truth_server(ttft=0.02, case="masters-url"), 1, "--duration", "3")
    with zmq.Context() as context, context.socket(zmq.DEALER) as joined:
        joined.linger = 0
        joined.identity = b"here_1"
        joined.connect(f"tcp://{cluster.place}")

        def send(kind: str, data: object) -> None:
            joined.send(msgspec.msgpack.encode((kind, data, "here_1")))

        def next_plan() -> dict[str, Any]:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                assert started.poll() is None, cluster.said(0)
                if joined.poll(500):
                    kind, data, _ = msgspec.msgpack.decode(joined.recv())
                    if kind == "crossover_prepare":
                        return dict(data)
                send("heartbeat", {"state": "ready", "current_cpu_usage": 0})
            raise AssertionError("the master tells nothing to prepare")

        send("client_ready", -1)  # of any version
        assert next_plan() == next_plan()


def test_a_killed_process_of_this_machine_is_replaced(
    truth_server: Start, cluster: Cluster
) -> None:
    url = truth_server(ttft=0.02, case="cluster")
    words = ("--duration", "2", "--workers", "2", "--out", str(cluster.folder))
    child = cluster.start(url, *LOAD, *words)
    cluster.wait_for_records(10)
    (locust,) = [
        one for one in psutil.Process(child.pid).children() if "fast_locust" in str(one.cmdline())
    ]
    locust.children()[0].kill()
    said = child.communicate(timeout=60)[0]
    assert child.returncode == 0, said
    assert "was lost in the middle of the level; measuring it once more" in said
    level, abandoned = finished(cluster.run())
    assert len(abandoned) == 1 and len(level.finished.workers) == 2
    is_one_poisson_process(level, 60.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 1.0, "workers": 2, "master": True}, "give one of them"),
        ({"rate": 1.0, "bind": "0.0.0.0"}, "--bind is of --master"),
        ({"rate": 1.0, "expect_workers": 2}, "--expect-workers is of --master"),
        ({"concurrency": 2, "workers": 3}, "--concurrency 2 is too few for 3 workers"),
        ({"join": "host", "rate": 1.0}, "--join takes no --rate"),
        ({"join": "host", "master": True}, "--join takes no --master"),
        ({"rate": 1.0, "workers": 0}, "--workers must be at least 1, got 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(CrossoverError, match=message):
        load(url="http://127.0.0.1:9", **given)


def test_places() -> None:
    assert parse_place("--join", "host", 5557) == ("host", 5557)
    assert parse_place("--join", "10.0.0.7:99", 5557) == ("10.0.0.7", 99)
    assert parse_place("--join", "::1", 5557) == ("::1", 5557)
    assert parse_place("--join", "[::1]:99", 5557) == ("::1", 99)
    for wrong in ("", "host:tea", "host:99999", "host/path", "bob@host"):
        with pytest.raises(LoadError, match=f"--join must be HOST or HOST:PORT, got {wrong!r}"):
            parse_place("--join", wrong, 5557)


def test_a_worker_that_joined_obeys_within_its_own_command() -> None:
    """A stranger's plan: neither its URL nor its key nor its files are ours."""
    plan = LoadPlan(
        target=Target(url="http://evil", model="m", api_key_env="HOME", verify_tls=False),
        rate_per_second=1.0,
        requests_file="/tmp/x",
    )
    own = Target(url="http://mine", api_key_env="KEY")
    found = allowed(plan, own)
    assert found.target == Target(url="http://mine", model="m", api_key_env="KEY")
    assert found.requests_file is None and allowed(plan, None) == plan
    trace = LoadPlan(
        target=own, rate_per_second=1.0, arrivals=parse_arrivals("trace:path=/etc/passwd")
    )
    rows = LoadPlan(target=own, rate_per_second=1.0, workload=Workload(file="/etc/passwd"))
    for files in (trace, rows):
        with pytest.raises(LoadError, match="reads no trace on its machine"):
            allowed(files, own)
