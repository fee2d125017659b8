"""Locust as a real child against a server that knows the truth: due times, send lag, drains, workers, failures."""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtests.arrivals import Constant, Poisson, due_times
from loadtests.errors import LoadError, TargetUnusable
from loadtests.plan import (
    OPTIONS,
    PLAN_VARIABLE,
    LoadPlan,
    Outcome,
    check_plan,
    parse_arrivals,
    parse_workload,
    plan_of_options,
    read_plan,
    total,
)
from loadtests.records import RequestRecord
from loadtests.store import read_lines
from loadtests.streaming import connect, fetch, get_bytes
from loadtests.target import Target, probe
from loadtests.workload import Workload

Start = Callable[..., str]
LOCUSTFILE = Path(__file__).parents[2] / "loadtests" / "locustfile.py"
SMALL = Workload(prompt_tokens=16, output_tokens=8)


def locust(arguments: list[str], folder: Path, plan: LoadPlan | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != PLAN_VARIABLE}
    if plan is not None:
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        environment[PLAN_VARIABLE] = str(folder / "plan.json")
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary", *arguments]
    # From a folder that holds none of our packages: the locustfile must find them by itself.
    return subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=40)


def level(
    url: str, folder: Path, arguments: list[str] | None = None, **changes: Any
) -> tuple[list[RequestRecord], Outcome, dict[str, Any]]:
    """One level; returns its records, the load generators' account, and what the server saw."""
    plan = LoadPlan(target=Target(url=url), workload=SMALL, requests_file=str(folder / "r.jsonl"), outcome_file=str(folder / "o.json"),
                    started_file=str(folder / "s.json"), seed=5)  # fmt: skip
    done = locust(arguments or [], folder, msgspec.structs.replace(plan, **changes))
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = msgspec.json.decode((folder / "o.json").read_bytes(), type=Outcome)
    with connect(url) as pool:
        log = json.loads(fetch(pool, get_bytes(pool, "/truth"))[2])
    return read_lines(folder / "r.jsonl", RequestRecord).records, outcome, log


def test_every_request_leaves_when_it_is_due_whatever_comes_back(truth_server: Start, tmp_path: Path) -> None:
    """One slot and answers of 0.3 s at 15/s: the queue grows to dozens, and not one request waits for another to be sent."""
    records, outcome, log = level(
        truth_server(slots=1, ttft=0.25, case="open"), tmp_path, rate_per_second=15.0, window_seconds=3.0, drain_seconds=2.0
    )
    due = due_times(Poisson(), 15.0, 3.0, 5)
    assert sorted(record.index for record in records) == list(range(len(due))), "each once, none lost"
    by_index = sorted(records, key=lambda record: record.index)
    assert all(math.isclose(record.due_seconds, at, abs_tol=1e-6) for record, at in zip(by_index, due, strict=True))
    lags = [record.sent_seconds - record.due_seconds for record in records if record.sent_seconds is not None]
    assert len(lags) == len(records) and min(lags) >= 0
    assert statistics.median(lags) < 0.003, "requests wait in the client"
    # The server agrees: requests arrived at their due times, not when slots became free.
    arrived = sorted(
        entry["arrived"] for entry in log.values() if entry["body"]["max_tokens"] == 8 and entry["body"].get("min_tokens") == 8
    )[1:]
    span = arrived[-1] - arrived[0]
    assert abs(span - (due[-1] - due[0])) < 0.5
    late = [record for record in records if record.error == "timeout"]
    assert late and len(late) == outcome.gave_up, "what was on its way at the end of the drain time is on record"
    assert all("2 s after the last was due" in (record.error_message or "") for record in late)
    assert (outcome.due, outcome.recorded) == (len(due), len(due))
    good = [record for record in by_index if record.error is None]
    assert good[-1].first_content_seconds is not None
    assert good[-1].first_content_seconds - good[-1].due_seconds > 0.5, "latency counts the wait that an open loop causes"


def test_times_are_right_under_load(truth_server: Start, tmp_path: Path) -> None:
    records, _, log = level(
        truth_server(ttft=0.03, gap=0.004, chunk_tokens=2, case="times"), tmp_path, rate_per_second=25.0, window_seconds=3.0,
        workload=Workload(prompt_tokens=16, output_tokens=16), arrivals=Constant(),
    )  # fmt: skip
    assert len(records) == 75 and all(record.error is None and record.output_tokens == 16 for record in records)
    assert {record.prompt_tokens for record in records} == {16}, "prompts have the asked length by the server's own count"
    origin = statistics.median(
        log[r.request_id]["arrived"] - r.sent_seconds for r in records if r.request_id and r.sent_seconds is not None
    )
    errors = [
        abs(seen - log[record.request_id]["chunks"][k] + origin)
        for record in records
        if record.request_id
        for k, seen in enumerate(record.content_seconds)
    ]
    assert len(errors) == 75 * 8
    assert statistics.median(errors) < 0.001, "half of all chunk stamps are within a millisecond of the server's own"
    ttft = [r.first_content_seconds - r.sent_seconds for r in records if r.first_content_seconds is not None and r.sent_seconds is not None]
    truth = [log[r.request_id]["chunks"][0] - log[r.request_id]["arrived"] for r in records if r.request_id]
    assert abs(statistics.median(ttft) - statistics.median(truth)) < 0.002
    assert {record.first_chunk_tokens for record in records} == {2}


def test_two_processes_send_one_arrival_process(truth_server: Start, tmp_path: Path) -> None:
    records, outcome, _ = level(truth_server(case="workers"), tmp_path, ["--processes", "2"], rate_per_second=20.0, window_seconds=2.0)
    due = due_times(Poisson(), 20.0, 2.0, 5)
    assert sorted(record.index for record in records) == list(range(len(due)))
    assert {record.index % 2 == record.worker for record in records} == {True} and outcome.processes == 2
    assert all(math.isclose(record.due_seconds, due[record.index], abs_tol=1e-6) for record in records)


def test_a_closed_loop_keeps_its_number(truth_server: Start, tmp_path: Path) -> None:
    records, _, _ = level(truth_server(ttft=0.05, case="closed"), tmp_path, ["-u", "3", "-r", "3"], concurrency=3, window_seconds=2.0)
    assert len({record.index for record in records}) == len(records) > 20
    edges = sorted([(r.due_seconds, 1) for r in records] + [(r.ended_seconds or 0.0, -1) for r in records])
    in_flight = most = 0
    for _, step in edges:
        in_flight += step
        most = max(most, in_flight)
    assert most == 3
    assert max(record.due_seconds for record in records) < 2.0


def test_failures_are_records_and_the_level_still_ends_well(truth_server: Start, tmp_path: Path) -> None:
    target = Target(url=truth_server(case="failures"), extra_body={"truth": {"fail": "status:429"}})
    facts = probe(Target(url=target.url))
    records, outcome, _ = level(target.url, tmp_path, target=target, facts=facts, rate_per_second=20.0, window_seconds=1.0)
    assert records and {(record.error, record.status) for record in records} == {("refused", 429)}
    assert outcome.recorded == len(records)


def test_plain_locust_needs_only_a_host(truth_server: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = locust(
        ["--host", truth_server(case="plain"), "--rate", "10", "--window", "1", "--workload", "16x4", "--requests-file", str(out)], tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    records = read_lines(out, RequestRecord).records
    assert records and {record.output_tokens for record in records} == {4}
    assert "/v1/completions" in done.stderr and "TTFT" in done.stderr, "Locust's own statistics know of the requests"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "127.0.0.1:9 cannot be reached"),
        (["--processes", "2"], "127.0.0.1:9 cannot be reached"),
        (["--workload", "tea"], "'tea' is not one of chat, code"),
    ],
)
def test_plain_locust_says_what_is_wrong(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = locust(["--host", "http://127.0.0.1:9", "--rate", "1", *arguments], tmp_path)
    assert done.returncode == 2 and message in done.stderr


# What needs no Locust.


def test_a_plan_survives_the_file(tmp_path: Path) -> None:
    plan = LoadPlan(target=Target(url="http://x"), rate_per_second=2.0, arrivals=parse_arrivals("gamma:cv=3"))
    (tmp_path / "p.json").write_bytes(msgspec.json.encode(plan))
    assert read_plan(tmp_path / "p.json") == plan
    (tmp_path / "p.json").write_bytes(b'{"target": {"url": "http://x"}, "rate": 2}')
    with pytest.raises(LoadError, match="unknown field `rate`"):
        read_plan(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate_per_second": 1.0, "concurrency": 1}, "either a rate"),
        ({}, "either a rate"),
        ({"rate_per_second": 0.0}, "rate_per_second must be above 0, got 0.0"),
        ({"rate_per_second": 1.0, "window_seconds": math.inf}, "window_seconds must be above 0, got inf"),
        ({"rate_per_second": 1.0, "warmup_seconds": -1.0}, "warmup_seconds must be 0 or more, got -1.0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        check_plan(LoadPlan(target=Target(url="x"), **changes))


def test_workloads_and_arrivals_as_people_write_them() -> None:
    assert parse_workload("256x64") == Workload(prompt_tokens=256, output_tokens=64)
    assert parse_workload("chat::64") == Workload(preset="chat", max_output_tokens=64)
    with pytest.raises(LoadError, match="'tea' is not one of"):
        parse_workload("tea")
    with pytest.raises(LoadError, match="unknown field `cvv`"):
        parse_arrivals("gamma:cvv=2")
    with pytest.raises(LoadError, match="'cv' is no key=value"):
        parse_arrivals("gamma:cv")


def test_options_of_the_web_page_may_be_empty() -> None:
    """Locust's page sends "" for what was left empty; that is the default, and no rate means Locust's users are the load."""
    given: dict[str, Any] = {name.replace("-", "_"): "" for name in OPTIONS} | {"host": "http://x"}
    plan = plan_of_options(given, users=7)
    assert (plan.rate_per_second, plan.concurrency, plan.window_seconds) == (None, 7, 30.0)
    assert plan_of_options(given | {"rate": "2.5"}, users=7).rate_per_second == 2.5
    with pytest.raises(LoadError, match="--rate must be a number, got 'many'"):
        plan_of_options(given | {"rate": "many"}, users=1)
    with pytest.raises(LoadError, match="no --host"):
        plan_of_options({}, users=1)


def test_fields_of_ones_own_and_tls_reach_the_target() -> None:
    plan = plan_of_options({"host": "https://x", "rate": "1", "extra_body": '{"top_k": 1}', "verify_tls": "no"}, users=1)
    assert plan.target.extra_body == {"top_k": 1} and not plan.target.verify_tls
    for wrong in ("{", "[1]", "7"):
        with pytest.raises(LoadError, match="--extra-body must be a JSON object"):
            plan_of_options({"host": "x", "rate": "1", "extra_body": wrong}, users=1)
    with pytest.raises(LoadError, match="--verify-tls must be yes or no, got 'maybe'"):
        plan_of_options({"host": "x", "rate": "1", "verify_tls": "maybe"}, users=1)
    with pytest.raises(LoadError, match="promise 'tea' is not one of chat"):
        plan_of_options({"host": "x", "rate": "1", "promise": "tea"}, users=1)


def test_outcomes_add_up() -> None:
    one = Outcome(due=3, recorded=3, gave_up=1, cpu_seconds=0.5, wall_seconds=2.0, started_unix_seconds=10.0)
    two = Outcome(due=2, recorded=1, stopped_seconds=1.5, cpu_seconds=0.25, wall_seconds=3.0, started_unix_seconds=10.0)
    both = total([one, two])
    assert (both.due, both.recorded, both.gave_up, both.stopped_seconds, both.wall_seconds, both.processes) == (5, 4, 1, 1.5, 3.0, 2)


# Conversations, the page, and the self-test.


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_conversation_goes_on_from_what_the_server_really_said(truth_server: Start, tmp_path: Path, api: Any, closed: bool) -> None:
    """The server answers request k with the words "wk": the next turn must hold them, and the user's own words before and after."""
    target = Target(url=truth_server(ttft=0.01, gap=0.001, echo=True, case=f"talk-{api}-{closed}"), api=api)
    talk = Workload(prompt_tokens=8, output_tokens=4, turns=3.0, think_seconds=0.2 if not closed else 0.0)
    load: dict[str, Any] = {"concurrency": 2} if closed else {"rate_per_second": 12.0}
    records, outcome, log = level(
        target.url, tmp_path, ["-u", "2", "-r", "2"] if closed else [], target=target, workload=talk, window_seconds=2.0, **load
    )
    by_turn = {(r.session, r.turn): r for r in records}
    later = [r for r in records if r.turn and (r.session, r.turn - 1) in by_turn]
    assert len(later) > 5 and all(r.error is None for r in records)
    real = 0
    for record in later:
        before = by_turn[record.session, (record.turn or 0) - 1]
        prompt = log[record.request_id or ""]["prompt"]
        answer = f"w{(before.request_id or '').rpartition('-')[2]} " * 4
        real += answer.strip() in prompt
        first = by_turn[record.session, 0]
        assert prompt.startswith(log[first.request_id or ""]["prompt"]), "what was said before is said again, word for word"
    assert real >= len(later) - outcome.stand_ins and real > 0
    assert outcome.stand_ins == 0 or not closed, "in a closed loop the answer is always there"
    assert {record.turn for record in records} > {0, 1}


def test_lines_leave_whole_while_the_disk_is_written_by_a_thread(truth_server: Start, tmp_path: Path) -> None:
    """A thousand requests a second: every record is on disk once, in whole lines."""
    records, outcome, log = level(
        truth_server(ttft=0.005, case="many"), tmp_path, rate_per_second=1000.0, window_seconds=1.5,
        workload=Workload(prompt_tokens=16, output_tokens=1),
    )  # fmt: skip
    assert len(records) == outcome.recorded == len({record.index for record in records}) > 1200
    assert {record.request_id for record in records if record.request_id} <= set(log)


def test_the_page_shows_the_level_as_it_runs(truth_server: Start, tmp_path: Path) -> None:
    """Locust as people start it, with its web server: a level is started by the form, and our page and its numbers are there."""
    url = truth_server(ttft=0.02, gap=0.002, fail="status:500", fail_every=4, case="page")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != PLAN_VARIABLE}
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--web-host", "127.0.0.1", "--web-port", str(port)]
    with open(tmp_path / "log", "wb") as log:
        child = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        page, until = connect(f"http://127.0.0.1:{port}"), time.monotonic() + 60
        while True:
            try:
                status, _, html = fetch(page, get_bytes(page, "/crossover"), 5)
                break
            except TargetUnusable:
                assert time.monotonic() < until and child.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.1)
        assert status == 200 and b"<title>Crossover" in html and b"https://" not in html, "works with no network"
        assert b'href="/crossover"' in fetch(page, get_bytes(page, "/"))[2], "and is found from Locust's own page"
        form = f"user_count=1&spawn_rate=1&host={url}&rate=20&window=2&workload=16x6&promise=interactive".encode()
        head = (
            f"POST /swarm HTTP/1.1\r\n{page.headers}Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {len(form)}\r\n\r\n"
        )
        assert json.loads(fetch(page, head.encode() + form)[2])["success"]
        until = time.monotonic() + 30
        while (stats := json.loads(fetch(page, get_bytes(page, "/crossover/stats"))[2]))["state"] != "stopped" or not stats["total"]["due"]:
            assert time.monotonic() < until, stats
            time.sleep(0.2)
    finally:
        child.terminate()
        child.wait(20)
    total = stats["total"]
    assert total["due"] == total["ended"] > 20 and stats["promise"]["name"] == "interactive"
    assert 0 < total["failed"] < total["due"] / 2 and 0 < total["good"] <= total["due"] - total["failed"]
    assert 0.02 < total["ttft_p50"] < 0.5 and 0.002 <= total["tpot_p50"] < 0.1 and total["lag_p99"] is not None
    assert stats["what"].startswith(url)


def test_the_self_test_passes_its_counts_and_fails_a_wrong_part_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "crossover", "selftest", "--only", "counts", "--json"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["passed"], done.stdout + done.stderr
    rows = {row["what"]: row for row in report["rows"]}
    assert set(rows) == {"failures: cut off", "failures: refused (429)", "failures: whole"}
    assert all(row["truth"] == row["measured"] > 0 for row in rows.values())
    done = subprocess.run([*command[:4], "--only", "tea"], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "'tea' is not one of times, counts" in done.stderr
