"""Metrics: what is counted when, and that a scrape can be parsed."""

from __future__ import annotations

import os

import pytest

from crossover.serving.engine.ipc_messages import PromptCacheStats, StepStats
from crossover.serving.errors import EngineState, Overloaded
from crossover.serving.metrics import Metrics, ServerMetrics
from tests.serving.fakes import FakeSupervisor, app_on, ask, chat, complete, scraped, served


def test_buckets_include_their_bound_and_every_step_is_counted(supervisor: FakeSupervisor) -> None:
    server = ServerMetrics()
    metrics = Metrics(server, "m", supervisor)
    for value in (0.001, 0.0025, 0.003, 1e9):
        metrics.ttft.observe(value)
    for step in (0.01, 0.02):
        metrics.observe_step(StepStats(1, 0, 10, step, step / 2, 3, 4, 0))
    metrics.observe_step(StepStats(0, 0, 0, 0.0, 0.0, 0, 0, 0))  # a refusal outside of any step
    found = scraped(server.exposition())
    name, bounds = "time_to_first_token_seconds", ("0.001", "0.0025", "0.005", "+Inf")
    assert [found[f"{name}_bucket", bound] for bound in bounds] == [1, 2, 3, 4]
    assert found[f"{name}_sum",] == pytest.approx(1e9 + 0.0065)
    assert found["step_seconds_count",] == 2 and found["step_seconds_sum",] == pytest.approx(0.03)
    assert found["step_backend_seconds_sum",] == pytest.approx(0.015)
    assert not [key for key in found if key[0].endswith("_created")]


def test_a_request_is_counted_once_in_each_histogram(port: int) -> None:
    chat(port)
    chat(port, stream=True)
    complete(port, n=2, prompt=["a", "bc"])
    found = scraped(ask(port, "GET", "/metrics").body)
    for name in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
    ):
        assert found[f"{name}_seconds_count",] == 6, name
    assert found["request_time_per_output_token_seconds_count",] == 6
    assert found["inter_token_latency_seconds_count",] == 2  # only a stream has gaps
    assert found["request_queue_time_seconds_sum",] == pytest.approx(6 * 0.001)
    assert found["request_prefill_time_seconds_sum",] == pytest.approx(6 * 0.002)
    assert found["generation_tokens_total",] == 18
    assert found["prompt_tokens_total",] == 2 * 21 + 2 * 1 + 2 * 2
    assert (
        found["prefix_cache_hits_total",] == 12
        and found["prefix_cache_queries_total",] == found["prompt_tokens_total",]
    )
    assert (
        found["request_success_total", "stop"] == 6
        and found["request_success_total", "length"] == 0
    )
    assert found["http_responses_total", "/v1/chat/completions", "200"] == 2
    assert found["http_requests_open",] == 1  # the scrape itself


def test_ttft_of_an_answer_that_is_not_streamed_is_the_engines() -> None:
    """The one delta at the end says when the first token was: queue + prefill after it was
    submitted, not when the answer was complete.
    """
    supervisor = FakeSupervisor(["x"] * 20)
    supervisor.pause_seconds = 0.01
    with served(app_on(supervisor)) as port:
        chat(port)
        found = scraped(ask(port, "GET", "/metrics").body)
    assert 0.003 <= found["time_to_first_token_seconds_sum",] < 0.1
    assert found["e2e_request_latency_seconds_sum",] >= 0.2
    assert 0.15 / 19 <= found["request_time_per_output_token_seconds_sum",] < 0.1


def test_what_ends_badly_is_counted_apart_and_by_reason(
    port: int, supervisor: FakeSupervisor
) -> None:
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
    assert (
        found["e2e_request_latency_seconds_count",] == 0
        and found["time_to_first_token_seconds_count",] == 0
    )


def test_the_engines_state_is_shown_and_what_is_not_known_is_not(
    port: int, supervisor: FakeSupervisor
) -> None:
    supervisor.restarts, supervisor.fallbacks = 4, 2
    found = scraped(ask(port, "GET", "/metrics").body)
    assert (
        found["num_requests_running",],
        found["num_requests_waiting",],
        found["num_preemptions_total",],
    ) == (1, 2, 3)
    assert found["kv_cache_usage_perc",] == pytest.approx(100 / 1024)
    assert (found["engine_restarts_total",], found["engine_fallbacks_total",]) == (4, 2)
    assert (found["engine_state", "ready"], found["engine_state", "failed"]) == (1, 0)
    assert found["process_resident_memory_bytes",] > 0
    supervisor.pids = [os.getpid()]
    found = scraped(ask(port, "GET", "/metrics").body)
    assert found["engine_process_memory_bytes", str(os.getpid())] > 1 << 20
    supervisor.pids = [2**22 + 1]  # just died
    assert not [
        key
        for key in scraped(ask(port, "GET", "/metrics").body)
        if key[0] == "engine_process_memory_bytes"
    ]
    supervisor.ready, supervisor.requests.stats, supervisor.state = None, None, EngineState.failed
    found = scraped(ask(port, "GET", "/metrics").body)
    assert found["engine_state", "failed"] == 1 and ("kv_cache_usage_perc",) not in found


def test_the_prompt_cache_is_shown_if_the_engine_has_one(
    port: int, supervisor: FakeSupervisor
) -> None:
    found = scraped(ask(port, "GET", "/metrics").body)
    assert not any("prompt_cache" in key[0] for key in found)
    assert supervisor.requests.stats is not None
    supervisor.requests.stats.prompt_cache = PromptCacheStats(
        max_bytes=1 << 20,
        used_bytes=1 << 19,
        sequences=3,
        stored_tokens=900,
        restored_tokens=400,
        dropped_tokens=100,
        copy_seconds=0.25,
    )
    found = scraped(ask(port, "GET", "/metrics").body)
    assert {key[0]: value for key, value in found.items() if "prompt_cache" in key[0]} == {
        "prompt_cache_used_bytes": 1 << 19,
        "prompt_cache_sequences": 3,
        "prompt_cache_stored_tokens_total": 900,
        "prompt_cache_restored_tokens_total": 400,
        "prompt_cache_dropped_tokens_total": 100,
        "prompt_cache_copy_seconds_total": 0.25,
    }


def test_several_models_share_metric_families_and_differ_by_a_label() -> None:
    server = ServerMetrics()
    one, two = (Metrics(server, name, FakeSupervisor()) for name in ("one", "two"))
    one.ttft.observe(0.1)
    two.ttft.observe(0.2)
    two.unloads["evicted"] += 2
    text = server.exposition().decode()
    ttft = "crossover_time_to_first_token_seconds"
    assert text.count(f"# TYPE {ttft} histogram") == 1  # one that comes twice is no exposition
    for name, seconds, evicted in (("one", 0.1, 0), ("two", 0.2, 2)):
        assert f'{ttft}_sum{{model_name="{name}"}} {seconds}' in text
        labels = f'{{model_name="{name}",reason="evicted"}}'
        assert f"crossover_model_unloads_total{labels} {evicted}.0" in text


def test_metrics_have_vllms_names_and_meanings() -> None:
    """Names of vLLM 0.11's /metrics without their prefix."""
    of_vllm = (
        "num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total "
        "prompt_tokens_total generation_tokens_total prefix_cache_queries_total "
        "prefix_cache_hits_total request_success_total time_to_first_token_seconds_count "
        "inter_token_latency_seconds_count request_time_per_output_token_seconds_count "
        "e2e_request_latency_seconds_count request_queue_time_seconds_count "
        "request_prefill_time_seconds_count"
    )
    server = ServerMetrics()
    Metrics(server, "m", FakeSupervisor())
    ours = {key[0] for key in scraped(server.exposition())}
    assert set(of_vllm.split()) - ours == set()
