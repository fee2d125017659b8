"""Prometheus metrics of the endpoint: vLLM's meanings, names with the prefix `crossover_`.

    server = ServerMetrics()                                 # of the process
    metrics = Metrics(server, "smollm2-135m", supervisor)    # of one model, label `model_name`
    server.add(metrics)
    metrics.ttft.observe(0.12)
    text = await server.exposition()

Times are in seconds, of the API process; the engine measures queue and prefill. An answer of n
choices counts as n sequences. Unknown values are omitted, not reported as 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from serving.engine.ipc_messages import FinishReason, Ready, StepStats
from serving.errors import EngineState
from serving.hardware.gpus import GpuFacts, find_gpus
from serving.hardware.machine_facts import resident_bytes
from serving.supervisor.supervisor import Supervisor

disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = CONTENT_TYPE_LATEST
HOLD_PERIOD_SECONDS = 0.05  # between two looks; what is shorter may be missed
PREFIX = "crossover_"
PATIENCE_SECONDS = 2.0  # with the GPU's driver, at a scrape
SUCCESSES = (FinishReason.STOP, FinishReason.LENGTH)
FAILURES = tuple(reason for reason in FinishReason if reason not in SUCCESSES)
LOAD_OUTCOMES = ("ready", "failed")
UNLOAD_REASONS = ("idle", "evicted", "asked")


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# vLLM's buckets, with finer ones below for small models and coarser ones above for CPUs.
_TTFT = _bounds(
    "0.001 0.0025 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160"
    " 640 2560"
)
_TOKEN = _bounds(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
_REQUEST = _bounds(
    "0.01 0.05 0.1 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
)
_STEP = _bounds(
    "0.0005 0.001 0.0025 0.005 0.01 0.02 0.03 0.05 0.075 0.1 0.15 0.2 0.3 0.5 0.75 1 2 5 10 30"
)
_HOLDS = _bounds("0.001 0.002 0.005 0.01 0.02 0.05 0.1 0.2 0.5 1 2 5 10")
_COUNTS = _bounds("1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000")

HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (_TTFT, "From the request's arrival to its first token"),
    "inter_token_latency_seconds": (_TOKEN, "Gap between two deltas of one sequence"),
    "request_time_per_output_token_seconds": (_TOKEN, "Mean time per output token of a sequence"),
    "e2e_request_latency_seconds": (_REQUEST, "From the request's arrival to its last token"),
    "request_queue_time_seconds": (_REQUEST, "From arrival in the engine to the first step"),
    "request_prefill_time_seconds": (_REQUEST, "From the first step to the first token"),
    "request_decode_time_seconds": (_REQUEST, "From the first token to the last"),
    "request_prompt_tokens": (_COUNTS, "Prompt tokens of one sequence"),
    "request_generation_tokens": (_COUNTS, "Output tokens of one sequence"),
    "step_seconds": (_STEP, "One scheduler step of the engine"),
    "step_backend_seconds": (_STEP, "The backend's share of one step"),
    "engine_loop_hold_seconds": (
        *(_HOLDS, "Time between two steps, and of a step beside the backend's share"),
    ),
}
COUNTERS: dict[str, str] = {
    "prompt_tokens": "Prompt tokens of sequences that got a token",
    "generation_tokens": "Output tokens",
    "merged_events": "Events of a stream with several tokens, since loop or reader were behind",
    "prefix_cache_queries": "Prompt tokens looked up in earlier sequences' KV",
    "prefix_cache_hits": "Prompt tokens taken from an earlier sequence's KV",
}
LABELLED_COUNTERS: dict[str, tuple[str, Sequence[str], str]] = {
    "request_success": ("finished_reason", SUCCESSES, "Sequences that ended as they should"),
    "request_failure": ("finished_reason", FAILURES, "Sequences that did not"),
    "model_loads": ("outcome", LOAD_OUTCOMES, "Times the model was loaded"),
    "model_unloads": ("reason", UNLOAD_REASONS, "Times the model was unloaded"),
}


# name, help, value of a supervisor; None is omitted. Names in COUNTED are counters.
COUNTED = ("engine_restarts", "engine_fallbacks", "engine_returns", "num_preemptions")
STATE: tuple[tuple[str, str, Callable[[Supervisor], Any]], ...] = (
    ("engine_restarts", "Restarts in the same place", lambda s: s.restarts),
    ("engine_fallbacks", "Another engine took over", lambda s: s.fallbacks),
    ("engine_returns", "The preferred engine came back", lambda s: s.returns),
    ("num_requests_running", "Sequences in the engine's batch", lambda s: _stats(s).running),
    ("num_requests_waiting", "Sequences waiting for a slot", lambda s: _stats(s).waiting),
    (
        *("num_preemptions", "Sequences sent back to the queue; starts again with the engine"),
        lambda s: _stats(s).preemptions,
    ),
    (
        *("engine_standby", "1 while another engine is loaded to take over"),
        lambda s: s.standby is not None,
    ),
    (
        *("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1"),
        lambda s: s.ready and _stats(s).kv_used_tokens / max(1, s.ready.info.kv_tokens),
    ),
    (
        *("kv_cache_tokens", "Tokens that the KV cache holds"),
        lambda s: s.ready and s.ready.info.kv_tokens,
    ),
    ("engine_slots", "Sequences that run at once", lambda s: s.ready and s.ready.info.slots),
    ("engine_load_seconds", "Time of the last load", lambda s: s.ready and s.ready.load_seconds),
)
_NO_STATS = StepStats(0, 0, 0, 0.0, 0.0, 0, 0, 0)


def _stats(served: Supervisor) -> StepStats:
    return served.stats or _NO_STATS


class Metrics:
    """The metrics of one model. The event loop fills it; a scrape reads `served`."""

    def __init__(self, server: ServerMetrics, model: str, served: Supervisor) -> None:
        self.model = model
        self.served = served
        histograms = {name: family.labels(model) for name, family in server.histograms.items()}
        self.ttft = histograms["time_to_first_token_seconds"]
        self.inter_token = histograms["inter_token_latency_seconds"]
        self.per_token = histograms["request_time_per_output_token_seconds"]
        self.e2e = histograms["e2e_request_latency_seconds"]
        self.queue = histograms["request_queue_time_seconds"]
        self.prefill = histograms["request_prefill_time_seconds"]
        self.decode = histograms["request_decode_time_seconds"]
        self.prompt_lengths = histograms["request_prompt_tokens"]
        self.output_lengths = histograms["request_generation_tokens"]
        self.step = histograms["step_seconds"]
        self.step_backend = histograms["step_backend_seconds"]
        self.engine_holds = histograms["engine_loop_hold_seconds"]
        counters = {name: family.labels(model) for name, family in server.counters.items()}
        self.prompt_tokens = counters["prompt_tokens"]
        self.generation_tokens = counters["generation_tokens"]
        self.merged_events = counters["merged_events"]
        self.cache_queries = counters["prefix_cache_queries"]
        self.cache_hits = counters["prefix_cache_hits"]
        labelled = {
            name: {value: server.labelled[name].labels(model, value) for value in values}
            for name, (_, values, _) in LABELLED_COUNTERS.items()
        }
        self.finished = labelled["request_success"] | labelled["request_failure"]
        self._loads = labelled["model_loads"]
        self._unloads = labelled["model_unloads"]
        self.loads = dict.fromkeys(LOAD_OUTCOMES, 0)
        self.unloads = dict.fromkeys(UNLOAD_REASONS, 0)

    def loaded(self, outcome: str) -> None:
        """The model was loaded ("ready"), or not ("failed")."""
        self.loads[outcome] += 1
        self._loads[outcome].inc()

    def unloaded(self, reason: str) -> None:
        """The model was unloaded, for one of UNLOAD_REASONS."""
        self.unloads[reason] += 1
        self._unloads[reason].inc()

    def stepped(self, stats: StepStats) -> None:
        """The engine finished one step."""
        if stats.step_seconds > 0:
            self.step.observe(stats.step_seconds)
            self.step_backend.observe(stats.backend_seconds)
            beside = stats.step_seconds - stats.backend_seconds
            self.engine_holds.observe(stats.between_seconds + beside)


class ServerMetrics(Collector):
    """The metrics of the process; as a collector, those that are read at the scrape."""

    def __init__(self) -> None:
        self.models: dict[str, Metrics] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        model = ["model_name"]
        self.histograms = {
            name: Histogram(PREFIX + name, text, model, buckets=bounds, registry=self.registry)
            for name, (bounds, text) in HISTOGRAMS.items()
        }
        self.counters = {
            name: Counter(PREFIX + name, text, model, registry=self.registry)
            for name, text in COUNTERS.items()
        }
        self.labelled = {
            name: Counter(PREFIX + name, text, [*model, label], registry=self.registry)
            for name, (label, _, text) in LABELLED_COUNTERS.items()
        }
        self.rejected = self._counter(
            "request_rejected", "Requests answered with an error, by its code", "model_name reason"
        )
        self.ignored = self._counter(
            "request_ignored_fields", "Unknown keys of requests that were left out", ""
        )
        self.responses = self._counter(
            "http_responses", "Answers by route and status", "route status"
        )
        self.loop_holds = Histogram(
            *(PREFIX + "event_loop_hold_seconds", "Time that the HTTP side did nothing else"),
            buckets=_HOLDS,
            registry=self.registry,
        )
        self.lost_lines = self._counter(
            "log_lines_lost", "Lines that nobody took: broken pipe, full"
        )
        self.open_requests = self._gauge("http_requests_open", "Requests that are being answered")
        self._tasks = self._gauge("event_loop_tasks", "Tasks of the HTTP side's event loop")
        self.registry.register(self)
        ProcessCollector(registry=self.registry)  # CPU, memory and file descriptors of this process
        self._gpus: tuple[GpuFacts, ...] = ()

    def _counter(self, name: str, text: str, labels: str = "") -> Counter:
        return Counter(PREFIX + name, text, labels.split(), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self.registry)

    def add(self, metrics: Metrics) -> None:
        """One more model, or another engine of one that is there."""
        self.models[metrics.model] = metrics

    async def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        self._gpus = (await asyncio.to_thread(find_gpus, timeout_seconds=PATIENCE_SECONDS)).gpus
        self._tasks.set(len(asyncio.all_tasks()))
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        served = {name: metrics.served for name, metrics in self.models.items()}
        for name, text, value in STATE:
            kind = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
            family = kind(PREFIX + name, text, labels=["model_name"])
            for model, each in served.items():
                found = value(each)
                if found is not None:
                    family.add_metric([model], float(found))
            yield family
        yield from _engines(served)
        yield from self._memory()

    def _memory(self) -> Iterator[Metric]:
        memory = _gauges("engine_process_memory_bytes", "RSS of engine processes", "model_name pid")
        for name, model in self.models.items():
            for pid in model.served.pids:
                size = resident_bytes(pid)
                if size is not None:
                    memory.add_metric([name, str(pid)], size)
        yield memory
        gpus = _gauges(
            "gpu_memory_bytes", "Memory of each GPU, as its driver says", "gpu name kind"
        )
        for gpu in self._gpus:
            for kind, size in (("used", gpu.used_bytes), ("total", gpu.total_bytes)):
                if size is not None:
                    gpus.add_metric([str(gpu.index), gpu.name, kind], size)
        yield gpus


async def watch_loop(holds: Histogram) -> None:
    """Observe, again and again, for how long the event loop ran something else than this.

    At most the CPU time that the process used meanwhile: a busy machine is no hold.
    """
    while True:
        period = HOLD_PERIOD_SECONDS
        began, used = time.perf_counter(), time.process_time()
        await asyncio.sleep(period)
        late = time.perf_counter() - began - period
        holds.observe(max(0.0, min(late, time.process_time() - used)))


def _gauges(name: str, text: str, labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels.split())


def _engines(served: dict[str, Supervisor]) -> Iterator[Metric]:
    """The families of engines with labels of their own."""
    states = _gauges("engine_state", "1 for the state the engine is in", "model_name state")
    info = InfoMetricFamily(PREFIX + "engine", "What serves, or is about to", labels=["model_name"])
    memory = _gauges("engine_memory_bytes", "Where memory goes", "model_name part said")
    deaths = CounterMetricFamily(
        PREFIX + "engine_deaths",
        "Engine processes that ended unasked, by cause",
        labels=["model_name", "cause"],
    )
    for model, each in served.items():
        for state in EngineState:
            states.add_metric([model, state], float(each.state == state))
        for cause, count in each.deaths.items():
            deaths.add_metric([model, cause], count)
        config, ready = each.config, each.ready
        about = {"backend": config.backend, "device": config.device}
        about["weight_format"] = config.weight_format
        if ready is not None:
            about["weight_format"] = ready.info.weight_format
            about["device_name"] = ready.info.device_name
            for part, said, size in _memory_of(ready):
                memory.add_metric([model, part, said], size)
        info.add_metric([model], about)
    yield from (states, info, memory, deaths)


def _memory_of(ready: Ready) -> Iterator[tuple[str, str, int]]:
    """(part, said, bytes) of a loaded engine."""
    for said, parts in (("predicted", ready.info.predicted), ("measured", ready.info.measured)):
        for part in ("weight", "kv", "compute"):
            size = getattr(parts, f"{part}_bytes", None)
            if size is not None:
                yield part, said, size
    yield "rss_when_loaded", "measured", ready.rss_bytes
    yield "peak_rss_when_loaded", "measured", ready.peak_rss_bytes
