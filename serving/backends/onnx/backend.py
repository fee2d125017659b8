"""ONNX Runtime on the CPU: a session over a converted graph, with continuous batching.

It runs two kinds of graph. onnx_folder.py describes the difference, fixed_kv_cache.py runs the one
kind and growing_kv_cache.py the other.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.errors import BrokenWeights
from crossover.models.weights.weights_manifest import Progress, read_manifest
from crossover.serving.backends.backend_interface import (
    BackendInfo,
    EngineConfig,
    check_sizes,
    parse_backend_options,
)
from crossover.serving.backends.onnx.fixed_kv_cache import SlotGraph
from crossover.serving.backends.onnx.growing_kv_cache import GrowingGraph
from crossover.serving.backends.onnx.onnx_folder import RowLogits, graph_file, read_facts
from crossover.serving.errors import BackendUnavailable, EngineFailed, OutOfMemory
from crossover.serving.sampling.batch_sampler import sample
from crossover.serving.sampling.step_inputs import Row, Sampled


class OnnxOptions(msgspec.Struct, frozen=True):
    """`--option key=value` of the onnx backend."""

    # Idle threads spin between operators. None: unless another engine runs on their cores, from
    # which they would take time: without, two models on two cores served at least 1.5 times as many
    # requests (tests/bench/RESULTS.md).
    spinning: bool | None = None
    flash_attention: bool | None = None  # None: on with at most MAX_FLASH_THREADS threads


# ONNX Runtime's flash attention starts a parallel loop for each row and layer. With more threads
# than this, its other attention, one loop over rows and heads, is faster: 15 threads took 22 ms
# instead of 27 for a step of 16 rows, and 54 instead of 73 for 64 (the bare graph of 1B int8). Two
# threads are slower by 2 to 17 % without flash attention.
MAX_FLASH_THREADS = 8


class OnnxBackend:
    """See crossover.serving.backends.backend_interface.Backend."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        options = parse_backend_options(OnnxOptions, config.options, "onnx")
        if config.device != "cpu":
            raise BackendUnavailable(
                f"The onnx backend runs only on the CPU, not on device {config.device!r}"
            )
        import onnxruntime

        file = graph_file(config.model_path)
        manifest = read_manifest(file.parent)
        threads = config.threads or len(config.cores) or len(os.sched_getaffinity(0))
        progress(f"loading {file.name}", None)
        spins = not config.shares_cores if options.spinning is None else options.spinning
        self._session: Any = _session(onnxruntime, file, options, threads, spins)
        facts = read_facts(self._session, file)
        check_sizes(config, facts.context_tokens, "fp32")
        settings = config.settings
        slots, context = settings.slots, settings.context_tokens
        kv_tokens = min(settings.pool_tokens, slots * context)
        self._graph: SlotGraph | GrowingGraph | None  # None: closed
        if facts.grouped:
            self._graph = SlotGraph(self._session, facts, slots, context)
            graph_kind = "GroupQueryAttention, appended to in place"
        else:
            self._graph = GrowingGraph(self._session, facts, slots, context)
            graph_kind = "growing past_key_values, copied every step"
        self.last_decode_seconds: float | None = None
        stored_format = manifest.weight_format if manifest is not None else file.stem
        self.info = BackendInfo(
            name="onnx",
            device="cpu",
            device_name="CPU",
            settings=msgspec.structs.replace(settings, kv_tokens=kv_tokens, kv_dtype="fp32"),
            vocabulary=facts.vocabulary,
            weight_format=config.weight_format or stored_format,
            has_export=facts.grouped,
            details={
                "onnxruntime": str(onnxruntime.__version__),
                "graph": graph_kind,
                "kv_dtype": "fp32",
                "threads": str(threads),
                "spinning": str(spins).lower(),
                "flash_attention": str(_has_flash_attention(options, threads)).lower(),
                "made_by": "not known" if manifest is None else manifest.generator,
            },
        )

    def step(self, rows: list[Row]) -> list[Sampled]:
        graph = self._graph
        self.last_decode_seconds = None
        if graph is None:
            raise EngineFailed("the backend is closed")
        decoding = [row for row in rows if len(row.tokens) == 1]
        prompts = [row for row in rows if len(row.tokens) > 1]
        results: list[RowLogits] = []
        try:
            if decoding:
                started = time.perf_counter()
                results.append(graph.run(decoding))
                self.last_decode_seconds = time.perf_counter() - started
            results += [graph.run(group) for group in graph.group_prompts(prompts)]
        except (MemoryError, RuntimeError) as problem:  # onnxruntime's derive from RuntimeError
            what = f"a step of {sum(len(row.tokens) for row in rows)} tokens"
            if isinstance(problem, MemoryError) or _is_out_of_memory(str(problem)):
                raise OutOfMemory(f"{what} did not fit in memory: {problem}") from problem
            raise EngineFailed(f"onnxruntime failed in {what}: {problem}") from problem
        sampling_rows = [row for result in results for row in result.rows]
        if not sampling_rows:
            return []
        logits = results[0].logits
        if len(results) > 1:
            logits = np.concatenate([result.logits for result in results])
        sampled_by_slot: dict[int, Sampled] = {}
        for row, sampled in zip(sampling_rows, sample(logits, sampling_rows), strict=True):
            sampled_by_slot[row.slot] = sampled
        return [sampled_by_slot[row.slot] for row in rows if row.wants_token]

    def copy(self, source: int, target: int, tokens: int) -> None:
        if self._graph is not None:
            self._graph.copy(source, target, tokens)

    def state_bytes(self, tokens: int) -> int:
        return self._slot_graph.state_bytes(tokens)

    def export(self, slot: int, buffer: npt.NDArray[np.uint8]) -> int:
        return self._slot_graph.export(slot, buffer)

    def load(self, slot: int, data: npt.NDArray[np.uint8], tokens: int) -> None:
        self._slot_graph.load(slot, data, tokens)

    @property
    def _slot_graph(self) -> SlotGraph:
        assert isinstance(self._graph, SlotGraph)  # as info.has_export says
        return self._graph

    def truncate(self, slot: int, tokens: int) -> None:
        if self._graph is not None:
            self._graph.truncate(slot, tokens)

    def close(self) -> None:
        self._graph = None
        self._session = None


def _has_flash_attention(options: OnnxOptions, threads: int) -> bool:
    if options.flash_attention is None:
        return threads <= MAX_FLASH_THREADS
    return options.flash_attention


def _session(onnxruntime: Any, file: Path, options: OnnxOptions, threads: int, spins: bool) -> Any:
    """Return an onnxruntime.InferenceSession over the file. Raises OutOfMemory, BrokenWeights."""
    # onnxruntime reads this from the environment when a session is made; it has no setting for it.
    is_disabled = not _has_flash_attention(options, threads)
    os.environ["ORT_GQA_DISABLE_FLASH_ATTENTION"] = str(int(is_disabled))
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3  # errors
    settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    try:
        return onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    except Exception as problem:  # onnxruntime has a class for every kind of broken file
        text = str(problem).replace(str(file.parent), "").strip()
        if isinstance(problem, MemoryError) or _is_out_of_memory(text):
            raise OutOfMemory(f"{file.name} does not fit in memory: {text}") from problem
        raise BrokenWeights(
            f"onnxruntime {onnxruntime.__version__} cannot load {file.name}: {text[:300]}"
        ) from problem


def _is_out_of_memory(text: str) -> bool:
    """Return whether onnxruntime's error says that memory ran out."""
    return "bad_alloc" in text or "Failed to allocate" in text
