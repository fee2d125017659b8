"""Prometheus metrics of the endpoint: vLLM's meanings, names with the prefix `crossover_`.

    server = ServerMetrics()                                 # of the process
    metrics = Metrics(server, "smollm2-135m", supervisor)    # of one model, label `model_name`
    metrics.ttft.observe(0.12)
    text = server.exposition()

Times are in seconds, as the API process sees them, except for queue and prefill times, which the
engine measures; the wait for one of several engines is part of the queue time. A request with `n`
choices counts as n sequences. Unknown values are omitted.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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
SUCCESSFUL_REASONS = (FinishReason.STOP, FinishReason.LENGTH)

# The upper bounds of the buckets of all histograms, in seconds: those of vLLM's histograms taken
# together, with finer ones for small models and coarser ones for CPUs.
MILLISECOND_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075)
SECOND_BUCKETS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5)
MINUTE_BUCKETS = (10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 160.0, 640.0, 2560.0)
BUCKETS = MILLISECOND_BUCKETS + SECOND_BUCKETS + MINUTE_BUCKETS
# The families that the event loop fills, by name: their help.
HISTOGRAMS: dict[str, str] = {
    "time_to_first_token_seconds": "From the request's arrival to its first token",
    "inter_token_latency_seconds": "Gap between two deltas of one sequence",
    "request_time_per_output_token_seconds": "Mean time per output token of a sequence",
    "e2e_request_latency_seconds": "From the request's arrival to its last token",
    "request_queue_time_seconds": "From the request's arrival to its first step",
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
_NO_STATS = StepStats(0, 0, 0, 0.0, 0.0, 0, 0, 0)  # before an engine's first step


def _stats(supervisor: Supervisor) -> StepStats:
    return supervisor.requests.stats or _NO_STATS


def _kv_share(supervisor: Supervisor) -> float | None:
    if supervisor.ready is None:
        return None
    pool_tokens = _of_all_engines(supervisor, supervisor.ready.info.settings.pool_tokens)
    return _stats(supervisor).kv_used_tokens / max(1, pool_tokens)


def _slots(supervisor: Supervisor) -> int | None:
    if supervisor.ready is None:
        return None
    return _of_all_engines(supervisor, supervisor.ready.info.settings.slots)


def _of_all_engines(supervisor: Supervisor, of_one: int) -> int:
    """Return what the engines that serve have together, from what one of them has."""
    return of_one * max(1, len(supervisor.requests.engines))


def _of_prompt_cache(name: str) -> Callable[[Supervisor], float | None]:
    """Return what reads a field of the engine's PromptCacheStats; None: it has no prompt cache."""

    def value(supervisor: Supervisor) -> float | None:
        cache = _stats(supervisor).prompt_cache
        return None if cache is None else getattr(cache, name)

    return value


class Scraped(NamedTuple):
    """A family that is read from a model's supervisor at each scrape. `value`: None is omitted."""

    text: str  # the help
    value: Callable[[Supervisor], float | None]


SCRAPED_COUNTERS: dict[str, Scraped] = {
    "engine_restarts": Scraped("Restarts in the same place", lambda it: it.restarts),
    "engine_fallbacks": Scraped("Another engine took over", lambda it: it.fallbacks),
    "engine_bridges": Scraped(
        "Fallbacks that began while the preferred engine restarted", lambda it: it.bridges
    ),
    "engine_returns": Scraped("The preferred engine came back", lambda it: it.returns),
    "num_preemptions": Scraped(
        "Sequences sent back to the queue", lambda it: _stats(it).preemptions
    ),
    "prompt_cache_stored_tokens": Scraped(
        "Tokens whose KV was stored beyond the slots", _of_prompt_cache("stored_tokens")
    ),
    "prompt_cache_restored_tokens": Scraped(
        "Tokens whose stored KV was copied into a slot", _of_prompt_cache("restored_tokens")
    ),
    "prompt_cache_dropped_tokens": Scraped(
        "Tokens whose stored KV was dropped to make room", _of_prompt_cache("dropped_tokens")
    ),
    "prompt_cache_copy_seconds": Scraped(
        "Time spent on storing and restoring", _of_prompt_cache("copy_seconds")
    ),
}
SCRAPED_GAUGES: dict[str, Scraped] = {
    "num_requests_running": Scraped(
        "Sequences in the engine's batch", lambda it: _stats(it).running
    ),
    "num_requests_waiting": Scraped(
        "Sequences waiting for a slot", lambda it: it.requests.waiting_count
    ),
    "kv_cache_usage_perc": Scraped("Share of the KV cache in use, 0 to 1", _kv_share),
    "engine_slots": Scraped("Sequences at once, on all engines that serve", _slots),
    "engines_serving": Scraped("Engines that serve", lambda it: len(it.requests.engines)),
    "prompt_cache_used_bytes": Scraped(
        "Memory of the stored KV beyond the slots", _of_prompt_cache("used_bytes")
    ),
    "prompt_cache_sequences": Scraped(
        "Sequences whose KV is stored beyond the slots", _of_prompt_cache("sequences")
    ),
}


class Metrics:
    """The metrics of one model. The event loop fills them; a scrape also reads `supervisor`."""

    def __init__(self, server: ServerMetrics, model: str, supervisor: Supervisor) -> None:
        self.model = model
        self.supervisor = supervisor
        server.models[model] = self
        of_model = {name: family.labels(model) for name, family in server.families.items()}
        self.ttft = of_model["time_to_first_token_seconds"]
        self.inter_token = of_model["inter_token_latency_seconds"]
        self.per_token = of_model["request_time_per_output_token_seconds"]
        self.e2e = of_model["e2e_request_latency_seconds"]
        self.queue = of_model["request_queue_time_seconds"]
        self.prefill = of_model["request_prefill_time_seconds"]
        self.step = of_model["step_seconds"]
        self.step_backend = of_model["step_backend_seconds"]
        self.loop_hold = of_model["engine_loop_hold_seconds"]
        self.prompt_tokens = of_model["prompt_tokens"]
        self.generation_tokens = of_model["generation_tokens"]
        self.cache_queries = of_model["prefix_cache_queries"]
        self.cache_hits = of_model["prefix_cache_hits"]
        self.finished = {}
        for reason in FinishReason:
            counter = server.successes if reason in SUCCESSFUL_REASONS else server.failures
            self.finished[reason] = counter.labels(model, reason)
        # By outcome and by reason; the zeros are reported too.
        self.loads: Counts[str] = Counts(ready=0, failed=0)
        self.unloads: Counts[str] = Counts(idle=0, evicted=0, asked=0)

    def observe_step(self, stats: StepStats) -> None:
        """Record the times of one step of the engine."""
        if stats.step_seconds > 0:
            self.step.observe(stats.step_seconds)
            self.step_backend.observe(stats.backend_seconds)
            seconds_outside_backend = stats.step_seconds - stats.backend_seconds
            self.loop_hold.observe(stats.between_seconds + seconds_outside_backend)


class ServerMetrics(Collector):
    """The metrics of the process. As a collector, it yields those that are read at the scrape."""

    def __init__(self) -> None:
        self.models: dict[str, Metrics] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        common: dict[str, Any] = {"registry": self.registry, "namespace": PREFIX}
        self.families: dict[str, Any] = {}  # with the label of a model
        for name, text in HISTOGRAMS.items():
            family = Histogram(name, text, ["model_name"], buckets=BUCKETS, **common)
            self.families[name] = family
        for name, text in COUNTERS.items():
            self.families[name] = Counter(name, text, ["model_name"], **common)
        text, labels = "Sequences by how they ended", ["model_name", "finished_reason"]
        self.successes = Counter("request_success", text, labels, **common)
        self.failures = Counter("request_failure", text, labels, **common)
        text, labels = "Requests answered with an error, by its code", ["model_name", "reason"]
        self.rejected = Counter("request_rejected", text, labels, **common)
        text, labels = "Answers by route and status", ["route", "status"]
        self.responses = Counter("http_responses", text, labels, **common)
        self.open_requests = Gauge("http_requests_open", "Requests being answered", **common)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)  # CPU, memory and file descriptors of this process

    def exposition(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        supervisors = {name: metrics.supervisor for name, metrics in self.models.items()}
        for name, scraped in SCRAPED_COUNTERS.items():
            counter = _counter(name, scraped.text)
            for model, supervisor in supervisors.items():
                _add(counter, scraped.value(supervisor), model)
            yield counter
        for name, scraped in SCRAPED_GAUGES.items():
            gauge = _gauge(name, scraped.text)
            for model, supervisor in supervisors.items():
                _add(gauge, scraped.value(supervisor), model)
            yield gauge

        states = _gauge("engine_state", "1 for the state the engine is in", "state")
        text = "Engine processes that ended unexpectedly, by cause"
        deaths = _counter("engine_deaths", text, "cause")
        loads = _counter("model_loads", "Times the model was loaded", "outcome")
        unloads = _counter("model_unloads", "Times the model was unloaded", "reason")
        memory = _gauge("engine_process_memory_bytes", "RSS of engine processes", "pid")
        for model, metrics in self.models.items():
            supervisor = metrics.supervisor
            for state in EngineState:
                _add(states, float(supervisor.state == state), model, state)
            for cause, count in supervisor.deaths.items():
                _add(deaths, count, model, cause)
            for outcome, count in metrics.loads.items():
                _add(loads, count, model, outcome)
            for reason, count in metrics.unloads.items():
                _add(unloads, count, model, reason)
            for pid in supervisor.pids:
                _add(memory, resident_bytes(pid), model, str(pid))
        yield from (states, deaths, loads, unloads, memory)


def _counter(name: str, text: str, *more_labels: str) -> CounterMetricFamily:
    """Return an empty family of counters with the label of a model, and more labels if given."""
    return CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["model_name", *more_labels])


def _gauge(name: str, text: str, *more_labels: str) -> GaugeMetricFamily:
    """Return an empty family of gauges with the label of a model, and more labels if given."""
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["model_name", *more_labels])


def _add(
    family: CounterMetricFamily | GaugeMetricFamily, value: float | None, *label_values: str
) -> None:
    """Add a value to a family unless it is unknown."""
    if value is not None:
        family.add_metric(label_values, float(value))
