"""Metrics: what is counted when, and that a scrape can be parsed."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.engine.ipc_messages import StepStats
from serving.errors import Overloaded
from serving.hardware.memory_sampler import MemorySampler
from serving.metrics import PREFIX, Metrics, ServerMetrics
from tests.serving.fakes import FakeSupervisor, app_on, ask, chat, complete, served, wait_until


def scraped(data: bytes) -> dict[tuple[str, ...], float]:
    """(name without prefix, label values but the model's...) -> value."""
    found = {}
    for family in text_string_to_metric_families(data.decode()):
        for sample in family.samples:
            labels = [value for key, value in sorted(sample.labels.items()) if key != "model_name"]
            found[sample.name.removeprefix(PREFIX), *labels] = sample.value
    return found


def model_of(server: ServerMetrics, name: str, supervisor: FakeSupervisor) -> Metrics:
    metrics = Metrics(server, name, supervisor)
    server.add(metrics)
    return metrics


def exposition(server: ServerMetrics) -> bytes:
    return asyncio.run(server.exposition())


def test_a_bound_belongs_to_its_bucket_and_nothing_but_the_named_series_is_there() -> None:
    server = ServerMetrics()
    metrics = model_of(server, "m", FakeSupervisor())
    for value in (1.0, 2.0, 3.0, 1e9):
        metrics.prompt_lengths.observe(value)
    found = scraped(exposition(server))
    buckets = [found["request_prompt_tokens_bucket", bound] for bound in ("1.0", "2.0", "5.0")]
    assert buckets == [1, 2, 3] and found["request_prompt_tokens_bucket", "+Inf"] == 4
    assert found["request_prompt_tokens_sum",] == pytest.approx(1e9 + 6)
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
        "request_decode_time",
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
    assert found["request_inference_time_seconds_count",] == 6
    assert found["request_inference_time_seconds_sum",] == pytest.approx(
        found["request_prefill_time_seconds_sum",] + found["request_decode_time_seconds_sum",]
    )
    assert (found["request_params_n_count",], found["request_params_n_sum",]) == (
        3,
        4,
    )  # one of n = 2 with two prompts
    assert found["request_params_max_tokens_count",] == 6
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
    assert found["request_decode_time_seconds_sum",] >= 0.15
    assert found["request_time_per_output_token_seconds_sum",] == pytest.approx(
        found["request_decode_time_seconds_sum",] / 19
    )


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
    assert found["engine_memory_bytes", "weight", "predicted"] == 1000
    assert found["engine_memory_bytes", "weight", "measured"] == 1100
    assert ("engine_memory_bytes", "compute", "measured") not in found
    assert found["process_resident_memory_bytes",] > 0
    supervisor.pids = [os.getpid()]
    found = scraped(ask(port, "GET", "/metrics").body)
    rss, pss = (
        found["engine_process_memory_bytes", kind, str(os.getpid())] for kind in ("rss", "pss")
    )
    assert rss >= pss > 1 << 20
    supervisor.pids = [2**22 + 1]  # just died
    assert not [
        key
        for key in scraped(ask(port, "GET", "/metrics").body)
        if key[0] == "engine_process_memory_bytes"
    ]
    supervisor.ready, supervisor.stats, supervisor.state = None, None, "failed"
    found = scraped(ask(port, "GET", "/metrics").body)
    assert found["engine_state", "failed"] == 1 and ("kv_cache_usage_perc",) not in found


def test_every_step_is_in_the_step_histogram(supervisor: FakeSupervisor) -> None:
    server = ServerMetrics()
    metrics = model_of(server, "m", supervisor)
    for step in (0.01, 0.02):
        metrics.stepped(StepStats(1, 0, 10, step, step / 2, 3, 4, 0))
    metrics.stepped(StepStats(0, 0, 0, 0.0, 0.0, 0, 0, 0))  # a refusal outside of any step
    found = scraped(exposition(server))
    assert found["step_seconds_count",] == 2 and found["step_seconds_sum",] == pytest.approx(0.03)
    assert found["step_backend_seconds_sum",] == pytest.approx(0.015)
    assert found["iteration_tokens_total_sum",] == 14


def test_the_app_hears_of_the_steps(port: int, supervisor: FakeSupervisor) -> None:
    wait_until(lambda: supervisor.on_step is not None)
    supervisor.on_step(StepStats(1, 0, 10, 0.01, 0.005, 3, 4, 0))
    assert scraped(ask(port, "GET", "/metrics").body)["step_seconds_count",] == 1


def test_several_models_share_families_and_are_told_apart_by_a_label() -> None:
    server = ServerMetrics()
    one, two = (model_of(server, name, FakeSupervisor()) for name in ("one", "two"))
    one.ttft.observe(0.1)
    two.ttft.observe(0.2)
    two.loaded("ready")
    two.unloaded("evicted")
    two.unloaded("evicted")
    data = exposition(server)
    families = {family.name: family for family in text_string_to_metric_families(data.decode())}
    ttft = families["crossover_time_to_first_token_seconds"]
    sums = {
        sample.labels["model_name"]: sample.value
        for sample in ttft.samples
        if sample.name.endswith("_sum")
    }
    assert sums == {"one": pytest.approx(0.1), "two": pytest.approx(0.2)}
    assert (
        data.count(b"# TYPE crossover_time_to_first_token_seconds histogram") == 1
    )  # a family that comes twice is no exposition
    unloads = {
        (s.labels["model_name"], s.labels["reason"]): s.value
        for s in families["crossover_model_unloads"].samples
    }
    assert unloads["two", "evicted"] == 2 and unloads["one", "evicted"] == 0


def test_a_model_that_is_swapped_keeps_its_counts_and_one_that_is_removed_takes_them_along() -> (
    None
):
    server, first, second = ServerMetrics(), FakeSupervisor(), FakeSupervisor()
    metrics = model_of(server, "m", first)
    metrics.ttft.observe(0.1)
    second.state, second.restarts = "loading", 7
    metrics.serve(second)
    server.add(metrics)
    found = scraped(asyncio.run(server.exposition()))
    assert (
        found["time_to_first_token_seconds_count",],
        found["engine_restarts_total",],
        found["engine_state", "loading"],
    ) == (1, 7, 1)
    server.remove(metrics)
    assert not [key for key in scraped(exposition(server)) if key[0].startswith("time_to_first")]
    again = model_of(server, "m", second)
    again.loaded("ready")
    found = scraped(exposition(server))
    assert (found["time_to_first_token_seconds_count",], found["model_loads_total", "ready"]) == (
        0,
        1,
    )


def test_two_scrapes_at_once_are_both_told() -> None:
    async def scenario() -> None:
        sampler = MemorySampler()
        found = []

        async def scrape() -> None:
            await sampler.sample({os.getpid(): "m"})
            found.append([model for model, _, _ in sampler.engines])

        await asyncio.gather(scrape(), scrape())
        assert found == [["m"], ["m"]]

    asyncio.run(scenario())


def test_a_scrape_reads_anew_while_the_thread_that_told_the_last_one_ends() -> None:
    """It was told what the last one was, and an event loop of its own got a ValueError."""
    release = threading.Event()

    class Loop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
            handle = super().call_soon_threadsafe(*args, **kwargs)
            if threading.current_thread().name == "memory-sampler":
                release.wait(20)
            return handle

    sampler, found = MemorySampler(), []
    for models in (["one", "two"], ["three"]):
        with asyncio.Runner(loop_factory=Loop) as runner:
            for model in models:
                runner.run(sampler.sample({os.getpid(): model}))
                found += [name for name, _, _ in sampler.engines]
    release.set()
    assert found == ["one", "two", "three"]


def test_a_driver_that_hangs_costs_a_scrape_its_patience_once_and_never_blocks_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    monkeypatch.setattr(
        "serving.hardware.memory_sampler.gpu_memory", lambda: release.wait(20) and [] or []
    )

    async def scenario() -> None:
        sampler = MemorySampler()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await sampler.sample({os.getpid(): "m"}, patience_seconds=0.3)
        assert ticks > 5 and sampler.engines == []
        started = asyncio.get_running_loop().time()
        await sampler.sample(
            {os.getpid(): "m"}, patience_seconds=0.3
        )  # not a second thread into the same driver
        assert asyncio.get_running_loop().time() - started < 0.1
        release.set()
        ticking.cancel()

    asyncio.run(scenario())


def test_every_metric_that_vllm_has_for_such_a_server_is_there_in_its_own_terms() -> None:
    """Names of vLLM 0.11's /metrics without their prefix; what it has for speculative decoding,
    adapters and disaggregation is left out.
    """
    of_vllm = {
        *(
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "num_preemptions_total",
            "prompt_tokens_total",
        ),
        *(
            "generation_tokens_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "request_success_total",
        ),
        *(
            "time_to_first_token_seconds_count",
            "inter_token_latency_seconds_count",
            "request_time_per_output_token_seconds_count",
        ),
        *(
            "e2e_request_latency_seconds_count",
            "request_queue_time_seconds_count",
            "request_prefill_time_seconds_count",
        ),
        *(
            "request_decode_time_seconds_count",
            "request_inference_time_seconds_count",
            "request_prompt_tokens_count",
        ),
        *(
            "request_generation_tokens_count",
            "request_params_n_count",
            "request_params_max_tokens_count",
            "iteration_tokens_total_count",
        ),
    }
    server = ServerMetrics()
    model_of(server, "m", FakeSupervisor())
    ours = {key[0] for key in scraped(exposition(server))}
    assert of_vllm - ours == set()
