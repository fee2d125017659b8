"""Prometheus metrics of the endpoint: vLLM's meanings, names with the prefix `crossover_`.

    metrics = Metrics("smollm2-135m", supervisor)        # of one model
    server = ServerMetrics(); server.add(metrics)        # of the process
    metrics.ttft.observe(0.12)
    text = server.exposition()

| crossover_...                          | what is measured, in seconds unless said                                                     |
|----------------------------------------|----------------------------------------------------------------------------------------------|
| time_to_first_token_seconds            | the request's head arrived -> its first token is here (an answer that is not streamed too)   |
| inter_token_latency_seconds            | gap between two deltas of one sequence, as it was (a 2 s stall is one gap of 2 s)            |
| request_time_per_output_token_seconds  | of one sequence: (last - first token) / (tokens - tokens of the first delta)                 |
| e2e_request_latency_seconds            | the request's head arrived -> the sequence's last token                                      |
| request_queue_time_seconds             | arrival in the engine -> first scheduled                                                     |
| request_prefill_time_seconds           | first scheduled -> first token                                                               |
| request_decode_time_seconds            | first token -> last token                                                                    |
| request_inference_time_seconds         | first scheduled -> last token: prefill + decode                                              |
| prompt_tokens, generation_tokens       | counted when the first token is here, and as they come (at the end where nothing is streamed) |
| prefix_cache_queries, prefix_cache_hits | prompt tokens looked up in, and taken from, earlier sequences' KV                            |
| kv_cache_usage_perc                    | share of the KV cache that running sequences hold, 0 to 1                                    |
| num_requests_running, _waiting         | sequences in the engine's batch, and in its queue                                            |

A family has one sample for each model, told apart by the label `model_name`. What differs from vLLM: an answer of n choices counts as n
sequences, and what is not known (no engine is loaded) is absent, never 0.

Histograms are plain lists, filled by one thread (the event loop) and read at a scrape: an observation costs a bisection and no lock,
since there is one for each token. All times are the API process's, except queue and prefill: these the engine measured.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from serving.backends.base import EngineConfig
from serving.memory_sampler import MemorySampler
from serving.messages import Ready, StepStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FAILURES = ("cancelled", "deadline", "error", "refused")
PREFIX = "crossover_"
UNLOAD_REASONS = ("idle", "evicted", "asked", "swapped")
STATES = ("loading", "ready", "restarting", "failed", "draining", "stopped", "unloaded")

# vLLM's buckets, with finer ones below for small models and coarser ones above for CPUs.
TTFT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30)
CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Served(Protocol):
    """What a scrape reads from the supervisor. (Its `returns`, `deaths`, `standby` and `pids` are read where it has them.)"""

    state: str
    stats: StepStats | None
    restarts: int
    fallbacks: int

    @property
    def ready(self) -> Ready | None: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def engine_pid(self) -> int | None: ...


class Histogram:
    """Counts in buckets, and their sum. For one thread."""

    __slots__ = ("name", "help", "bounds", "counts", "sum")

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = PREFIX + name, help, tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last one: above every bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self.name, self.help, labels=list(labels))
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*map(repr, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(list(labels.values()), buckets, self.sum)
        return family


class Metrics:
    """The metrics of one model. The event loop fills it, a scrape reads it."""

    def __init__(self, model: str, served: Served) -> None:
        self._labels = {"model_name": model}
        self._served = served
        self.ttft = Histogram("time_to_first_token_seconds", "From the request's arrival to its first token", TTFT_BUCKETS)
        self.inter_token = Histogram("inter_token_latency_seconds", "Gap between two deltas of one sequence", TOKEN_BUCKETS)
        self.per_token = Histogram("request_time_per_output_token_seconds", "Mean time per output token of one sequence", TOKEN_BUCKETS)
        self.e2e = Histogram("e2e_request_latency_seconds", "From the request's arrival to its last token", REQUEST_BUCKETS)
        self.queue = Histogram("request_queue_time_seconds", "From arrival in the engine to the first step", REQUEST_BUCKETS)
        self.prefill = Histogram("request_prefill_time_seconds", "From the first step to the first token", REQUEST_BUCKETS)
        self.decode = Histogram("request_decode_time_seconds", "From the first token to the last", REQUEST_BUCKETS)
        self.inference = Histogram("request_inference_time_seconds", "From the first step to the last token", REQUEST_BUCKETS)
        self.prompt_lengths = Histogram("request_prompt_tokens", "Prompt tokens of one sequence", COUNT_BUCKETS)
        self.output_lengths = Histogram("request_generation_tokens", "Output tokens of one sequence", COUNT_BUCKETS)
        self.asked_lengths = Histogram("request_params_max_tokens", "Most output tokens that a sequence may have", COUNT_BUCKETS)
        self.asked_choices = Histogram("request_params_n", "Answers asked for by one request", CHOICE_BUCKETS)
        self.step = Histogram("step_seconds", "One scheduler step of the engine", STEP_BUCKETS)
        self.step_backend = Histogram("step_backend_seconds", "The backend's share of one step", STEP_BUCKETS)
        self.step_tokens = Histogram("iteration_tokens", "Tokens of one step, prompt and output", COUNT_BUCKETS)
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self.finished: Counter[str] = Counter()  # stop, length, cancelled, deadline, error
        self.loads: Counter[str] = Counter()  # ready, failed
        self.unloads: Counter[str] = Counter()  # idle, evicted, asked, swapped

    @property
    def _histograms(self) -> tuple[Histogram, ...]:
        return tuple(value for value in vars(self).values() if isinstance(value, Histogram))

    def stepped(self, stats: StepStats) -> None:
        """The engine finished one step."""
        if stats.step_seconds > 0:
            self.step.observe(stats.step_seconds)
            self.step_backend.observe(stats.backend_seconds)
            self.step_tokens.observe(stats.decode_rows + stats.prefill_tokens)

    @property
    def served(self) -> Served:
        return self._served

    def serve(self, served: Served) -> None:
        """From now on this supervisor serves the model: counts go on, states are read from it."""
        self._served = served

    @property
    def labels(self) -> dict[str, str]:
        return self._labels

    def families(self) -> Iterator[Metric]:
        """Everything, as families of one sample (or one histogram) each."""
        for histogram in self._histograms:
            yield histogram.family(self._labels)
        yield from self._counters()
        yield from self._engine()

    def _counters(self) -> Iterator[Metric]:
        for name, value, text in (
            ("prompt_tokens", self.prompt_tokens, "Prompt tokens of sequences that got a token"),
            ("generation_tokens", self.generation_tokens, "Output tokens"),
            ("prefix_cache_queries", self.prompt_tokens, "Prompt tokens looked up in earlier sequences' KV"),
            ("prefix_cache_hits", self.cached_tokens, "Prompt tokens taken from an earlier sequence's KV"),
            ("engine_restarts", self._served.restarts, "Times the engine was started again in the same place"),
            ("engine_fallbacks", self._served.fallbacks, "Times another engine took over"),
            ("engine_returns", getattr(self._served, "returns", 0), "Times the preferred engine took over again"),
        ):
            yield self._one(CounterMetricFamily, name, value, text)
        for name, label, counts, text in (
            ("request_success", "finished_reason", _only(self.finished, ("stop", "length")), "Sequences that ended as they should"),
            ("request_failure", "finished_reason", _only(self.finished, _FAILURES), "Sequences that did not"),
            ("engine_deaths", "cause", dict(getattr(self._served, "deaths", {})), "Engine processes that ended unasked, by cause"),
            ("model_loads", "outcome", _only(self.loads, ("ready", "failed")), "Times the model was loaded"),
            ("model_unloads", "reason", _only(self.unloads, UNLOAD_REASONS), "Times the model was unloaded"),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=[*self._labels, label])
            for key, value in counts.items():
                family.add_metric([*self._labels.values(), key], value)
            yield family

    def _engine(self) -> Iterator[Metric]:
        served = self._served
        stats, ready = served.stats, served.ready
        running, waiting, preempted = (stats.running, stats.waiting, stats.preemptions) if stats else (0, 0, 0)
        yield self._one(GaugeMetricFamily, "num_requests_running", running, "Sequences in the engine's batch")
        yield self._one(GaugeMetricFamily, "num_requests_waiting", waiting, "Sequences waiting for a slot")
        yield self._one(CounterMetricFamily, "num_preemptions", preempted, "Sequences sent back to the queue; starts anew with the engine")
        states = GaugeMetricFamily(PREFIX + "engine_state", "1 for the state the engine is in", labels=[*self._labels, "state"])
        for state in STATES:
            states.add_metric([*self._labels.values(), state], float(served.state == state))
        yield states
        standby = getattr(served, "standby", None)
        yield self._one(GaugeMetricFamily, "engine_standby", float(standby is not None), "1 while another engine is loaded to take over")
        config = served.config
        info = InfoMetricFamily(PREFIX + "engine", "What serves, or is about to", labels=list(self._labels))
        about = {"backend": config.backend, "device": config.device, "weight_format": config.weight_format}
        if ready is not None:
            about |= {"weight_format": ready.info.weight_format, "device_name": ready.info.device_name}
        info.add_metric(list(self._labels.values()), about)
        yield info
        if ready is None:
            return  # what is not known is not there: 0 would be a lie
        used = stats.kv_used_tokens if stats else 0
        yield self._one(
            GaugeMetricFamily, "kv_cache_usage_perc", used / max(1, ready.info.kv_tokens), "Share of the KV cache in use, 0 to 1"
        )
        yield self._one(GaugeMetricFamily, "kv_cache_tokens", ready.info.kv_tokens, "Tokens that the KV cache holds")
        yield self._one(GaugeMetricFamily, "engine_slots", ready.info.slots, "Sequences that run at once")
        yield self._one(GaugeMetricFamily, "engine_load_seconds", ready.load_seconds, "Time of the last load")
        memory = GaugeMetricFamily(PREFIX + "engine_memory_bytes", "Where memory goes", labels=[*self._labels, "part", "said"])
        for said, parts in (("predicted", ready.info.predicted), ("measured", ready.info.measured)):
            for part in ("weight", "kv", "compute"):
                size = getattr(parts, f"{part}_bytes", None)
                if size is not None:
                    memory.add_metric([*self._labels.values(), part, said], size)
        memory.add_metric([*self._labels.values(), "rss_when_loaded", "measured"], ready.rss_bytes)
        memory.add_metric([*self._labels.values(), "peak_rss_when_loaded", "measured"], ready.peak_rss_bytes)
        yield memory

    def _one(self, kind: Any, name: str, value: float, text: str) -> Metric:
        family: Metric = kind(PREFIX + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)  # type: ignore[attr-defined]
        return family


class ServerMetrics(Collector):
    """The metrics of the process: those of every model, answers by route, rejections, and memory."""

    def __init__(self) -> None:
        self.models: list[Metrics] = []
        self.rejected: Counter[tuple[str, str]] = Counter()  # (model or "", an error's code)
        self.responses: Counter[tuple[str, int]] = Counter()  # (route, status)
        self.open_requests = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)  # this process's CPU, memory and file descriptors
        self._sampler = MemorySampler()
        self._tasks: int | None = None  # of the event loop; when nothing is asked for they must not grow in number

    def add(self, metrics: Metrics) -> None:
        """One more model; one of the same name takes the place of the old one."""
        self.models = [each for each in self.models if each.labels != metrics.labels] + [metrics]

    def remove(self, metrics: Metrics) -> None:
        """This model is served no more."""
        self.models.remove(metrics)

    async def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        engines = {pid: metrics.labels["model_name"] for metrics in self.models for pid in _pids(metrics.served)}
        await self._sampler.sample(engines)
        self._tasks = len(asyncio.all_tasks())
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for metrics in self.models:
            for family in metrics.families():
                known = merged.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from merged.values()
        rejected = CounterMetricFamily(
            PREFIX + "request_rejected", "Requests answered with an error, by its code", labels=["model_name", "reason"]
        )
        for (model, reason), value in self.rejected.items():
            rejected.add_metric([model, reason], value)
        yield rejected
        responses = CounterMetricFamily(PREFIX + "http_responses", "Answers by route and status", labels=["route", "status"])
        for (route, status), value in self.responses.items():
            responses.add_metric([route, str(status)], value)
        yield responses
        yield GaugeMetricFamily(PREFIX + "http_requests_open", "Requests that are being answered", value=self.open_requests)
        if self._tasks is not None:
            yield GaugeMetricFamily(PREFIX + "event_loop_tasks", "Tasks of the HTTP side's event loop", value=self._tasks)
        memory = GaugeMetricFamily(
            PREFIX + "engine_process_memory_bytes", "Memory of engine processes now", labels=["model_name", "pid", "kind"]
        )
        for model, pid, use in self._sampler.engines:
            for kind, size in (("rss", use.rss_bytes), ("pss", use.pss_bytes)):
                if size is not None:
                    memory.add_metric([model, str(pid), kind], size)
        yield memory
        gpus = GaugeMetricFamily(PREFIX + "gpu_memory_bytes", "Memory of each GPU, as its driver says", labels=["gpu", "name", "kind"])
        for gpu in self._sampler.gpus:
            for kind, size in (("used", gpu.used_bytes), ("total", gpu.total_bytes)):
                gpus.add_metric([str(gpu.index), gpu.name, kind], size)
        yield gpus


def _pids(served: Served) -> Sequence[int]:
    found: Sequence[int] | None = getattr(served, "pids", None)
    if found is not None:
        return found
    return [] if served.engine_pid is None else [served.engine_pid]


def _only(counts: Counter[str], keys: Sequence[str]) -> dict[str, int]:
    return {key: counts[key] for key in keys}
