"""Locust as a real child against a server that knows the truth: due times, send delay, drains."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossover.loadtests.errors import LevelInterrupted, ServerLost
from crossover.loadtests.load_generator.http_connection import connect, fetch, get_bytes
from crossover.loadtests.load_generator.level_messages import Ended, LoadPlan
from crossover.loadtests.load_generator.locust_process import LoadGenerator
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.level_plan import Burst, LevelPlan
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.workload.arrivals import Constant, Poisson, due_times
from crossover.serving.workload.request_lengths import Workload

Start = Callable[..., str]
SMALL = Workload(prompt_tokens=16, output_tokens=8)
USERS = 3


@pytest.fixture(scope="module")
def shared_generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadGenerator]:
    """One load generator for all levels of this module: it takes one plan after the other."""
    with LoadGenerator(log=tmp_path_factory.mktemp("alone") / "log") as generator:
        yield generator


def load_of(url: str, plan: LevelPlan, **changes: Any) -> LoadPlan:
    plan = msgspec.structs.replace(plan, seed=5)
    return LoadPlan(**({"target": Target(url=url), "plan": plan, "workload": SMALL} | changes))


def level(
    generator: LoadGenerator, url: str, plan: LevelPlan, **changes: Any
) -> tuple[list[RequestRecord], Ended, dict[str, Any]]:
    """One level; its records, the load generator's account, and what the server saw."""
    records: list[RequestRecord] = []
    starts: list[int] = []  # the records before each start
    rows, account = generator.level(
        load_of(url, plan, **changes),
        on_start=lambda unix_seconds: starts.append(len(records)),
        on_record=records.append,
    )
    assert starts == [0]
    assert len(records) == rows.count == account.recorded == account.due
    with connect(url) as pool:
        log = json.loads(fetch(pool, get_bytes(pool, "/truth"))[2])
    return records, account, log


@pytest.mark.quiet_machine
def test_every_request_leaves_when_it_is_due_whatever_comes_back(
    shared_generator: LoadGenerator, truth_server: Start
) -> None:
    """One slot and answers of 0.3 s at 15/s: the queue grows to dozens, and not one request waits
    for another to be sent.
    """
    records, account, log = level(
        shared_generator,
        truth_server(slots=1, ttft=0.25, case="open"),
        LevelPlan(rate=15.0, window_seconds=3.0),
        drain_seconds=2.0,
    )
    due = due_times(Poisson(), 15.0, 3.0, 5)
    assert sorted(record.index for record in records) == list(range(len(due))), (
        "each once, none lost"
    )
    by_index = sorted(records, key=lambda record: record.index)
    assert all(
        math.isclose(record.scheduled_seconds, at, abs_tol=1e-6)
        for record, at in zip(by_index, due, strict=True)
    )
    send_delays = [
        record.sent_seconds - record.scheduled_seconds
        for record in records
        if record.sent_seconds is not None
    ]
    assert len(send_delays) == len(records) and min(send_delays) >= 0
    assert statistics.median(send_delays) < 0.003, "requests wait in the client"
    # The server agrees: requests arrived at their due times, not when slots became free.
    arrived = sorted(entry["arrived"] for entry in log.values())[2:]  # without those of the probe
    span = arrived[-1] - arrived[0]
    assert abs(span - (due[-1] - due[0])) < 0.5
    late = [record for record in records if record.error == "timeout"]
    assert late, "what was on its way at the end of the drain time is on record"
    assert all("2 s after the last scheduled" in (record.error_message or "") for record in late)
    assert (account.due, account.recorded) == (len(due), len(due))
    good = [record for record in by_index if record.error is None]
    assert good[-1].first_content_seconds is not None
    assert good[-1].first_content_seconds - good[-1].scheduled_seconds > 0.5, (
        "latency counts the wait that an open loop causes"
    )


def test_a_level_that_cannot_run_is_reported_and_the_next_one_runs(
    truth_server: Start, tmp_path: Path
) -> None:
    with LoadGenerator(log=tmp_path / "log") as generator:
        plan = LevelPlan(rate=9.0, window_seconds=1.0)
        with pytest.raises(LevelInterrupted, match="failed: .*127.0.0.1:9 cannot be reached"):
            generator.level(load_of("http://127.0.0.1:9", plan))
        _, account, _ = level(generator, truth_server(case="next"), plan)
        assert account.due > 0


def test_what_this_machine_cannot_hold_is_no_failure_of_the_server(
    truth_server: Start, tmp_path: Path
) -> None:
    url = truth_server(slots=1, ttft=3.0, case="limits")
    with LoadGenerator(log=tmp_path / "log") as generator:
        load = load_of(url, LevelPlan(rate=1e5, window_seconds=100.0))
        with pytest.raises(LevelInterrupted, match="10,000,000 arrivals, but at most 2,000,000"):
            generator.level(load)
    with LoadGenerator(log=tmp_path / "log") as generator:
        level(generator, truth_server(case="quick"), LevelPlan(rate=9.0, window_seconds=0.5))
        files = len(os.listdir(f"/proc/{generator.pid}/fd")) + 8
        resource.prlimit(generator.pid, resource.RLIMIT_NOFILE, (files, files))
        load = load_of(url, LevelPlan(rate=50.0, window_seconds=2.0))
        with pytest.raises(LevelInterrupted, match="failed: no further connection .*ulimit -n"):
            generator.level(load)


def test_a_killed_load_generator_leaves_the_records_it_sent(
    truth_server: Start, tmp_path: Path
) -> None:
    url = truth_server(case="kill")
    with LoadGenerator(log=tmp_path / "log") as generator:
        records: list[RequestRecord] = []

        def kill_after_20(record: RequestRecord) -> None:
            records.append(record)
            if len(records) == 20:
                os.killpg(generator.pid, signal.SIGKILL)

        load = load_of(url, LevelPlan(rate=50.0, window_seconds=60.0))
        with pytest.raises(LevelInterrupted, match="ended early .*SIGKILL"):
            generator.level(load, on_record=kill_after_20)
        assert len(records) >= 20
        level(generator, url, LevelPlan(rate=20.0, window_seconds=1.0))


@pytest.mark.parametrize("moment", ["on_start", "on_record", "on_tick"])
def test_a_level_that_its_caller_leaves_ends_its_processes(
    truth_server: Start, tmp_path: Path, moment: str
) -> None:
    def leave(_: object) -> None:
        raise ServerLost("the server has ended")

    load = load_of(truth_server(case=moment), LevelPlan(rate=50.0, window_seconds=60.0))
    with LoadGenerator(log=tmp_path / "log") as generator:
        before = generator.pid
        with pytest.raises(ServerLost):
            generator.level(load, **{moment: leave})
        assert not os.path.exists(f"/proc/{before}")


def test_the_requests_of_a_burst_leave_together_with_its_lengths(
    shared_generator: LoadGenerator, truth_server: Start
) -> None:
    """Whatever lengths the workload has."""
    burst = Burst(prompt_tokens=(10, 11, 12, 13), output_tokens=(5, 5, 6, 5))
    plan = LevelPlan(burst=burst, window_seconds=5.0)
    records, _, _ = level(shared_generator, truth_server(case="given"), plan)
    records.sort(key=lambda record: record.index)
    assert [record.prompt_tokens for record in records] == [10, 11, 12, 13]
    assert [record.output_tokens for record in records] == [5, 5, 6, 5]
    assert [record.scheduled_seconds for record in records] == [0.0] * 4
    assert all((r.ended_seconds or 9) < 1.0 for r in records), "and the level ends with the last"


def test_single_streams_are_as_many_as_requested(
    shared_generator: LoadGenerator, truth_server: Start
) -> None:
    url = truth_server(case="single")
    plan = LevelPlan(concurrency=1, requests=5, window_seconds=30.0)
    records, _, _ = level(shared_generator, url, plan)
    assert sorted(record.index for record in records) == [0, 1, 2, 3, 4]
    records.sort(key=lambda record: record.index)
    for before, after in pairwise(records):
        assert after.scheduled_seconds >= (before.ended_seconds or 0.0)


def test_chosen_requests_leave_one_at_a_time_with_their_lengths(
    shared_generator: LoadGenerator, truth_server: Start
) -> None:
    burst = Burst(prompt_tokens=(30, 10, 20), output_tokens=(2, 3, 4))
    plan = LevelPlan(concurrency=1, burst=burst, requests=3, window_seconds=30.0)
    records, _, _ = level(shared_generator, truth_server(case="chosen"), plan)
    records.sort(key=lambda record: record.index)
    assert [record.prompt_tokens for record in records] == [30, 10, 20]
    assert [record.output_tokens for record in records] == [2, 3, 4]
    for before, after in pairwise(records):
        assert after.scheduled_seconds >= (before.ended_seconds or 0.0)


def test_a_closed_loop_keeps_its_number(
    shared_generator: LoadGenerator, truth_server: Start
) -> None:
    records, _, _ = level(
        shared_generator,
        truth_server(ttft=0.05, case="closed"),
        LevelPlan(concurrency=USERS, window_seconds=2.0),
    )
    assert len({record.index for record in records}) == len(records) > 20
    edges = sorted(
        [(r.scheduled_seconds, 1) for r in records]
        + [(r.ended_seconds or 0.0, -1) for r in records]
    )
    in_flight = most = 0
    for _, step in edges:
        in_flight += step
        most = max(most, in_flight)
    assert most == USERS
    assert max(record.scheduled_seconds for record in records) < 2.0


def test_load_goes_on_until_the_last_answer_that_counts(
    shared_generator: LoadGenerator, truth_server: Start
) -> None:
    """The last requests of the window end among as many others as the first did."""
    records, account, _ = level(
        shared_generator,
        truth_server(slots=99, ttft=0.5, case="follow"),
        LevelPlan(rate=20.0, window_seconds=1.2),
        arrivals=Constant(),
        follow_seconds=20.0,
    )
    counted = [record for record in records if record.scheduled_seconds < 1.2]
    later = [record for record in records if record.scheduled_seconds >= 1.2]
    assert all(record.error is None for record in counted)
    last = max(record.ended_seconds or math.inf for record in counted)
    beside = [r for r in later if r.scheduled_seconds < last < (r.ended_seconds or 0.0) + 0.1]
    assert sorted(record.index for record in counted) == list(range(24))
    assert len(beside) >= 8 and abs(len(later) - 20 * (last - 1.2)) <= 4
    unanswered = [record for record in later if record.error is not None]
    assert len(unanswered) > 5
    assert all("all requests that count have ended" in (r.error_message or "") for r in unanswered)


def test_a_thousand_requests_a_second_are_all_recorded(
    shared_generator: LoadGenerator, truth_server: Start
) -> None:
    """A thousand requests a second: every record arrives once, whole."""
    records, account, log = level(
        shared_generator,
        truth_server(ttft=0.005, case="many"),
        LevelPlan(rate=1000.0, window_seconds=1.5),
        workload=Workload(prompt_tokens=16, output_tokens=1),
    )
    assert len(records) == account.recorded == len({record.index for record in records}) > 1200
    assert {record.request_id for record in records if record.request_id} <= set(log)
