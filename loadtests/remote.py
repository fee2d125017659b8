"""What a server says of itself at /metrics, in Prometheus' text format: ours, vLLM's, llama-server's (--metrics).

    source = Remote("http://127.0.0.1:8000")
    source()          # a RemoteSample, or a sentence why there is none

For an endpoint on another machine this is all that can be seen of its load; what it does not tell stays None.
"""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from loadtests.errors import TargetUnusable
from loadtests.records import RemoteSample

TIMEOUT_SECONDS = 2.0
MOST_BYTES = 8 << 20
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)")

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
}


class Remote:
    """Reads one endpoint's /metrics. Calling it never raises for what the endpoint does."""

    def __init__(self, url: str, *, api_key: str | None = None, verify_tls: bool = True) -> None:
        parts = urlsplit(url)
        if parts.hostname is None or parts.scheme not in ("http", "https"):
            raise TargetUnusable(f"{url!r} is no URL of an endpoint; it should look like http://127.0.0.1:8000")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/metrics"
        if parts.scheme == "https":
            context = ssl.create_default_context() if verify_tls else ssl._create_unverified_context()
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port or 443, timeout=TIMEOUT_SECONDS, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=TIMEOUT_SECONDS)
        self._cpu: tuple[float, float] | None = None

    def __call__(self) -> RemoteSample | str:
        try:
            self._connection.request("GET", self._path, headers=self._headers)
            answer = self._connection.getresponse()
            text = answer.read(MOST_BYTES).decode(errors="replace")
        except (OSError, http.client.HTTPException) as problem:
            self._connection.close()  # the next call opens a new one
            return f"{self._path} did not answer: {type(problem).__name__}"
        if answer.status != 200:
            return f"{self._path} answered {answer.status}"
        return self._sample(parse(text))

    def _sample(self, found: Mapping[str, float]) -> RemoteSample | str:
        kind = next((kind for kind, names in NAMES.items() if any(n in found for known in names.values() for n in known)), "")
        if not kind and "process_resident_memory_bytes" not in found:
            return f"{self._path} holds nothing that is known here"
        values = {field: next((found[name] for name in names if name in found), None) for field, names in NAMES.get(kind, {}).items()}
        share = values.pop("kv_share", None)
        rss, cpu = found.get("process_resident_memory_bytes"), found.get("process_cpu_seconds_total")
        now, before = time.monotonic(), self._cpu
        self._cpu = (now, cpu) if cpu is not None else None
        used = (cpu - before[1]) / (now - before[0]) if cpu is not None and before is not None and now > before[0] else None
        return RemoteSample(
            kind=kind,
            kv_share=share,
            rss_bytes=None if rss is None else int(rss),
            cpu_share=None if used is None or used < 0 else round(used, 4),
            **{name: None if value is None else int(value) for name, value in values.items()},
        )

    def close(self) -> None:
        self._connection.close()


def parse(text: str) -> dict[str, float]:
    """Name -> value, summed over its label sets; what is no number is left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if value == value:
            found[match[1]] = found.get(match[1], 0.0) + value
    return found
