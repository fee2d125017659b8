"""`crossover serve --engines 2`: real processes on cores of their own, behind one real port."""

import contextlib
import http.client
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serving.cli.test_serve import completion, get, port_of, server
from tests.serving.fakes import complete, scraped, wait_until

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one core only: there is nothing to divide"
)


def metric(url: str, name: str) -> float:
    return scraped(get(url, "/metrics").body)[name,]


def streamed(url: str, tokens: int) -> str:
    """The events of a streamed completion."""
    more = {"max_tokens": tokens, "ignore_eos": True, "stream": True}
    return complete(port_of(url), model="fake", **more).body.decode()


def test_two_engines_serve_and_the_death_of_one_is_not_that_of_the_other(tmp_path: Path) -> None:
    options = ("--engines", "2", "--slots", "2", "--option", "step_seconds=0.02")
    with server(tmp_path, *options) as one, ThreadPoolExecutor(4) as threads:
        url = one.wait_ready()["url"]
        placed = get(url, "/v1/placement").json
        processes = placed["engine_processes"]
        assert [process["is_ready"] for process in processes] == [True, True]
        cores = [set(process["cores"]) for process in processes]
        assert cores[0] and cores[1] and not cores[0] & cores[1]
        for process in processes:
            assert os.sched_getaffinity(process["pid"]) == set(process["cores"])
        assert placed["engine"]["engines"] == 2 and placed["engine"]["threads"] == len(cores[0])
        assert placed["memory"]["rss_bytes"] > 1.9 * processes[0]["rss_bytes"]
        assert "2 engines each with 2 slots" in one.log.read_text()
        assert (metric(url, "engines_serving"), metric(url, "engine_slots")) == (2, 4)

        streams = [threads.submit(streamed, url, 300) for _ in range(4)]
        wait_until(lambda: metric(url, "generation_tokens_total") > 80, 30)
        assert metric(url, "num_requests_running") == 4
        os.kill(processes[0]["pid"], signal.SIGKILL)
        wait_until(lambda: metric(url, "engines_serving") == 1, 30)
        assert get(url, "/ready").status == 200 and completion(url).status == 200
        answers = [stream.result(60) for stream in streams]
        failed = [answer for answer in answers if "SIGKILL" in answer]
        finished = [answer for answer in answers if '"finish_reason":"length"' in answer]
        assert (len(failed), len(finished)) == (2, 2)
        wait_until(lambda: metric(url, "engines_serving") == 2, 30)
        assert metric(url, "engine_restarts_total") == 1
        assert "fake/cpu #1 died" in one.log.read_text()
        assert one.end() == 0


def test_an_engine_that_ends_first_in_a_drain_makes_no_other_one_ready(tmp_path: Path) -> None:
    options = ("--engines", "2", "--slots", "1", "--option", "step_seconds=0.02")
    with server(tmp_path, *options) as one, contextlib.ExitStack() as stack:
        url = one.wait_ready()["url"]
        clients, answers = {}, {}
        for _ in range(2):
            client = http.client.HTTPConnection("127.0.0.1", port_of(url), timeout=30)
            stack.enter_context(contextlib.closing(client))
            body = {"prompt": "hi", "max_tokens": 150, "ignore_eos": True, "stream": True}
            client.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = stack.enter_context(client.getresponse())
            number = answer.headers["X-Crossover-Engine"]
            clients[number], answers[number] = client, answer
        clients["1"].close()  # the first engine is idle then, and ends at once
        wait_until(lambda: metric(url, "num_requests_running") == 1, 30)
        one.process.terminate()
        assert b"[DONE]" in answers["2"].read()
        assert one.end() == 0, one.log.read_text()
        assert one.process.stdout is not None
        assert one.process.stdout.read().count("ready:") == 1


def test_a_server_whose_second_engine_hangs_while_it_loads_serves_with_the_first(
    tmp_path: Path,
) -> None:
    hangs = f"fail_once_file={json.dumps(str(tmp_path / 'hung'))}"
    options = ("--engines", "2", "--option", "fail_cause=load_hang", "--option", hangs)
    with server(tmp_path, *options) as one:
        url = one.wait_ready()["url"]
        assert get(url, "/ready").status == 200 and completion(url).status == 200
        processes = get(url, "/v1/placement").json["engine_processes"]
        assert sorted(process["is_ready"] for process in processes) == [False, True]
        assert metric(url, "engines_serving") == 1
        assert "late: still loading; the other engines serve without it" in one.log.read_text()
        assert one.end() == 0


def test_models_that_are_loaded_on_demand_have_several_engines_too(tmp_path: Path) -> None:
    with server(tmp_path, "--engines", "2", "--idle-unload", "0.2") as one:
        url = one.wait_ready()["url"]
        wait_until(lambda: get(url, "/ready").json.get("state") == "unloaded", 30)
        assert completion(url).status == 200 and metric(url, "engines_serving") == 2
