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
from crossover.serving.backends.backend_interface import EngineConfig, HeldMemory
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


def dry_load(config: EngineConfig, contexts: Iterable[int]) -> tuple[HeldMemory, ...]:
    """Return what llama.cpp will hold beside the weights, for each number of context tokens.

    Raises BrokenWeights, UnsupportedModel, BackendUnavailable, OutOfMemory, Unsupported.
    """
    asked = msgspec.json.encode((config, [*contexts])).decode()
    ran = run_python("-m", __name__, asked, timeout_seconds=MAX_SECONDS)
    name = Path(config.model_path).name
    if ran.status is None:
        raise BrokenWeights(f"llama.cpp did not read the header of {name} within {MAX_SECONDS:g} s")
    lines = ran.output.splitlines()
    if ran.status != 0 or not lines:
        reason = ran.reason.removeprefix("llama.cpp: ")
        raise BrokenWeights(f"llama.cpp cannot load {name}: {reason}")
    found = msgspec.json.decode(lines[-1], type=list[HeldMemory] | _Failure)
    if isinstance(found, _Failure):
        if found.kind == Unsupported.__name__:
            raise Unsupported(found.text, "options")
        raise _ERRORS.get(found.kind, BrokenWeights)(found.text)
    return tuple(found)


def held_memory(
    path: str,
    spec: ModelSpec,
    asked: RequestedSettings,
    options: Mapping[str, Any] = MappingProxyType({}),
    prefix_reuse: bool = True,
) -> tuple[HeldMemory, ...]:
    """`dry_load` of a file, at the context that is asked for; where none is, at powers of two up to
    the model's own. `options`: of the backend. Raises what `dry_load` raises."""
    most = spec.context
    contexts = [min(asked.context_tokens or MIN_CONTEXT, most)]
    if asked.context_tokens is None and asked.kv_tokens is None:
        while contexts[-1] < most:
            contexts.append(min(2 * contexts[-1], most))
        # Where windows are kept alone the cache shrinks: both sides of it, so that what lies
        # between two contexts lies on a line.
        edge = longest_whole_context(spec.window_tokens)
        contexts = sorted({*contexts, *(one for one in (edge, edge + 1) if 0 < one <= most)})
    if asked.kv_tokens is not None:
        contexts = [min(contexts[0], asked.kv_tokens)]
    settings = asked.filled(DEFAULT_SETTINGS["cpu"])
    config = EngineConfig(
        backend="llama_cpp",
        model_path=path,
        model_name=spec.name,
        settings=msgspec.structs.replace(settings, context_tokens=contexts[0]),
        prefix_reuse=prefix_reuse,
        options={key: options[key] for key in LlamaOptions.__struct_fields__ if key in options},
    )
    held = dry_load(config, contexts)
    if not any(one.kv_bytes or one.state_bytes for one in held):
        raise UnsupportedModel(
            f"{spec.name} keeps nothing of a sequence, as encoders and embedding models do; it "
            "writes no text. Use llama-server --embeddings for it."
        )
    return tuple(_with_checkpoints(one, spec, config) for one in held)


def _with_checkpoints(one: HeldMemory, spec: ModelSpec, config: EngineConfig) -> HeldMemory:
    """With what checkpoints take, which are of our making. llama.cpp says MiB with two decimals, of
    three parts of a state; where its layers say the same bytes within that, they are exact."""
    slots, held, kv_dtype = config.settings.slots, one.state_bytes, config.settings.kv_dtype
    kv_dtype = "fp16" if kv_dtype == AUTO else kv_dtype
    tokens = slots * one.context_tokens
    counted = state_bytes(spec, tokens, slots, kv_dtype, saves=False)
    if abs(counted - held) <= 0.02 * _MIB:
        held = counted
    saved = state_bytes(spec, tokens, slots, kv_dtype, config.prefix_reuse) - counted
    return msgspec.structs.replace(one, state_bytes=held + saved)


def _measure(config: EngineConfig, contexts: list[int]) -> list[HeldMemory]:
    """In the child."""
    loader = Loader(config)
    model = loader.load_without_memory()
    held = []
    for tokens in contexts:
        lines: list[str] = []
        LOG.heard = lines.append
        context = loader.context(model, tokens)
        LOG.heard = None
        sizes = {
            name: round(_MIB * sum(float(one[1]) for one in map(words.search, lines) if one))
            for name, words in _SIZES.items()
        }
        held.append(HeldMemory(context_tokens=tokens, **sizes))
        loader.llama.llama_free(context)
    return held


def _main() -> None:
    config, contexts = msgspec.json.decode(sys.argv[1], type=tuple[EngineConfig, list[int]])
    answer: list[HeldMemory] | _Failure
    try:
        answer = _measure(config, contexts)
    except (ModelError, ServingError) as problem:
        answer = _Failure(type(problem).__name__, str(problem))
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    _main()
