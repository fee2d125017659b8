"""Prometheus metrics of the endpoint: vLLM's meanings, names with the prefix `crossover_`.

    server = ServerMetrics()                                 # of the process
    metrics = Metrics(server, "smollm2-135m", supervisor)    # of one model, label `model_name`
    metrics.ttft.observe(0.12)
    text = server.exposition()

Times are in seconds, of the API process; the engine measures queue and prefill. An answer of n
choices counts as n sequences. Unknown values are omitted, not reported as 0.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping
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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from crossover.serving.engine.ipc_messages import FinishReason, StepStats
from crossover.serving.errors import EngineState
from crossover.serving.hardware.machine_facts import resident_bytes
from crossover.serving.supervisor.engine_supervisor import Supervisor

disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "crossover"
SUCCESSES = (FinishReason.STOP, FinishReason.LENGTH)

# Buckets: vLLM's together, with finer ones below for small models and coarser ones above for CPUs.
SECONDS = (
    "0.0005 0.001 0.0025 0.005 0.01 0.02 0.03 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 1.5 2 2.5"
    " 5 7.5 10 20 30 40 60 80 160 640 2560"
).split()
HISTOGRAMS: dict[str, str] = {
    "time_to_first_token_seconds": "From the request's arrival to its first token",
    "inter_token_latency_seconds": "Gap between two deltas of one sequence",
    "request_time_per_output_token_seconds": "Mean time per output token of a sequence",
    "e2e_request_latency_seconds": "From the request's arrival to its last token",
    "request_queue_time_seconds": "From arrival in the engine to the first step",
    "request_prefill_time_seconds": "From the first step to the first token",
    "step_seconds": "One scheduler step of the engine",
    "step_backend_seconds": "The backend's share of one step",
    "engine_loop_hold_seconds": "Between two steps, and of a step beside the backend's",
}
COUNTERS: dict[str, str] = {
    "prompt_tokens": "Prompt tokens of sequences that got a token",
    "generation_tokens": "Output tokens",
    "prefix_cache_queries": "Prompt tokens looked up in earlier sequences' KV",
    "prefix_cache_hits": "Prompt tokens taken from an earlier sequence's KV",
}
_NO_STATS = StepStats(0, 0, 0, 0.0, 0.0, 0, 0, 0)


def _stats(served: Supervisor) -> StepStats:
    return served.requests.stats or _NO_STATS


def _kv_share(served: Supervisor) -> float | None:
    if served.ready is None:
        return None
    return _stats(served).kv_used_tokens / max(1, served.ready.info.settings.pool_tokens)


# Read from a model's supervisor at the scrape: help, and the value; None is omitted.
COUNTS: dict[str, tuple[str, Callable[[Supervisor], int]]] = {
    "engine_restarts": ("Restarts in the same place", lambda s: s.restarts),
    "engine_fallbacks": ("Another engine took over", lambda s: s.fallbacks),
    "engine_bridges": (
        "Fallbacks that began while the preferred engine restarted",
        lambda s: s.bridges,
    ),
    "engine_returns": ("The preferred engine came back", lambda s: s.returns),
    "num_preemptions": ("Sequences sent back to the queue", lambda s: _stats(s).preemptions),
}
GAUGES: dict[str, tuple[str, Callable[[Supervisor], float | None]]] = {
    "num_requests_running": ("Sequences in the engine's batch", lambda s: _stats(s).running),
    "num_requests_waiting": ("Sequences waiting for a slot", lambda s: _stats(s).waiting),
    "kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1", _kv_share),
    "engine_slots": (
        "Sequences at once",
        lambda s: s.ready.info.settings.slots if s.ready else None,
    ),
}


class Metrics:
    """The metrics of one model. The event loop fills it; a scrape reads `served`."""

    def __init__(self, server: ServerMetrics, model: str, served: Supervisor) -> None:
        self.model = model
        self.served = served
        server.models[model] = self
        own = {name: family.labels(model) for name, family in server.families.items()}
        self.ttft = own["time_to_first_token_seconds"]
        self.inter_token = own["inter_token_latency_seconds"]
        self.per_token = own["request_time_per_output_token_seconds"]
        self.e2e = own["e2e_request_latency_seconds"]
        self.queue = own["request_queue_time_seconds"]
        self.prefill = own["request_prefill_time_seconds"]
        self.step = own["step_seconds"]
        self.step_backend = own["step_backend_seconds"]
        self.engine_holds = own["engine_loop_hold_seconds"]
        self.prompt_tokens = own["prompt_tokens"]
        self.generation_tokens = own["generation_tokens"]
        self.cache_queries = own["prefix_cache_queries"]
        self.cache_hits = own["prefix_cache_hits"]
        self.finished = {
            reason: server.finished[reason in SUCCESSES].labels(model, reason)
            for reason in FinishReason
        }
        self.loads: Counts[str] = Counts(ready=0, failed=0)
        self.unloads: Counts[str] = Counts(idle=0, evicted=0, asked=0)

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
        into: dict[str, Any] = {"registry": self.registry, "namespace": PREFIX}
        self.families: dict[str, Any] = {  # with the label of a model
            name: Histogram(name, text, ["model_name"], buckets=SECONDS, **into)
            for name, text in HISTOGRAMS.items()
        }
        for name, text in COUNTERS.items():
            self.families[name] = Counter(name, text, ["model_name"], **into)
        text, labels = "Sequences by how they ended", ["model_name", "finished_reason"]
        self.finished = {
            good: Counter(f"request_{name}", text, labels, **into)
            for good, name in ((True, "success"), (False, "failure"))
        }
        text, labels = "Requests answered with an error, by its code", ["model_name", "reason"]
        self.rejected = Counter("request_rejected", text, labels, **into)
        text, labels = "Answers by route and status", ["route", "status"]
        self.responses = Counter("http_responses", text, labels, **into)
        self.open_requests = Gauge("http_requests_open", "Requests being answered", **into)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)  # CPU, memory and file descriptors of this process

    def exposition(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        models = self.models
        served = [(name, metrics.served) for name, metrics in models.items()]
        for name, (text, count) in COUNTS.items():
            yield _family(name, text, "", {(model,): count(s) for model, s in served}, True)
        for name, (text, value) in GAUGES.items():
            yield _family(name, text, "", {(model,): value(s) for model, s in served})
        states = {(name, one): float(s.state == one) for name, s in served for one in EngineState}
        yield _family("engine_state", "1 for the state the engine is in", "state", states)
        deaths = {(name, cause): n for name, s in served for cause, n in s.deaths.items()}
        text = "Engine processes that ended unexpectedly, by cause"
        yield _family("engine_deaths", text, "cause", deaths, True)
        loads = {(name, one): n for name, m in models.items() for one, n in m.loads.items()}
        yield _family("model_loads", "Times the model was loaded", "outcome", loads, True)
        unloads = {(name, one): n for name, m in models.items() for one, n in m.unloads.items()}
        yield _family("model_unloads", "Times the model was unloaded", "reason", unloads, True)
        memory = {(name, str(pid)): resident_bytes(pid) for name, s in served for pid in s.pids}
        yield _family("engine_process_memory_bytes", "RSS of engine processes", "pid", memory)


def _family(
    name: str, text: str, label: str, values: Mapping[Any, float | None], is_count: bool = False
) -> Metric:
    """Return a family with a value for each model, and for each value of `label` where there is
    one."""
    kind = CounterMetricFamily if is_count else GaugeMetricFamily
    family = kind(f"{PREFIX}_{name}", text, labels=["model_name", *filter(None, [label])])
    for labels, value in values.items():
        if value is not None:
            family.add_metric(labels, float(value))
    return family
