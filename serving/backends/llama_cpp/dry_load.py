"""Whether llama.cpp can load a GGUF file, and the memory it will hold, before anything is promised.

    held = dry_load(EngineConfig("llama_cpp", "x.gguf", "x"), contexts=(2048, 8192))
    held[1].kv_bytes, held[1].state_bytes, held[1].buffer_bytes

A child process loads the file with `no_alloc`: llama.cpp reads the header, checks every tensor,
plans its caches and its compute graphs, and allocates nothing (0.02 to 0.7 s for files of 1 MB to
80 GB). The sizes are llama.cpp's own, so they hold for every architecture that it knows. A file
that it cannot load, or that makes it abort, is one sentence with llama.cpp's reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from crossover.models.child_process import run_python
from crossover.models.errors import BrokenWeights, ModelError, UnsupportedModel
from crossover.models.model_spec import ModelSpec
from crossover.serving.backends.backend_interface import EngineConfig, EngineMemory
from crossover.serving.backends.llama_cpp.cache_layout import longest_whole_context, state_bytes
from crossover.serving.backends.llama_cpp.library import LOG
from crossover.serving.backends.llama_cpp.loading import LlamaOptions, Loader
from crossover.serving.capacity.scheduler_settings import AUTO, DEFAULT_SETTINGS, RequestedSettings
from crossover.serving.errors import BackendUnavailable, OutOfMemory, ServingError, Unsupported

MAX_SECONDS = 120.0
MIN_CONTEXT = 2048  # the shortest that is asked about where nobody says a context
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (BrokenWeights, UnsupportedModel, BackendUnavailable, OutOfMemory)
}
_MIB = 1 << 20
# llama.cpp's words: "llama_kv_cache: size =   12.00 MiB ( 2048 cells, ..."
_SIZES = {
    "kv_bytes": re.compile(r"llama_kv_cache\w*: size = +([\d.]+) MiB"),
    "state_bytes": re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB"),
    "buffer_bytes": re.compile(r" (?:compute|output) buffer size = +([\d.]+) MiB"),
}


class _Failure(msgspec.Struct):
    kind: str
    text: str


def dry_load(config: EngineConfig, contexts: Iterable[int]) -> tuple[EngineMemory, ...]:
    """Return what llama.cpp will hold beside the weights, for each number of context tokens.

    Raises BrokenWeights, UnsupportedModel, BackendUnavailable, OutOfMemory, Unsupported.
    """
    request_json = msgspec.json.encode((config, [*contexts])).decode()
    ran = run_python("-m", __name__, request_json, timeout_seconds=MAX_SECONDS)
    name = Path(config.model_path).name
    if ran.status is None:
        raise BrokenWeights(f"llama.cpp did not read the header of {name} within {MAX_SECONDS:g} s")
    lines = ran.output.splitlines()
    if ran.status != 0 or not lines:
        reason = ran.reason.removeprefix("llama.cpp: ")
        raise BrokenWeights(f"llama.cpp cannot load {name}: {reason}")
    answer = msgspec.json.decode(lines[-1], type=list[EngineMemory] | _Failure)
    if isinstance(answer, _Failure):
        if answer.kind == Unsupported.__name__:
            raise Unsupported(answer.text, "options")
        raise _ERRORS.get(answer.kind, BrokenWeights)(answer.text)
    return tuple(answer)


def reported_memory(
    path: str,
    spec: ModelSpec,
    requested: RequestedSettings,
    options: Mapping[str, Any] = MappingProxyType({}),
    prefix_reuse: bool = True,
) -> tuple[EngineMemory, ...]:
    """`dry_load` of a file, at the context that is asked for; where none is, at powers of two up to
    the model's own. `options`: of the backend. Raises what `dry_load` raises."""
    max_context = spec.context
    contexts = [min(requested.context_tokens or MIN_CONTEXT, max_context)]
    if requested.context_tokens is None and requested.kv_tokens is None:
        while contexts[-1] < max_context:
            contexts.append(min(2 * contexts[-1], max_context))
        # Where windows are kept alone the cache shrinks: both sides of it, so that what lies
        # between two contexts lies on a line.
        longest_whole = longest_whole_context(spec.window_tokens)
        contexts = sorted(
            {
                *contexts,
                *(
                    entry
                    for entry in (longest_whole, longest_whole + 1)
                    if 0 < entry <= max_context
                ),
            }
        )
    if requested.kv_tokens is not None:
        contexts = [min(contexts[0], requested.kv_tokens)]
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
    if not any(entry.kv_bytes or entry.state_bytes for entry in memory_by_context):
        raise UnsupportedModel(
            f"{spec.name} keeps nothing of a sequence, as encoders and embedding models do; it "
            "writes no text. Use llama-server --embeddings for it."
        )
    return tuple(_with_checkpoints(entry, spec, config) for entry in memory_by_context)


def _with_checkpoints(reported: EngineMemory, spec: ModelSpec, config: EngineConfig) -> EngineMemory:
    """With what checkpoints take, which are of our making. llama.cpp says MiB with two decimals, of
    three parts of a state; where its layers say the same bytes within that, they are exact."""
    slots, reported_state_bytes, kv_dtype = (
        config.settings.slots,
        reported.state_bytes,
        config.settings.kv_dtype,
    )
    kv_dtype = "fp16" if kv_dtype == AUTO else kv_dtype
    tokens = slots * reported.context_tokens
    exact_state_bytes = state_bytes(spec, tokens, slots, kv_dtype, saves=False)
    if abs(exact_state_bytes - reported_state_bytes) <= 0.02 * _MIB:
        reported_state_bytes = exact_state_bytes
    checkpoints_bytes = (
        state_bytes(spec, tokens, slots, kv_dtype, config.prefix_reuse) - exact_state_bytes
    )
    return msgspec.structs.replace(reported, state_bytes=reported_state_bytes + checkpoints_bytes)


def _measure(config: EngineConfig, contexts: list[int]) -> list[EngineMemory]:
    """In the child."""
    loader = Loader(config)
    model = loader.load_without_memory()
    measured = []
    for tokens in contexts:
        lines: list[str] = []
        LOG.heard = lines.append
        context = loader.context(model, tokens)
        LOG.heard = None
        sizes = {
            name: round(_MIB * sum(float(match[1]) for match in map(words.search, lines) if match))
            for name, words in _SIZES.items()
        }
        measured.append(EngineMemory(context_tokens=tokens, **sizes))
        loader.llama.llama_free(context)
    return measured


def _main() -> None:
    config, contexts = msgspec.json.decode(sys.argv[1], type=tuple[EngineConfig, list[int]])
    answer: list[EngineMemory] | _Failure
    try:
        answer = _measure(config, contexts)
    except (ModelError, ServingError) as problem:
        answer = _Failure(type(problem).__name__, str(problem))
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    _main()
