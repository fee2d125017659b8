"""Metrics: what is counted when, and that a scrape can be parsed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.messages import StepStats
from serving.metrics import PREFIX, Histogram, Metrics
from serving.supervisor import Overloaded
from tests.serving.fakes import FakeSupervisor, app_on, ask, chat, complete, served, wait_until


@pytest.fixture
def supervisor() -> FakeSupervisor:
    return FakeSupervisor()


@pytest.fixture
def port(supervisor: FakeSupervisor) -> Iterator[int]:
    with served(app_on(supervisor)) as port:
        yield port


def scraped(data: bytes) -> dict[tuple[str, ...], float]:
    """(name without prefix, label values but the model's...) -> value."""
    found = {}
    for family in text_string_to_metric_families(data.decode()):
        for sample in family.samples:
            labels = [value for key, value in sorted(sample.labels.items()) if key != "model_name"]
            found[sample.name.removeprefix(PREFIX), *labels] = sample.value
    return found


def test_a_histogram_counts_like_prometheus() -> None:
    histogram = Histogram("x_seconds", "x", (0.1, 1))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    (_, low), (_, high), (_, all_of_them), total, summed = [(s.labels.get("le"), s.value) for s in histogram.family({}).samples]
    assert (low, high, all_of_them) == (2, 4, 5)  # a bound belongs to its bucket
    assert total[1] == histogram.count == 5 and summed[1] == pytest.approx(8.65)


def test_a_request_is_counted_once_in_each_histogram(port: int) -> None:
    chat(port)
    chat(port, stream=True)
    complete(port, n=2, prompt=["a", "bc"])
    found = scraped(ask(port, "GET", "/metrics").body)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert found[f"{name}_seconds_count",] == 6, name
    assert found["request_time_per_output_token_seconds_count",] == 6
    assert found["inter_token_latency_seconds_count",] == 2  # only a stream has gaps
    assert found["request_queue_time_seconds_sum",] == pytest.approx(6 * 0.001)
    assert found["request_prefill_time_seconds_sum",] == pytest.approx(6 * 0.002)
    assert found["generation_tokens_total",] == 18
    assert found["prompt_tokens_total",] == 2 * 21 + 2 * 1 + 2 * 2
    assert found["prompt_tokens_cached_total",] == 12
    assert found["request_success_total", "stop"] == 6 and found["request_success_total", "length"] == 0
    assert found["http_responses_total", "/v1/chat/completions", "200"] == 2
    assert found["http_requests_open",] == 1  # the scrape itself


def test_ttft_of_an_answer_that_is_not_streamed_is_the_engines() -> None:
    """The one delta at the end says when the first token was: queue + prefill after it was submitted, not when the answer was complete."""
    supervisor = FakeSupervisor(["x"] * 20)
    supervisor.pause_seconds = 0.01
    with served(app_on(supervisor)) as port:
        chat(port)
        found = scraped(ask(port, "GET", "/metrics").body)
    assert 0.003 <= found["time_to_first_token_seconds_sum",] < 0.1
    assert found["e2e_request_latency_seconds_sum",] >= 0.2
    assert found["request_decode_time_seconds_sum",] >= 0.15
    assert found["request_time_per_output_token_seconds_sum",] == pytest.approx(found["request_decode_time_seconds_sum",] / 19)


def test_what_ends_badly_is_counted_apart_and_by_reason(port: int, supervisor: FakeSupervisor) -> None:
    chat(port, bad=1)
    chat(port, messages=[{"role": "user", "content": "x" * 300}])
    ask(port, "GET", "/some/strangers/path")
    supervisor.by_hand = True
    supervisor.refuse_after, supervisor.refusal = 0, Overloaded("full", 1.0, "queue_wait")
    chat(port)
    found = scraped(ask(port, "GET", "/metrics").body)
    assert found["request_rejected_total", "400"] == 1
    assert found["request_rejected_total", "context_length_exceeded"] == 1
    assert found["request_rejected_total", "queue_wait"] == 1
    assert found["http_responses_total", "other", "404"] == 1
    assert not any("strangers" in str(key) for key in found)
    assert found["e2e_request_latency_seconds_count",] == 0 and found["time_to_first_token_seconds_count",] == 0


def test_the_engines_state_is_shown_and_what_is_not_known_is_not(port: int, supervisor: FakeSupervisor) -> None:
    supervisor.restarts, supervisor.fallbacks = 4, 2
    found = scraped(ask(port, "GET", "/metrics").body)
    assert (found["num_requests_running",], found["num_requests_waiting",], found["num_preemptions_total",]) == (1, 2, 3)
    assert found["kv_cache_usage_perc",] == pytest.approx(100 / 1024)
    assert (found["engine_restarts_total",], found["engine_fallbacks_total",]) == (4, 2)
    assert (found["engine_state", "ready"], found["engine_state", "failed"]) == (1, 0)
    assert found["engine_memory_bytes", "weight", "predicted"] == 1000
    assert found["engine_memory_bytes", "weight", "measured"] == 1100
    assert ("engine_memory_bytes", "compute", "measured") not in found
    assert found["process_resident_memory_bytes",] > 0
    supervisor.engine_pid = os.getpid()
    assert scraped(ask(port, "GET", "/metrics").body)["engine_memory_bytes", "rss", "measured"] > 1 << 20
    supervisor.engine_pid = 2**22 + 1  # just died
    assert ("engine_memory_bytes", "rss", "measured") not in scraped(ask(port, "GET", "/metrics").body)
    supervisor.ready, supervisor.stats, supervisor.state = None, None, "failed"
    found = scraped(ask(port, "GET", "/metrics").body)
    assert found["engine_state", "failed"] == 1 and ("kv_cache_usage_perc",) not in found


def test_every_step_is_in_the_step_histogram(supervisor: FakeSupervisor) -> None:
    metrics = Metrics("m", supervisor)
    for step in (0.01, 0.02):
        metrics.stepped(StepStats(1, 0, 10, step, step / 2, 3, 4, 0))
    metrics.stepped(StepStats(0, 0, 0, 0.0, 0.0, 0, 0, 0))  # a refusal outside of any step
    found = scraped(metrics.exposition())
    assert found["step_seconds_count",] == 2 and found["step_seconds_sum",] == pytest.approx(0.03)
    assert found["step_backend_seconds_sum",] == pytest.approx(0.015)
    assert found["iteration_tokens_sum",] == 14


def test_the_app_hears_of_the_steps(port: int, supervisor: FakeSupervisor) -> None:
    wait_until(lambda: supervisor.on_step is not None)
    supervisor.on_step(StepStats(1, 0, 10, 0.01, 0.005, 3, 4, 0))
    assert scraped(ask(port, "GET", "/metrics").body)["step_seconds_count",] == 1
