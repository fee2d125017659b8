"""What a server says of itself at /metrics: ours, those of vLLM, SGLang, llama-server and TGI.

    source = Remote("http://127.0.0.1:8000")
    source()                # a RemoteSample, or a sentence why there is none
    source.engine_time()    # an EngineTime of a Crossover server, else None

Of an endpoint on another machine nothing else can be seen; what it does not tell is None. SGLang
answers with --enable-metrics, llama-server with --metrics; Ollama has no such page.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from loadtests.errors import LoadError
from loadtests.load_generator.http_connection import connect, fetch, get_bytes
from loadtests.records.resource_sample import RemoteSample
from loadtests.records.run_journal import EngineTime

TIMEOUT_SECONDS = 2.0

# kind -> field of RemoteSample -> the names that servers of this kind have had for it, newest first
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "crossover": {
        "running": ("crossover_num_requests_running",),
        "waiting": ("crossover_num_requests_waiting",),
        "kv_share": ("crossover_kv_cache_usage_perc",),
        "prompt_tokens": ("crossover_prompt_tokens_total",),
        "output_tokens": ("crossover_generation_tokens_total",),
        "preemptions": ("crossover_num_preemptions_total",),
    },
    "vllm": {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_share": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "output_tokens": ("vllm:generation_tokens_total",),
        "preemptions": ("vllm:num_preemptions_total",),
    },
    "llama.cpp": {
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "kv_share": ("llamacpp:kv_cache_usage_ratio",),
        "prompt_tokens": ("llamacpp:prompt_tokens_total",),
        "output_tokens": ("llamacpp:tokens_predicted_total",),
    },
    "sglang": {  # docs.sglang.io/references/production_metrics
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_share": ("sglang:token_usage",),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "output_tokens": ("sglang:generation_tokens_total",),
    },
    "tgi": {  # huggingface.co/docs/text-generation-inference/reference/metrics
        "running": ("tgi_batch_current_size",),
        "waiting": ("tgi_queue_size",),
        "prompt_tokens": ("tgi_request_input_length_sum",),
        "output_tokens": ("tgi_request_generated_tokens_sum",),
    },
}

# steps, seconds of the backend, seconds of everything else while there was work
ENGINE_TIME = (
    "crossover_step_backend_seconds_count",
    "crossover_step_backend_seconds_sum",
    "crossover_engine_loop_hold_seconds_sum",
)


class Remote:
    """Reads one endpoint's /metrics. Calling it never raises for what the endpoint does."""

    def __init__(self, url: str, *, api_key: str | None = None, verify_tls: bool = True) -> None:
        self._pool = connect(url, api_key=api_key, verify_tls=verify_tls)
        self._path = f"{self._pool.prefix}/metrics"
        self._cpu: tuple[float, float] | None = None

    def __call__(self) -> RemoteSample | str:
        found = self._read()
        return found if isinstance(found, str) else self._sample(found)

    def engine_time(self) -> EngineTime | None:
        """Of all its models together; None for another server, and where it does not answer."""
        found = self._read()
        self.close()  # it is asked once a level: no server keeps a connection that long
        if isinstance(found, str) or any(name not in found for name in ENGINE_TIME):
            return None
        steps, device, host = (found[name] for name in ENGINE_TIME)
        return EngineTime(steps=round(steps), device_seconds=device, host_seconds=host)

    def close(self) -> None:
        self._pool.close()

    def _read(self) -> dict[str, float] | str:
        """Name -> value, or why there are none."""
        try:
            status, _, body = fetch(self._pool, get_bytes(self._pool, "/metrics"), TIMEOUT_SECONDS)
        except LoadError as problem:
            return f"{self._path}: {problem}"
        if status != 200:
            return f"{self._path} answered {status}"
        try:
            return parse(body.decode(errors="replace"))
        except ValueError as problem:
            return f"{self._path} is not in Prometheus' text format: {problem}"

    def _sample(self, found: Mapping[str, float]) -> RemoteSample | str:
        kind = next((kind for kind, fields in NAMES.items() if _known(fields, found)), "")
        if not kind and "process_resident_memory_bytes" not in found:
            return f"{self._path} holds nothing that is known here"
        values = {
            field: next((found[name] for name in names if name in found), None)
            for field, names in NAMES.get(kind, {}).items()
        }
        share = values.pop("kv_share", None)
        rss = found.get("process_resident_memory_bytes")
        return RemoteSample(
            kind=kind,
            kv_share=share,
            rss_bytes=None if rss is None else int(rss),
            cpu_share=self._cpu_share(found.get("process_cpu_seconds_total")),
            **{name: None if value is None else int(value) for name, value in values.items()},
        )

    def _cpu_share(self, cpu_seconds: float | None) -> float | None:
        """Of one core, since the last call."""
        now, before = time.monotonic(), self._cpu
        self._cpu = None if cpu_seconds is None else (now, cpu_seconds)
        if cpu_seconds is None or before is None or now <= before[0]:
            return None
        used = (cpu_seconds - before[1]) / (now - before[0])
        return None if used < 0 else round(used, 4)


def _known(fields: Mapping[str, tuple[str, ...]], found: Mapping[str, float]) -> bool:
    return any(name in found for names in fields.values() for name in names)


def parse(text: str) -> dict[str, float]:
    """Name -> value, summed over its label sets, NaN left out. Raises ValueError."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not math.isnan(sample.value):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
