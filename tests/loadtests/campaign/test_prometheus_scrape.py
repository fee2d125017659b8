"""What a server's own /metrics say of its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from crossover.loadtests.campaign.prometheus_scrape import EngineClock
from crossover.loadtests.load_generator.target import Target
from crossover.loadtests.records.journal_events import EngineTime


@pytest.fixture
def metrics() -> Iterator[tuple[str, list[str]]]:
    """A server whose /metrics says what is put into the list, one after the other."""
    answers: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answers.pop(0)
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", answers
        server.shutdown()


def test_only_a_crossover_server_reports_engine_time(
    metrics: tuple[str, list[str]],
) -> None:
    url, answers = metrics
    exposition = (
        'crossover_step_backend_seconds_count{{model="a"}} {n}\n'
        'crossover_step_backend_seconds_count{{model="b"}} 5\n'
        "crossover_step_backend_seconds_sum {d}\ncrossover_engine_loop_hold_seconds_sum {h}\n"
    )
    answers += [exposition.format(n=10, d=1.5, h=0.25), exposition.format(n=30, d=4.5, h=1.0)]
    answers += [exposition.format(n=3, d=0.1, h=0.1), "llamacpp:requests_processing 1\n"]
    clock = EngineClock(Target(url=url))
    first, second, anew = clock.read(), clock.read(), clock.read()
    assert first is not None and second is not None and anew is not None
    passed = second.since(first)
    assert passed == EngineTime(steps=20, device_seconds=3.0, host_seconds=0.75)
    assert passed.host_share == pytest.approx(0.2)
    assert anew.since(second) is None and clock.read() is None
    assert EngineClock(Target(url="http://127.0.0.1:9")).read() is None
