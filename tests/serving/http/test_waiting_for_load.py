"""Requests that wait for the load of their model: bounded, and who leaves waits no more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.serving.cli.test_serve import server
from tests.serving.fakes import ask, complete, scraped, wait_until
from tests.serving.http.test_app_streams import connected, post

MODELS = """
[[model]]
source = "fake"
name = "m"
load = "demand"
options = {load_seconds = 3.0}

[[model]]
source = "fake"
name = "other"
"""


def waiting(port: int) -> float:
    return scraped(ask(port, "GET", "/metrics").body)["http_requests_open",] - 1  # the scrape


def test_a_load_has_a_bounded_crowd_before_it_and_sees_who_leaves(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(MODELS)
    arguments = ("--models-file", str(file), "--max-waiting", "2")
    with server(tmp_path, *arguments, model="") as one, ThreadPoolExecutor() as threads:
        port = int(one.wait_ready()["url"].rpartition(":")[2])
        first = threads.submit(complete, port, model="m", max_tokens=2)
        wait_until(lambda: waiting(port) == 1)
        with connected(port, post(model="m")):
            wait_until(lambda: waiting(port) == 2)
            refused = complete(port, model="m")
            assert (refused.status, refused.error["code"]) == (429, "queue_requests")
            assert int(refused.headers["retry-after"]) >= 1
            assert complete(port, model="other", max_tokens=2).status == 200
        wait_until(lambda: waiting(port) == 1)  # one has left, long before the load is done
        late = complete(port, model="m", deadline_seconds=0.2)
        assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
        assert not first.done()
        assert first.result(20).status == 200
