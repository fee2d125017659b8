"""ONNX Runtime on the CPU: a raw session over a converted graph, with continuous batching.

    config = EngineConfig(backend="onnx", model_path="smollm2-135m-int4/", model_name="smollm2-135m", slots=16, context_tokens=2048)
    backend = OnnxBackend(config, progress)

Two kinds of graph are served: see onnx_graph.py for the difference, onnx_slots.py and onnx_growing.py for how. The class below checks
options, predicts the memory, loads, and turns a step's rows into logits and these into tokens.

Options (`--option key=value`):
  file            which .onnx file of the folder; default model.onnx
  spinning        true | false; let idle onnxruntime threads spin between operators. Default true; false where cores are shared
  optimisation    all | extended | basic | none: onnxruntime's graph optimisation; default all
  arena           true | false; onnxruntime's memory arena; default true
  prefill_chunk   most prompt tokens of one call; default 512
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from models.errors import BrokenWeights
from models.manifest import Manifest, read_manifest, verify
from serving.backends.base import CAPABILITIES, BackendInfo, EngineConfig, MemoryParts, Row, Sampled
from serving.backends.kv_rows import rider_tokens
from serving.backends.onnx_graph import (
    KV_NAMES,
    GraphFacts,
    graph_file,
    is_batch_dependent,
    read_facts,
    read_json,
    resident_bytes,
    weight_bytes,
)
from serving.backends.onnx_growing import GrowingGraph
from serving.backends.onnx_slots import SlotGraph
from serving.errors import BackendUnavailable, EngineFailed, OutOfMemory, Unsupported
from serving.sampling import sample

_OPTIMISATION = {"all": "ORT_ENABLE_ALL", "extended": "ORT_ENABLE_EXTENDED", "basic": "ORT_ENABLE_BASIC", "none": "ORT_DISABLE_ALL"}
_OPTIONS = ("file", "spinning", "optimisation", "arena", "prefill_chunk")
CAN = frozenset(CAPABILITIES)
_COMPUTE_BYTES = 150 << 20  # arena, thread pools and onnxruntime itself; measured 120 to 180 MB


class OnnxBackend:
    """See serving.backends.base. Raises Unsupported (options), OutOfMemory, BrokenWeights, UnsupportedModel, BackendUnavailable."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, float | None], None]) -> None:
        options = check_options(config.options)
        if config.device != "cpu":
            raise BackendUnavailable(f"the onnx backend runs on the CPU; device={config.device!r} was asked for")
        try:
            import onnxruntime
        except ImportError as problem:
            raise BackendUnavailable(f"onnxruntime cannot be imported: {problem}; pip install 'llm-crossover[onnx]'") from problem
        file = graph_file(config.model_path, options["file"])
        manifest = read_manifest(file.parent)
        if manifest is not None:
            verify(file.parent, manifest, progress=progress)
        size = weight_bytes(file)
        resident = resident_bytes(file)
        _check_memory(resident + _COMPUTE_BYTES, f"the weights of {file.name}")
        threads = config.threads or len(config.cores) or len(os.sched_getaffinity(0))
        progress(f"loading {file.name}", None)
        before = _anonymous_bytes()
        self._session = _session(onnxruntime, file, options, threads)
        loaded = max(0, _anonymous_bytes() - before)
        facts = read_facts(self._session, file)
        _check_config(config, facts)
        kv_reserved = config.slots * config.context_tokens * facts.kv_bytes_per_token
        kv_tokens = min(config.kv_tokens or config.slots * config.context_tokens, config.slots * config.context_tokens)
        kv_needed = kv_tokens * facts.kv_bytes_per_token  # pages of idle slots are never touched
        _check_memory(kv_needed, f"the KV cache of {kv_tokens} tokens")
        self._graph: SlotGraph | GrowingGraph | None
        if facts.grouped:
            price = rider_tokens(2 * size, threads, facts.kv_bytes_per_token)  # about a weight a byte
            self._graph = SlotGraph(self._session, facts, config.slots, config.context_tokens, price)
            batching = "decode rows in one call over neighbouring KV rows, appended in place; prompts one call each"
        else:
            self._graph = GrowingGraph(self._session, facts, config.slots, config.context_tokens)
            batching = (
                "decode rows in one call, padded on the left; the cache is copied every step"
                if facts.position_ids
                else "row by row (the graph has no position_ids); the cache is copied every step"
            )
        self._chunk: int = options["prefill_chunk"]
        self.info = BackendInfo(
            name="onnx",
            device="cpu",
            device_name="CPU",
            slots=config.slots,
            context_tokens=config.context_tokens,
            kv_tokens=kv_tokens,
            vocabulary=facts.vocabulary,
            weight_format=config.weight_format or (manifest.weight_format if manifest is not None else file.stem),
            step_tokens=max(512, 2 * config.slots),
            predicted=MemoryParts(resident, kv_reserved, _COMPUTE_BYTES),
            measured=MemoryParts(loaded, self._graph.kv_bytes if facts.grouped else None),
            capabilities=CAN,
            details=_details(onnxruntime, facts, manifest, read_json(file.parent / "conversion.json"), options, threads, batching)
            | ({"batch_dependent": "true"} if is_batch_dependent(file) else {}),
        )

    def step(self, rows: list[Row]) -> list[Sampled]:
        """See serving.backends.base.Backend.step."""
        if self._graph is None:
            raise EngineFailed("the backend is closed")
        try:
            logits, wanted = self._graph.run(rows, self._chunk)
        except MemoryError as problem:
            raise OutOfMemory(f"a step of {sum(len(row.tokens) for row in rows)} tokens did not fit in memory: {problem}") from problem
        except RuntimeError as problem:  # onnxruntime's exceptions derive from it
            if "bad_alloc" in str(problem) or "Failed to allocate" in str(problem):
                raise OutOfMemory(f"onnxruntime ran out of memory in a step: {problem}") from problem
            raise EngineFailed(f"onnxruntime failed in a step: {problem}") from problem
        if not wanted:
            return []
        drawn = dict(zip([row.slot for row in wanted], sample(logits, wanted), strict=True))
        return [drawn[row.slot] for row in rows if row.wants_token]

    @property
    def last_decode_seconds(self) -> float | None:
        """See serving.backends.base."""
        return None if self._graph is None else self._graph.last_decode_seconds

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See serving.backends.base.Backend.copy."""
        if self._graph is not None:
            self._graph.copy(source, target, tokens)

    def truncate(self, slot: int, tokens: int) -> None:
        """See serving.backends.base.Backend.truncate."""
        if self._graph is not None:
            self._graph.truncate(slot, tokens)

    def close(self) -> None:
        """See serving.backends.base.Backend.close."""
        if self._graph is not None:
            self._graph.close()
        self._graph, self._session = None, None


def check_options(given: dict[str, Any]) -> dict[str, Any]:
    """All options with their values, defaults filled in. Raises Unsupported naming the key and the value."""
    for key in given:
        if key not in _OPTIONS:
            raise Unsupported(f"the onnx backend has no option {key!r}; it has {', '.join(_OPTIONS)}", key)
    optimisation = given.get("optimisation", "all")
    if optimisation not in _OPTIMISATION:
        raise Unsupported(f"option optimisation must be one of {', '.join(_OPTIMISATION)}, got {optimisation!r}", "optimisation")
    chunk = given.get("prefill_chunk", 512)
    try:
        chunk = int(chunk)
    except (TypeError, ValueError):
        chunk = 0
    if not 1 <= chunk <= 8192:
        raise Unsupported(f"option prefill_chunk must be a number from 1 to 8192, got {given['prefill_chunk']!r}", "prefill_chunk")
    file = given.get("file")
    if file is not None and not isinstance(file, str):
        raise Unsupported(f"option file must be a file's name, got {file!r}", "file")
    return {
        "file": file,
        "spinning": _flag(given, "spinning", True),
        "optimisation": optimisation,
        "arena": _flag(given, "arena", True),
        "prefill_chunk": chunk,
    }


def _flag(given: dict[str, Any], key: str, default: bool) -> bool:
    value = given.get(key, default)
    found = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}.get(str(value).lower())
    if found is None:
        raise Unsupported(f"option {key} must be true or false, got {value!r}", key)
    return found


def _session(onnxruntime: Any, file: Path, options: dict[str, Any], threads: int) -> Any:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _OPTIMISATION[options["optimisation"]])
    settings.enable_cpu_mem_arena = options["arena"]
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.intra_op.allow_spinning", "1" if options["spinning"] else "0")
    try:
        return onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    except MemoryError as problem:
        raise OutOfMemory(f"{file.name} does not fit in memory: {problem}") from problem
    except Exception as problem:  # onnxruntime raises classes of its own for every kind of broken or foreign file
        text = str(problem).replace(str(file.parent), "").strip()
        if "bad_alloc" in text or "Failed to allocate" in text:
            raise OutOfMemory(f"{file.name} does not fit in memory: {text}") from problem
        raise BrokenWeights(f"onnxruntime {onnxruntime.__version__} cannot load {file.name}: {text[:300]}") from problem


def _check_memory(needed_bytes: int, what: str) -> None:
    available = psutil.virtual_memory().available
    if needed_bytes > available:
        raise OutOfMemory(f"{what} need about {needed_bytes >> 20} MiB and {available >> 20} MiB are available")


def _check_config(config: EngineConfig, facts: GraphFacts) -> None:
    if config.slots < 1 or config.context_tokens < 1:
        raise Unsupported(f"slots and context_tokens must be at least 1, got {config.slots} and {config.context_tokens}", "slots")
    if facts.context_tokens is not None and config.context_tokens > facts.context_tokens:
        raise Unsupported(f"context_tokens is {config.context_tokens}, and the model was made for {facts.context_tokens}", "context_tokens")
    if config.kv_dtype in ("q8_0", "q4_0"):
        raise Unsupported(
            f"kv_dtype {config.kv_dtype} is llama.cpp's; this graph's KV cache is {KV_NAMES[facts.kv_type]}, fixed when it was converted",
            "kv_dtype",
        )


def _anonymous_bytes() -> int:
    """Private memory of this process that no file backs, in bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def _details(
    onnxruntime: Any,
    facts: GraphFacts,
    manifest: Manifest | None,
    conversion: dict[str, Any],
    options: dict[str, Any],
    threads: int,
    batching: str,
) -> dict[str, str]:
    details = {
        "onnxruntime": onnxruntime.__version__,
        "graph": "GroupQueryAttention" if facts.grouped else "growing past_key_values",
        "batching": batching,
        "kv_dtype": KV_NAMES[facts.kv_type],
        "threads": str(threads),
        "spinning": str(options["spinning"]).lower(),
        "optimisation": str(options["optimisation"]),
    }
    if manifest is not None and manifest.quality_kl_nats is not None:
        details["quality_kl_nats"] = f"{manifest.quality_kl_nats:.3g}"
    for key in ("exporter", "quantiser_target", "activation_scales"):
        if key in conversion:
            details[key] = str(conversion[key]).lower()
    return details
