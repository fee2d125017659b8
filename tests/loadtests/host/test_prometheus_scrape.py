"""What a server's own /metrics say, sampled beside the load."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from loadtests.host.prometheus_scrape import Remote, parse
from loadtests.host.resource_sampler import Sampler, Scraped
from loadtests.records.resource_sample import RemoteSample, ResourceSample
from loadtests.records.run_journal import EngineTime
from tests.tools.waiting import wait_for

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.2345e+04
vllm:generation_tokens_total{engine="0",model_name="m"} 678.0
process_resident_memory_bytes 2.5e+09
process_cpu_seconds_total {cpu}
broken NaN
"""


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


def test_a_remote_server_tells_by_its_metrics(metrics: tuple[str, list[tuple[int, str]]]) -> None:
    url, answers = metrics
    answers += [
        (200, VLLM.replace("{cpu}", "10.0")),
        (200, VLLM.replace("{cpu}", "10.1")),
        (200, LLAMA),
        (503, ""),
        (200, "up 1\n"),
    ]
    remote = Remote(url + "/v1", api_key="k")
    first = remote()
    assert isinstance(first, RemoteSample) and first.cpu_share is None
    assert (first.kind, first.running, first.waiting, first.kv_share) == ("vllm", 5, 7, 0.25)
    assert (first.prompt_tokens, first.output_tokens, first.rss_bytes, first.preemptions) == (
        12345,
        678,
        2_500_000_000,
        None,
    )
    time.sleep(0.05)
    second = remote()
    assert (
        isinstance(second, RemoteSample)
        and second.cpu_share is not None
        and 0 < second.cpu_share <= 2.0
    )
    third = remote()
    assert isinstance(third, RemoteSample) and (
        third.kind,
        third.running,
        third.waiting,
        third.rss_bytes,
    ) == ("llama.cpp", 1, 4, None)
    assert (
        remote() == "/metrics answered 503"
        and remote() == "/metrics holds nothing that is known here"
    )
    remote.close()
    gone = Remote("http://127.0.0.1:9")()
    assert isinstance(gone, str) and "cannot be reached" in gone
    assert parse('a 1\na{x="y"} 2\n# a 5\nc NaN') == {"a": 3.0}


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
    remote = Remote(url)
    first, second, anew = remote.engine_time(), remote.engine_time(), remote.engine_time()
    assert first is not None and second is not None and anew is not None
    passed = second.since(first)
    assert passed == EngineTime(steps=20, device_seconds=3.0, host_seconds=0.75)
    assert passed.host_share == pytest.approx(0.2)
    assert anew.since(second) is None and remote.engine_time() is None
    assert Remote("http://127.0.0.1:9").engine_time() is None


def test_samples_of_an_endpoint_hold_what_it_says(
    metrics: tuple[str, list[tuple[int, str]]],
) -> None:
    url, answers = metrics
    answers.append((200, LLAMA))
    seen: list[ResourceSample] = []
    with Sampler("c", seen.append, interval_seconds=0.1, metrics=Scraped(url)) as sampler:
        wait_for(lambda: seen)
        assert sampler.missing == {}
        answers[:] = [(500, "")]
        wait_for(lambda: seen[-1].remote is None)
    assert seen[0].remote is not None and seen[0].remote.waiting == 4
    before = len(seen)
    with Sampler("c", seen.append, interval_seconds=0.1, metrics=Scraped(url)) as sampler:
        wait_for(lambda: len(seen) > before)
    assert sampler.missing == {"remote": "/metrics answered 500"}
