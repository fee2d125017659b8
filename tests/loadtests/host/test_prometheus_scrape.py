"""What a server's own /metrics say of its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from loadtests.host.prometheus_scrape import EngineClock, parse
from loadtests.records.run_journal import EngineTime

LLAMA = (
    "llamacpp:requests_processing 1\nllamacpp:requests_deferred 4\n"
    "llamacpp:prompt_tokens_total 20\nllamacpp:tokens_predicted_total 30\n"
)


@pytest.fixture
def metrics() -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """A server whose /metrics says what is put into the list; the last entry stays."""
    answers: list[tuple[int, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, text = answers[0] if len(answers) == 1 else answers.pop(0)
            if self.path != "/metrics" or self.headers.get("Authorization") not in (
                None,
                "Bearer k",
            ):
                status, text = 404, ""
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_engine_s_time_is_told_by_a_crossover_server_alone(
    metrics: tuple[str, list[tuple[int, str]]],
) -> None:
    url, answers = metrics
    told = (
        "crossover_step_backend_seconds_count {n}\ncrossover_step_backend_seconds_sum {d}\n"
        "crossover_engine_loop_hold_seconds_sum {h}\n"
    )
    answers += [
        (200, told.format(n=10, d=1.5, h=0.25)),
        (200, told.format(n=30, d=4.5, h=1.0)),
        (200, told.format(n=3, d=0.1, h=0.1)),
        (200, LLAMA),
    ]
    clock = EngineClock(url)
    first, second, anew = clock.read(), clock.read(), clock.read()
    assert first is not None and second is not None and anew is not None
    passed = second.since(first)
    assert passed == EngineTime(steps=20, device_seconds=3.0, host_seconds=0.75)
    assert passed.host_share == pytest.approx(0.2)
    assert anew.since(second) is None and clock.read() is None
    assert EngineClock("http://127.0.0.1:9").read() is None
    assert parse('a 1\na{x="y"} 2\n# a 5\nc NaN') == {"a": 3.0}
