"""Loads a GGUF file without allocating memory: whether llama.cpp supports it, and what it needs.

    memory = dry_load(EngineConfig("llama_cpp", "x.gguf", "x"), contexts=(2048, 8192))
    memory[8192].kv_bytes, memory[8192].state_bytes, memory[8192].buffer_bytes

A child process loads the file with `no_alloc`: llama.cpp reads the header, checks every tensor and
plans its caches and compute graphs, but allocates nothing. This takes 0.02 to 0.7 s for files of
1 MB to 80 GB. The sizes are llama.cpp's own, so they are right for every architecture that it
supports. If it cannot load the file, or aborts, the error has llama.cpp's reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from crossover.models.child_process import end_with_parent, run_python
from crossover.models.errors import BrokenWeights, ModelError, UnsupportedModel
from crossover.models.shape.model_spec import ModelSpec
from crossover.serving.backends.backend_interface import EngineConfig, EngineMemory
from crossover.serving.backends.llama_cpp.cache_layout import longest_whole_context, state_bytes
from crossover.serving.backends.llama_cpp.library import LOG
from crossover.serving.backends.llama_cpp.loading import LlamaOptions, Loader
from crossover.serving.capacity.scheduler_settings import AUTO, DEFAULT_SETTINGS, RequestedSettings
from crossover.serving.errors import BackendUnavailable, OutOfMemory, ServingError, Unsupported

MAX_SECONDS = 120.0
MIN_CONTEXT = 2048  # the shortest context that is tried if none is requested
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (BrokenWeights, UnsupportedModel, BackendUnavailable, OutOfMemory)
}
_MIB = 1 << 20
# Fields of EngineMemory -> the lines of llama.cpp's log whose sizes add up to them, such as
# "llama_kv_cache: size =   12.00 MiB ( 2048 cells, ..."
_SIZES = {
    "kv_bytes": re.compile(r"llama_kv_cache\w*: size = +([\d.]+) MiB"),
    "state_bytes": re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB"),
    "buffer_bytes": re.compile(r" (?:compute|output) buffer size = +([\d.]+) MiB"),
}


class _Failure(msgspec.Struct):
    """An error of the child process."""

    kind: str  # name of the exception's class
    text: str


def dry_load(config: EngineConfig, contexts: Sequence[int]) -> dict[int, EngineMemory]:
    """Return the memory that llama.cpp needs besides the weights, by these context lengths
    (tokens).

    Raises BrokenWeights (llama.cpp cannot load the file), UnsupportedModel, BackendUnavailable,
    OutOfMemory, and Unsupported (an option or setting).
    """
    request_json = msgspec.json.encode((config, contexts)).decode()
    child = run_python("-m", __name__, request_json, timeout_seconds=MAX_SECONDS)
    name = Path(config.model_path).name
    if child.status is None:
        raise BrokenWeights(f"llama.cpp did not read the header of {name} within {MAX_SECONDS:g} s")
    lines = child.output.splitlines()
    if child.status != 0 or not lines:
        reason = child.reason.removeprefix("llama.cpp: ")
        raise BrokenWeights(f"llama.cpp cannot load {name}: {reason}")
    answer = msgspec.json.decode(lines[-1], type=list[EngineMemory] | _Failure)
    if isinstance(answer, _Failure):
        if answer.kind == Unsupported.__name__:
            raise Unsupported(answer.text, "options")
        error_type = _ERRORS.get(answer.kind, BrokenWeights)
        raise error_type(answer.text)
    return dict(zip(contexts, answer, strict=True))


def reported_memory(
    path: str,
    spec: ModelSpec,
    requested: RequestedSettings,
    options: Mapping[str, Any] = MappingProxyType({}),
    prefix_reuse: bool = True,
) -> dict[int, EngineMemory]:
    """Return the memory that llama.cpp and its checkpoints need besides the weights of a file, by
    context length.

    The context is the requested one, or the requested KV tokens if these are fewer. If neither is
    requested, there is one entry for each doubling from MIN_CONTEXT to the model's maximum, in
    ascending order. `options` are those of the backend.

    Raises UnsupportedModel if the model has no cache at all, and what `dry_load` raises.
    """
    if requested.context_tokens is None and requested.kv_tokens is None:
        contexts = _sampled_contexts(spec)
    else:
        context = min(requested.context_tokens or MIN_CONTEXT, spec.context)
        contexts = [min(context, requested.kv_tokens or context)]
    settings = requested.filled(DEFAULT_SETTINGS["cpu"])
    config = EngineConfig(
        backend="llama_cpp",
        model_path=path,
        model_name=spec.name,
        settings=msgspec.structs.replace(settings, context_tokens=contexts[0]),
        prefix_reuse=prefix_reuse,
        options={key: options[key] for key in LlamaOptions.__struct_fields__ if key in options},
    )
    memory_by_context = dry_load(config, contexts)
    if not any(entry.kv_bytes or entry.state_bytes for entry in memory_by_context.values()):
        raise UnsupportedModel(
            f"{spec.name} keeps nothing of a sequence, as encoders and embedding models do; it "
            "writes no text. Use llama-server --embeddings for it."
        )
    return {
        tokens: _with_checkpoints(entry, tokens, spec, config)
        for tokens, entry in memory_by_context.items()
    }


def _sampled_contexts(spec: ModelSpec) -> list[int]:
    """Return the context lengths at which memory is read, ascending: the doublings of MIN_CONTEXT
    up to the model's maximum, and the maximum."""
    max_context = spec.context
    contexts = [min(MIN_CONTEXT, max_context)]
    while contexts[-1] < max_context:
        contexts.append(min(2 * contexts[-1], max_context))
    # The cache shrinks where layers begin to keep only their windows. Both sides of this step are
    # included, so that linear interpolation between two entries is right.
    longest_whole = longest_whole_context(spec.window_tokens)
    for context in (longest_whole, longest_whole + 1):
        if 0 < context <= max_context:
            contexts.append(context)
    return sorted(set(contexts))


def _with_checkpoints(
    reported: EngineMemory, context: int, spec: ModelSpec, config: EngineConfig
) -> EngineMemory:
    """Return the reported memory plus that of the checkpoints, which llama.cpp does not include.

    llama.cpp reports the three parts of a state in MiB with two decimals. If the state that the
    model's shape implies agrees within this rounding, it is used, since it is exact.
    """
    slots, kv_dtype = config.settings.slots, config.settings.kv_dtype
    kv_dtype = "fp16" if kv_dtype == AUTO else kv_dtype
    tokens = slots * context
    implied_bytes = state_bytes(spec, tokens, slots, kv_dtype, has_checkpoints=False)
    with_checkpoints = state_bytes(spec, tokens, slots, kv_dtype, config.prefix_reuse)
    checkpoint_bytes = with_checkpoints - implied_bytes
    rounding_bytes = 0.02 * _MIB  # of three sums, each rounded to 0.01 MiB
    is_same = abs(implied_bytes - reported.state_bytes) <= rounding_bytes
    own_bytes = implied_bytes if is_same else reported.state_bytes
    return msgspec.structs.replace(reported, state_bytes=own_bytes + checkpoint_bytes)


def _measure(config: EngineConfig, contexts: list[int]) -> list[EngineMemory]:
    """Run in the child process: read the sizes at each context length from llama.cpp's log."""
    loader = Loader(config)
    model = loader.load_without_memory()
    memory_by_context = []
    for tokens in contexts:
        lines: list[str] = []
        LOG.on_line = lines.append
        context = loader.context(model, tokens)
        LOG.on_line = None
        loader.llama.llama_free(context)
        sizes = {name: _logged_bytes(pattern, lines) for name, pattern in _SIZES.items()}
        memory_by_context.append(EngineMemory(**sizes))
    return memory_by_context


def _logged_bytes(pattern: re.Pattern[str], lines: list[str]) -> int:
    """Return the sum of the sizes in all lines that match; 0 if none does. The pattern's group is a
    size in MiB."""
    sizes_mib = [float(match[1]) for line in lines if (match := pattern.search(line))]
    return round(_MIB * sum(sizes_mib))


def _main() -> None:
    """Run the child process: print a list of EngineMemory, or a _Failure, as JSON."""
    end_with_parent()
    config, contexts = msgspec.json.decode(sys.argv[1], type=tuple[EngineConfig, list[int]])
    answer: list[EngineMemory] | _Failure
    try:
        answer = _measure(config, contexts)
    except (ModelError, ServingError) as problem:
        answer = _Failure(type(problem).__name__, str(problem))
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    _main()
