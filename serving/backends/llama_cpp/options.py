"""Options of the llama_cpp backend, and what follows from them and the engine's configuration.

The defaults are the quickest that were measured (tests/bench/llama_cpp_steps.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from models.errors import BrokenWeights
from serving.backends.backend_interface import AUTO, EngineConfig
from serving.backends.llama_cpp.library import KV_TYPES, build_details
from serving.bounds import Count, check
from serving.errors import BackendUnavailable, Unsupported

QUANTISED_KV = ("q8_0", "q4_0")  # these need flash attention


class LlamaOptions(msgspec.Struct, frozen=True):
    """`--option key=value` of the llama_cpp backend."""

    # auto: off on a CPU unless kv_dtype needs it (see backend.py); on a GPU llama.cpp decides.
    flash_attention: Literal["auto", "off", "on"] = "auto"
    # One KV pool for all slots, whose rows attend to all rows' tokens, or a part for each slot.
    # None: a part each, unless kv_tokens is less than that takes.
    kv_unified: bool | None = None
    # Map the file or read it. None: mapped on a GPU, read on the CPU: one row 5 % quicker on 135M
    # Q4_0, and repacked weights are there once, not twice (90 instead of 150 MB).
    mmap: bool | None = None
    mlock: bool = False  # keep the weights from being swapped out
    repack: bool = True  # rearrange weights for this CPU's instructions
    step_tokens: Count = 512  # most tokens of a step (n_batch)
    ubatch_tokens: Count = 512  # most tokens of a pass over the weights (n_ubatch)
    prefill_threads: Count | None = None  # of steps of more than one token; None: as decoding
    # How threads wait for each other: default (spin, then sleep), active (spin), passive (sleep).
    wait_policy: Literal["default", "active", "passive"] = "default"
    gpu_layers: Annotated[int, msgspec.Meta(ge=-1)] = -1  # on the GPU; -1: all
    dry_run: bool = True  # lay out memory without weights first, refuse what cannot fit
    warm_up: bool = True  # one step while loading takes the page faults

    def is_unified(self, config: EngineConfig) -> bool:
        """Whether all slots share one KV pool."""
        if self.kv_unified is not None:
            return self.kv_unified
        whole = config.slots * config.context_tokens
        return config.kv_tokens is not None and config.kv_tokens < whole

    def is_mapped(self, config: EngineConfig) -> bool:
        """Whether the file is mapped."""
        return config.device == "gpu" if self.mmap is None else self.mmap

    def attention(self, config: EngineConfig) -> str:
        """flash_attention with "auto" resolved for the CPU."""
        if self.flash_attention != "auto" or config.device == "gpu":
            return self.flash_attention
        return "on" if config.kv_dtype in QUANTISED_KV else "off"


def kv_dtype_of(config: EngineConfig) -> str:
    """The type that the KV cache is held in."""
    return "fp16" if config.kv_dtype == AUTO else config.kv_dtype


def check_config(config: EngineConfig, options: LlamaOptions, llama: Any) -> None:
    """Refuse what can be refused before anything is loaded."""
    check(config)
    most = int(llama.llama_max_parallel_sequences())
    pool, context = config.kv_tokens, config.context_tokens
    needs_flash = config.kv_dtype in QUANTISED_KV
    has_parts = options.kv_unified is False
    kinds = ", ".join(KV_TYPES)
    for is_wrong, key, message in (
        (
            config.slots > most,
            "slots",
            f"slots must be at most {most} with llama.cpp, got {config.slots}",
        ),
        (
            kv_dtype_of(config) not in KV_TYPES,
            "kv_dtype",
            f"kv_dtype must be one of {kinds} with llama.cpp, got {config.kv_dtype!r}",
        ),
        (
            needs_flash and options.flash_attention == "off",
            "flash_attention",
            f"kv_dtype {config.kv_dtype} needs flash attention, and option flash_attention is off",
        ),
        (
            pool is not None and has_parts and pool != config.slots * context,
            "kv_tokens",
            "kv_tokens is a size of the unified pool; with option kv_unified = false each slot "
            "has its context_tokens",
        ),
        (
            pool is not None and pool < context,
            "kv_tokens",
            f"kv_tokens is {pool}, less than one sequence's context_tokens = {context}",
        ),
        (
            config.device not in ("cpu", "gpu"),
            "device",
            f"device must be cpu or gpu, got {config.device!r}",
        ),
    ):
        if is_wrong:
            raise Unsupported(message, key)
    if config.device == "gpu" and not llama.llama_supports_gpu_offload():
        build = build_details(llama)
        raise BackendUnavailable(
            f"{build['package']} ({build['wheel']}) was built without GPU support; "
            "crossover doctor says how to build it with CUDA, ROCm or Vulkan"
        )
    if not Path(config.model_path).is_file():
        raise BrokenWeights(f"there is no GGUF file {Path(config.model_path).name}")
