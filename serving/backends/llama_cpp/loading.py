"""Loads a GGUF file: a dry run that measures the memory, the weights, the context."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from models.errors import BrokenWeights, UnsupportedModel
from models.formatting import size
from models.gguf_reader import read_header
from models.machine import cpu_flags
from models.manifest import Progress
from serving.backends.backend_interface import EngineConfig, MemoryParts
from serving.backends.llama_cpp.extra_buffers import AMX, REPACK, extra_bytes, weights_in
from serving.backends.llama_cpp.library import (
    FLASH_ATTENTION,
    KV_TYPES,
    LOG,
    device_named,
    devices_said,
    dry_run_parts,
    library,
    memory_parts,
    model_buffers,
)
from serving.backends.llama_cpp.options import LlamaOptions, check_config, kv_dtype_of
from serving.errors import BackendUnavailable, OutOfMemory, Unsupported
from serving.hardware.gpus import VULKAN
from serving.hardware.machine_facts import allowed_cores, refuse_shortage


def bytes_in_ram(file: Path) -> int:
    """Of a GGUF file's weights, those that stay in RAM with all layers on GPUs: the embedding,
    unless it is the output matrix too, of which the GPU then has a copy."""
    tensors = read_header(file).tensors
    embedding = tensors.get("token_embd.weight")
    return embedding.bytes if embedding is not None and "output.weight" in tensors else 0


class Loader:
    """The library with one configuration. Raises Unsupported and BackendUnavailable."""

    def __init__(self, config: EngineConfig, options: LlamaOptions) -> None:
        self.config = config
        self.options = options
        self.threads = config.threads or len(allowed_cores())
        self.llama = library(options.wait_policy)
        check_config(config, options, self.llama)
        self.is_unified = options.is_unified(config)
        self.attention = options.attention(config)
        self._devices: Any = None  # llama.cpp reads this list while it loads; None: all devices
        if config.device_vendor == VULKAN and config.device_id:
            self._devices = device_named(self.llama, config.device_id)

    def dry_run(self) -> MemoryParts:
        """Lay everything out without weights. Raises OutOfMemory where it cannot fit."""
        llama, config = self.llama, self.config
        LOG.record()
        settings = self._model_settings()
        settings.no_alloc = True
        settings.load_mode = llama.llama_load_mode_from_str(b"none")
        model = llama.llama_model_load_from_file(config.model_path.encode(), settings)
        if not model:
            self._not_loaded()
        try:
            weight_bytes = int(llama.llama_model_size(model))
            trained = int(llama.llama_model_n_ctx_train(model))
            if config.context_tokens > trained:
                raise Unsupported(
                    f"context_tokens is {config.context_tokens}, and the model was made "
                    f"for {trained}",
                    "context_tokens",
                )
            llama.llama_free(self._context(model))
        finally:
            llama.llama_model_free(model)
        lines = LOG.stop()
        parts = dry_run_parts(lines, weight_bytes + self._extra_bytes(lines), config.device)
        if config.device == "cpu" and config.check_memory:
            name = Path(config.model_path).name
            refuse_shortage(parts.total_bytes or 0, f"weights and KV cache of {name}")
        if config.device == "gpu" and config.check_memory and self.options.gpu_layers < 0:
            self._refuse_vram_shortage(parts, devices_said(lines))
        return parts

    def _refuse_vram_shortage(self, parts: MemoryParts, gpus: list[tuple[str, int]]) -> None:
        """Raises OutOfMemory where all layers do not fit in what the GPUs have free."""
        file = Path(self.config.model_path)
        needed = (parts.total_bytes or 0) - bytes_in_ram(file)
        free = sum(free for _, free in gpus)
        if gpus and needed > free:
            raise OutOfMemory(
                f"weights and KV cache of {file.name} need {size(needed)} of VRAM and "
                f"{size(free)} are free; fewer slots, a shorter context or less gpu_layers need "
                "less"
            )

    def load(self, progress: Progress) -> tuple[Any, Any, MemoryParts]:
        """The model, its context, and the memory that they took."""
        LOG.record()
        model = self._model(progress)
        try:
            context = self._context(model)
            return model, context, memory_parts(LOG.stop(), self.config.device)
        except BaseException:
            self.llama.llama_model_free(model)
            raise

    def _extra_bytes(self, lines: list[str]) -> int:
        """What the weights take beyond the file; the lines of the dry run name the buffers."""
        buffers = model_buffers(lines)
        if self.config.device != "cpu" or buffers.isdisjoint((AMX, REPACK)):
            return 0
        weights = weights_in(Path(self.config.model_path))
        return extra_bytes(weights, buffers, cpu_flags(), self.options.is_mapped(self.config))

    def _model(self, progress: Progress) -> Any:
        llama = self.llama
        problems: list[BaseException] = []
        told = -1.0

        def report(fraction: float, _: Any) -> bool:
            nonlocal told
            if fraction - told >= 0.01 or fraction >= 1.0:
                told = fraction
                try:
                    progress("weights", min(1.0, fraction))
                except BaseException as problem:  # it cannot pass through C: abort the load
                    problems.append(problem)
                    return False
            return True

        settings = self._model_settings()
        settings.progress_callback = callback = llama.llama_progress_callback(report)
        model = llama.llama_model_load_from_file(self.config.model_path.encode(), settings)
        del callback
        if problems:
            if model:
                llama.llama_model_free(model)
            raise problems[0]
        if not model:
            self._not_loaded()
        return model

    def _model_settings(self) -> Any:
        options, llama = self.options, self.llama
        modes = ["mmap"] * options.is_mapped(self.config) + ["mlock"] * options.mlock
        settings = llama.llama_model_default_params()
        settings.load_mode = llama.llama_load_mode_from_str("+".join(modes or ["none"]).encode())
        settings.use_extra_bufts = options.repack
        settings.n_gpu_layers = options.gpu_layers if self.config.device == "gpu" else 0
        if self._devices is not None:
            settings.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        return settings

    def _context(self, model: Any) -> Any:
        options, llama, config = self.options, self.llama, self.config
        settings = llama.llama_context_default_params()
        settings.n_ctx = config.slots * config.context_tokens
        if config.kv_tokens is not None:
            settings.n_ctx = config.kv_tokens
        if not self.is_unified:
            settings.n_ctx = config.slots * -(-config.context_tokens // 256) * 256
        settings.n_batch = max(options.step_tokens, config.slots)
        settings.n_ubatch = min(options.ubatch_tokens, settings.n_batch)
        settings.n_seq_max = settings.n_outputs_max = config.slots
        settings.n_threads = self.threads
        settings.n_threads_batch = options.prefill_threads or self.threads
        settings.flash_attn_type = FLASH_ATTENTION[self.attention]
        settings.type_k = settings.type_v = KV_TYPES[kv_dtype_of(config)]
        settings.kv_unified = self.is_unified
        settings.offload_kqv = settings.op_offload = config.device == "gpu"
        settings.no_perf = True
        context = llama.llama_init_from_model(model, settings)
        if not context:
            reason = LOG.reason("no reason given")
            kind = OutOfMemory if is_memory(reason) else BackendUnavailable
            raise kind(
                f"llama.cpp cannot make a context of {settings.n_ctx} tokens in {config.slots} "
                f"slots ({kv_dtype_of(config)}): {reason}"
            )
        return context

    def _not_loaded(self) -> None:
        name, reason = Path(self.config.model_path).name, LOG.reason("no reason given")
        if is_memory(reason):
            raise OutOfMemory(f"{name} does not fit in memory: {reason}")
        if "unknown model architecture" in reason:
            raise UnsupportedModel(f"llama.cpp does not know the architecture of {name}: {reason}")
        raise BrokenWeights(f"llama.cpp cannot load {name}: {reason}")


def is_memory(reason: str) -> bool:
    """Whether llama.cpp's words say that memory ran out."""
    words = ("failed to", "unable to", "cannot")
    told = ("out of memory", "bad_alloc", *(f"{word} allocate" for word in words))
    return any(text in reason.lower() for text in told)
