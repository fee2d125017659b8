"""Load from several machines: a master and its workers, which are real, over loopback."""

from __future__ import annotations

import json
import math
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from loadtests.errors import LevelInterrupted, LoadError
from loadtests.host.child_processes import Child
from loadtests.load_generator.http_connection import connect, fetch, get_bytes
from loadtests.load_generator.load_options import parse_arrivals
from loadtests.load_generator.load_plan import Begin, Ended, LoadPlan, Share
from loadtests.load_generator.locust_process import LoadGenerator
from loadtests.load_generator.locust_workers import within
from loadtests.load_generator.openai_endpoint import Target
from loadtests.records.request_record import RequestRecord
from loadtests.workload.arrivals import Poisson, due_times
from loadtests.workload.request_lengths import Workload

Start = Callable[..., str]


@contextmanager
def fleet(url: str, count: int, folder: Path) -> Iterator[tuple[LoadGenerator, list[Child]]]:
    """A master, and workers that have joined it by `crossover load --join`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = free.getsockname()[:2]
    joined: list[Child] = []
    with ExitStack() as stack:
        with LoadGenerator(log=folder / "log", processes=count, listen=place) as master:
            for number in range(count):
                words = ("load", url, "--join", f"{place[0]}:{place[1]}")
                command = [sys.executable, "-m", "crossover", *words]
                joined.append(stack.enter_context(Child(command, log=folder / f"{number}.log")))
            yield master, joined
        for one in joined:
            one.wait(20.0)


def test_workers_send_one_arrival_process_to_the_url_of_their_own_command(
    truth_server: Start, tmp_path: Path
) -> None:
    url, elsewhere = truth_server(ttft=0.02, case="own"), truth_server(ttft=0.02, case="masters")
    plan = LoadPlan(
        target=Target(url=elsewhere),
        workload=Workload(prompt_tokens=16, output_tokens=8),
        rate=40.0,
        window_seconds=2.0,
        follow_seconds=2.0,
        seed=5,
    )
    with fleet(url, 2, tmp_path) as (master, joined):
        for _ in range(2):  # one level after the other
            told = list(master.run(plan))
            records = [one for one in told if isinstance(one, RequestRecord)]
            assert isinstance(told[-1], Ended)
            due = due_times(Poisson(), 40.0, 4.0, 5)
            counted = [record for record in records if record.due_seconds < 2.0]
            assert sorted(r.index for r in counted) == list(range(int((due < 2.0).sum())))
            assert all(math.isclose(r.due_seconds, due[r.index], abs_tol=1e-5) for r in records)
            assert all(record.error is None for record in counted)
    for one in joined:
        assert one.poll() == 0 and one.log is not None
        said = one.log.read_text()
        assert f"sends to {url} and nowhere else" in said and "the master has ended" in said

    def asked(server: str) -> int:
        with connect(server) as pool:
            return len(json.loads(fetch(pool, get_bytes(pool, "/truth"))[2]))

    assert asked(url) >= 2 * len(records) - 20 and asked(elsewhere) == 0


def test_a_worker_that_joined_obeys_within_its_own_command() -> None:
    """A stranger's plan: neither its URL nor its key nor its files are ours."""
    theirs = Target(url="http://evil", api_key_env="HOME", verify_tls=False)
    own = Target(url="http://mine", api_key_env="KEY")
    plan = LoadPlan(target=theirs, rate=1.0)
    found = within(Share(plan, 1, 2), own)
    assert found == Share(msgspec.structs.replace(plan, target=own), 1, 2)
    assert isinstance(began := within(Begin(1e9), own), Begin) and began.origin < 1e9
    trace = LoadPlan(target=own, rate=1.0, arrivals=parse_arrivals("trace:path=/etc/passwd"))
    rows = LoadPlan(target=own, rate=1.0, workload=Workload(file="/etc/passwd"))
    for files in (trace, rows):
        with pytest.raises(LoadError, match="reads no trace on its machine"):
            within(Share(files), own)


def test_a_lost_worker_fails_the_level(truth_server: Start, tmp_path: Path) -> None:
    url = truth_server(ttft=0.02, case="lost")
    plan = LoadPlan(target=Target(url=url), rate=40.0, window_seconds=60.0)
    with fleet(url, 2, tmp_path) as (master, joined):
        with pytest.raises(LevelInterrupted, match=r"the worker on \S+ was lost within the level"):
            for told in master.run(plan):
                if isinstance(told, RequestRecord):
                    joined[0].stop(0.0)
        joined[1].stop()


def test_a_master_says_where_it_cannot_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LoadError, match=f"127.0.0.1:{port} cannot be listened on"):
            LoadGenerator(listen=("127.0.0.1", port))
