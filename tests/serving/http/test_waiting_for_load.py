"""Requests that wait for the load of their model: who leaves waits no more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.serving.cli.test_serve import server
from tests.serving.fakes import ask, complete, scraped, wait_until
from tests.serving.http.test_app_streams import connected, post


def waiting(port: int) -> float:
    return scraped(ask(port, "GET", "/metrics").body)["http_requests_open",] - 1  # the scrape


def test_a_load_sees_who_leaves_and_whose_deadline_is_past(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    models = "[[model]]\nsource = 'fake'\nname = 'other'\n[[model]]\nsource = 'fake'\nname = 'm'\n"
    file.write_text(f"{models}load = 'demand'\noptions = {{load_seconds = 2.0}}")
    with (
        server(tmp_path, "--models-file", str(file), model="") as one,
        ThreadPoolExecutor() as threads,
    ):
        port = int(one.wait_ready()["url"].rpartition(":")[2])
        first = threads.submit(complete, port, model="m", max_tokens=2)
        wait_until(lambda: waiting(port) == 1)
        with connected(port, post(model="m")):
            wait_until(lambda: waiting(port) == 2)
            assert complete(port, model="other", max_tokens=2).status == 200
        wait_until(lambda: waiting(port) == 1)  # one has left, long before the load is done
        late = complete(port, model="m", deadline_seconds=0.2)
        assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
        assert not first.done()
        assert first.result(20).status == 200
