"""Locust as a real child against a server that knows the truth: due times, send delay, drains."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from crossover.loadtests.errors import LevelInterrupted
from crossover.loadtests.load_generator.http_connection import connect, fetch, get_bytes
from crossover.loadtests.load_generator.level_messages import (
    Ended,
    GeneratorEvent,
    LoadPlan,
    Started,
)
from crossover.loadtests.load_generator.locust_process import LoadGenerator
from crossover.loadtests.load_generator.openai_endpoint import Target
from crossover.loadtests.records.request_record import RequestRecord
from crossover.serving.workload.arrivals import Constant, Poisson, due_times
from crossover.serving.workload.request_lengths import RequestSpec, Workload

Start = Callable[..., str]
SMALL = Workload(prompt_tokens=16, output_tokens=8)
USERS = 3


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadGenerator]:
    """One load generator for all levels of this module: it takes one plan after the other."""
    with LoadGenerator(log=tmp_path_factory.mktemp("alone") / "log") as generator:
        yield generator


def told(generator: LoadGenerator, plan: LoadPlan) -> list[GeneratorEvent]:
    """All that it says of one level."""
    return [message for message in generator.run(plan) if message is not None]


def plan_of(url: str, **changes: Any) -> LoadPlan:
    return LoadPlan(**({"target": Target(url=url), "workload": SMALL, "seed": 5} | changes))


def level(
    generator: LoadGenerator, url: str, **changes: Any
) -> tuple[list[RequestRecord], Ended, dict[str, Any]]:
    """One level; its records, the load generator's account, and what the server saw."""
    messages = told(generator, plan_of(url, **changes))
    records = [message for message in messages if isinstance(message, RequestRecord)]
    account = messages[-1]
    assert isinstance(messages[0], Started) and isinstance(account, Ended)
    assert len(records) == account.recorded == account.due
    with connect(url) as pool:
        log = json.loads(fetch(pool, get_bytes(pool, "/truth"))[2])
    return records, account, log


@pytest.mark.alone
def test_every_request_leaves_when_it_is_due_whatever_comes_back(
    alone: LoadGenerator, truth_server: Start
) -> None:
    """One slot and answers of 0.3 s at 15/s: the queue grows to dozens, and not one request waits
    for another to be sent.
    """
    records, account, log = level(
        alone,
        truth_server(slots=1, ttft=0.25, case="open"),
        rate=15.0,
        window_seconds=3.0,
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


def test_what_a_load_generator_cannot_do_is_said_and_the_next_level_runs(
    truth_server: Start, tmp_path: Path
) -> None:
    with LoadGenerator(log=tmp_path / "log") as generator:
        plan = plan_of("http://127.0.0.1:9", rate=1.0)
        with pytest.raises(LevelInterrupted, match="failed: .*127.0.0.1:9 cannot be reached"):
            told(generator, plan)
        _, account, _ = level(generator, truth_server(case="next"), rate=9.0, window_seconds=1.0)
        assert account.due > 0


def test_a_killed_load_generator_leaves_what_it_told(truth_server: Start, tmp_path: Path) -> None:
    url = truth_server(case="kill")
    with LoadGenerator(log=tmp_path / "log") as generator:
        records = 0
        with pytest.raises(LevelInterrupted, match="ended early .*SIGKILL"):
            for message in generator.run(plan_of(url, rate=50.0, window_seconds=60.0)):
                records += isinstance(message, RequestRecord)
                if records == 20:
                    os.killpg(generator.pid, signal.SIGKILL)
        assert records >= 20
        level(generator, url, rate=20.0, window_seconds=1.0)


def test_a_level_that_is_left_ends_its_processes(truth_server: Start, tmp_path: Path) -> None:
    url = truth_server(case="left")
    with LoadGenerator(log=tmp_path / "log") as generator:
        running = generator.run(plan_of(url, rate=50.0, window_seconds=60.0))
        assert isinstance(next(one for one in running if one is not None), Started)
        before = generator.pid
        running.close()  # type: ignore[attr-defined]
        assert not os.path.exists(f"/proc/{before}")


def test_given_requests_leave_when_they_are_due(alone: LoadGenerator, truth_server: Start) -> None:
    """A burst, and one more: with the lengths that were asked, whatever the workload says."""
    asks = tuple(RequestSpec(index, 10 + index, 5) for index in range(4))
    records, _, log = level(
        alone, truth_server(case="given"), asks=asks, due=(0.0, 0.0, 0.0, 0.2), window_seconds=5.0
    )
    records.sort(key=lambda record: record.index)
    assert [record.prompt_tokens for record in records] == [10, 11, 12, 13]
    assert [record.scheduled_seconds for record in records] == [0.0, 0.0, 0.0, 0.2]
    assert all((r.ended_seconds or 9) < 1.0 for r in records), "and the level ends with the last"


def test_single_streams_are_as_many_as_asked(alone: LoadGenerator, truth_server: Start) -> None:
    url = truth_server(case="single")
    records, _, _ = level(alone, url, concurrency=1, requests=5, window_seconds=30.0)
    assert sorted(record.index for record in records) == [0, 1, 2, 3, 4]
    records.sort(key=lambda record: record.index)
    for before, after in pairwise(records):
        assert after.scheduled_seconds >= (before.ended_seconds or 0.0)


def test_a_closed_loop_keeps_its_number(alone: LoadGenerator, truth_server: Start) -> None:
    records, _, _ = level(
        alone,
        truth_server(ttft=0.05, case="closed"),
        concurrency=USERS,
        window_seconds=2.0,
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
    alone: LoadGenerator, truth_server: Start
) -> None:
    """The last requests of the window end among as many others as the first did."""
    records, account, _ = level(
        alone,
        truth_server(slots=99, ttft=0.5, case="follow"),
        rate=20.0,
        arrivals=Constant(),
        window_seconds=1.2,
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


def test_a_thousand_requests_a_second_are_told_whole(
    alone: LoadGenerator, truth_server: Start
) -> None:
    """A thousand requests a second: every record arrives once, whole."""
    records, account, log = level(
        alone,
        truth_server(ttft=0.005, case="many"),
        rate=1000.0,
        window_seconds=1.5,
        workload=Workload(prompt_tokens=16, output_tokens=1),
    )
    assert len(records) == account.recorded == len({record.index for record in records}) > 1200
    assert {record.request_id for record in records if record.request_id} <= set(log)
