"""ONNX Runtime on the CPU: a session over a converted graph, with continuous batching.

Two kinds of graph are served: onnx_folder.py says the difference, fixed_kv_cache.py and
growing_kv_cache.py how.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from crossover.models.errors import BrokenWeights
from crossover.models.weights_manifest import Progress, read_manifest
from crossover.serving.backends.backend_interface import (
    BackendInfo,
    EngineConfig,
    check_sizes,
    parse_options,
)
from crossover.serving.backends.onnx.fixed_kv_cache import SlotGraph
from crossover.serving.backends.onnx.growing_kv_cache import GrowingGraph
from crossover.serving.backends.onnx.onnx_folder import graph_file, read_facts
from crossover.serving.errors import BackendUnavailable, EngineFailed, OutOfMemory
from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.step_inputs import Row, Sampled


class OnnxOptions(msgspec.Struct, frozen=True):
    """`--option key=value` of the onnx backend."""

    spinning: bool = True  # idle threads spin between operators; off where cores are shared
    flash_attention: bool | None = None  # ONNX Runtime's; None: with few threads


# With more threads than this, attention is quicker by one loop over rows and heads than by ONNX
# Runtime's flash attention, which starts a parallel loop for each row and layer: 15 threads took
# 22 ms instead of 27 for a step of 16 rows, 54 instead of 73 for 64 (the bare graph of 1B int8).
# Two threads are slower without it, by 2 to 17 %.
MANY_THREADS = 8


class OnnxBackend:
    """See crossover.serving.backends.backend_interface.Backend."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        options = parse_options(OnnxOptions, config.options, "onnx")
        if config.device != "cpu":
            raise BackendUnavailable(
                f"The onnx backend runs only on the CPU, not on device {config.device!r}"
            )
        import onnxruntime

        file = graph_file(config.model_path)
        manifest = read_manifest(file.parent)
        threads = config.threads or len(config.cores) or len(os.sched_getaffinity(0))
        progress(f"loading {file.name}", None)
        self._session: Any = _session(onnxruntime, file, options, threads)
        facts = read_facts(self._session, file)
        check_sizes(config, facts.context_tokens, "fp32")
        settings = config.settings
        slots, context = settings.slots, settings.context_tokens
        kv_tokens = min(settings.pool_tokens, slots * context)
        self._graph: SlotGraph | GrowingGraph | None
        if facts.grouped:
            self._graph = SlotGraph(self._session, facts, slots, context)
            kind = "GroupQueryAttention, appended to in place"
        else:
            self._graph = GrowingGraph(self._session, facts, slots, context)
            kind = "growing past_key_values, copied every step"
        self.last_decode_seconds: float | None = None
        stored = manifest.weight_format if manifest is not None else file.stem
        self.info = BackendInfo(
            name="onnx",
            device="cpu",
            device_name="CPU",
            settings=msgspec.structs.replace(settings, kv_tokens=kv_tokens, kv_dtype="fp32"),
            vocabulary=facts.vocabulary,
            weight_format=config.weight_format or stored,
            details={
                "onnxruntime": str(onnxruntime.__version__),
                "graph": kind,
                "kv_dtype": "fp32",
                "threads": str(threads),
                "flash_attention": str(_has_flash_attention(options, threads)).lower(),
                "made_by": "not known" if manifest is None else manifest.generator,
            },
        )

    def step(self, rows: list[Row]) -> list[Sampled]:
        graph, self.last_decode_seconds = self._graph, None
        if graph is None:
            raise EngineFailed("the backend is closed")
        decoding = [row for row in rows if len(row.tokens) == 1]
        parts = []
        try:
            if decoding:
                started = time.perf_counter()
                parts.append(graph.run(decoding))
                self.last_decode_seconds = time.perf_counter() - started
            prompts = [row for row in rows if len(row.tokens) > 1]
            parts += [graph.run(group) for group in graph.sharing(prompts)]
        except (MemoryError, RuntimeError) as problem:  # onnxruntime's derive from RuntimeError
            what = f"a step of {sum(len(row.tokens) for row in rows)} tokens"
            if isinstance(problem, MemoryError) or _is_memory(str(problem)):
                raise OutOfMemory(f"{what} did not fit in memory: {problem}") from problem
            raise EngineFailed(f"onnxruntime failed in {what}: {problem}") from problem
        sampling_rows = [row for _, part in parts for row in part]
        if not sampling_rows:
            return []
        logits = (
            parts[0][0]
            if len(parts) == 1
            else np.concatenate([part_logits for part_logits, _ in parts])
        )
        samples = dict(
            zip([row.slot for row in sampling_rows], sample(logits, sampling_rows), strict=True)
        )
        return [samples[row.slot] for row in rows if row.wants_token]

    def copy(self, source: int, target: int, tokens: int) -> None:
        if self._graph is not None:
            self._graph.copy(source, target, tokens)

    def truncate(self, slot: int, tokens: int) -> None:
        if self._graph is not None:
            self._graph.truncate(slot, tokens)

    def close(self) -> None:
        self._graph = None
        self._session = None


def _has_flash_attention(options: OnnxOptions, threads: int) -> bool:
    chosen = options.flash_attention
    return threads <= MANY_THREADS if chosen is None else chosen


def _session(onnxruntime: Any, file: Path, options: OnnxOptions, threads: int) -> Any:
    # Read from the environment when a session is made; there is no setting for it.
    os.environ["ORT_GQA_DISABLE_FLASH_ATTENTION"] = str(
        int(not _has_flash_attention(options, threads))
    )
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(options.spinning)))
    try:
        return onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    except Exception as problem:  # onnxruntime has a class for every kind of broken file
        text = str(problem).replace(str(file.parent), "").strip()
        if isinstance(problem, MemoryError) or _is_memory(text):
            raise OutOfMemory(f"{file.name} does not fit in memory: {text}") from problem
        raise BrokenWeights(
            f"onnxruntime {onnxruntime.__version__} cannot load {file.name}: {text[:300]}"
        ) from problem


def _is_memory(text: str) -> bool:
    return "bad_alloc" in text or "Failed to allocate" in text
