"""Loads a GGUF file: options, the weights, the context.

docs/design.md has the reasons for the defaults of the options.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec

from crossover.models.errors import BrokenWeights, ModelError, UnsupportedModel
from crossover.models.weights.weights_manifest import Progress
from crossover.serving.backends.backend_interface import (
    EngineConfig,
    check_sizes,
    parse_backend_options,
)
from crossover.serving.backends.llama_cpp.cache_layout import (
    PASS_TOKENS,
    keeps_windows_only,
    kv_row_tokens,
)
from crossover.serving.backends.llama_cpp.library import LOG, PACKAGE, is_out_of_memory, library
from crossover.serving.capacity.scheduler_settings import AUTO
from crossover.serving.errors import BackendUnavailable, OutOfMemory, ServingError, Unsupported
from crossover.serving.hardware.machine_facts import allowed_cores

# ggml's numbers for KV types (enum ggml_type), llama.cpp's for flash attention.
KV_TYPES: dict[str, int] = {"fp32": 0, "fp16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
FLASH_ATTENTION: dict[str, int] = {"auto": -1, "off": 0, "on": 1}
QUANTIZED_KV = ("q8_0", "q4_0")  # these need flash attention


class LlamaOptions(msgspec.Struct, frozen=True):
    """`--option key=value` of the llama_cpp backend."""

    # auto: off on a CPU unless kv_dtype needs it (see backend.py); on a GPU llama.cpp decides.
    flash_attention: Literal["auto", "off", "on"] = "auto"
    mlock: bool = False  # keep the weights from being swapped out
    gpu_layers: Annotated[int, msgspec.Meta(ge=-1)] = -1  # number of layers on the GPU; -1: all


class Loader:
    """Loads the GGUF file of one configuration.

    The constructor loads the library and checks the configuration. Raises Unsupported,
    BackendUnavailable, BrokenWeights.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        settings = config.settings
        self.options = options = parse_backend_options(LlamaOptions, config.options, "llama_cpp")
        self.threads = config.threads or len(allowed_cores())
        self.llama = library()
        self.kv_dtype = "fp16" if settings.kv_dtype == AUTO else settings.kv_dtype
        self.attention = options.flash_attention
        if self.attention == "auto" and config.device != "gpu":
            self.attention = "on" if self.kv_dtype in QUANTIZED_KV else "off"
        # Unified: one KV pool for all slots, in which every row's attention also runs over the
        # (masked) tokens of the others. It is only used if a separate KV part for each slot would
        # take more than kv_tokens.
        self.is_unified = settings.pool_tokens < settings.slots * settings.context_tokens
        self._file = Path(config.model_path)
        self._check()

    def _check(self) -> None:
        """Check everything that can be checked before the file is read."""
        config, settings = self.config, self.config.settings
        max_slots = int(self.llama.llama_max_parallel_sequences())

        def refuse(key: str, requirement: str) -> NoReturn:
            raise Unsupported(f"{key} {requirement}, got {getattr(settings, key)!r}", key)

        if settings.slots > max_slots:
            refuse("slots", f"must be at most {max_slots} with llama.cpp")
        check_sizes(config, None, self.kv_dtype)
        if self.kv_dtype not in KV_TYPES:
            refuse("kv_dtype", f"must be one of {', '.join(KV_TYPES)} with llama.cpp")
        if self.kv_dtype in QUANTIZED_KV and self.attention == "off":
            refuse("kv_dtype", "needs flash attention, and option flash_attention is off")
        context = settings.context_tokens
        if settings.pool_tokens < context:
            refuse("kv_tokens", f"must be at least one sequence's context_tokens = {context}")
        if config.device == "gpu" and not self.llama.llama_supports_gpu_offload():
            raise BackendUnavailable(
                f"{PACKAGE} {self.llama.__version__} was built without GPU support. crossover "
                "doctor shows how to build it with CUDA, ROCm or Vulkan."
            )
        if not self._file.is_file():
            raise BrokenWeights(f"The GGUF file {self._file.name} does not exist")

    def load(self, progress: Progress) -> tuple[Any, Any]:
        """Return llama.cpp's model and context. Raises OutOfMemory and UnsupportedModel too, and
        whatever `progress` raises."""
        progress_errors: list[BaseException] = []
        last_fraction = -1.0

        def report(fraction: float, _: Any) -> bool:
            nonlocal last_fraction
            if fraction - last_fraction >= 0.01 or fraction >= 1.0:
                last_fraction = fraction
                try:
                    progress("weights", min(1.0, fraction))
                except BaseException as problem:
                    # An exception cannot pass through C. False makes llama.cpp abort the load.
                    progress_errors.append(problem)
                    return False
            return True

        settings = self._model_settings()
        # The name keeps the callback alive until the load has ended.
        settings.progress_callback = callback = self.llama.llama_progress_callback(report)
        try:
            model = self._load_model(settings)
        except (ModelError, ServingError):
            if progress_errors:
                raise progress_errors[0] from None
            raise
        finally:
            del callback
        try:
            check_sizes(self.config, int(self.llama.llama_model_n_ctx_train(model)), self.kv_dtype)
            context = self.context(model)
        except BaseException:
            self.llama.llama_model_free(model)
            raise
        LOG.errors.clear()  # warnings of a load that has worked explain no later failure
        return model, context

    def load_without_memory(self) -> Any:
        """Return a model that has the sizes of the file's tensors but no data. Its contexts do not
        allocate memory either."""
        settings = self._model_settings()
        settings.no_alloc = True
        settings.load_mode = self.llama.llama_load_mode_from_str(b"none")
        return self._load_model(settings)

    def _model_settings(self) -> Any:
        """Return llama.cpp's parameters for loading the file."""
        llama, options, is_gpu = self.llama, self.options, self.config.device == "gpu"
        modes = []
        if is_gpu:
            # On the CPU the file is read and not mapped. A single row is then 5 % faster with 135M
            # Q4_0, and repacked weights are in memory once and not twice (90 MB instead of 150).
            modes.append("mmap")
        if options.mlock:
            modes.append("mlock")
        settings = llama.llama_model_default_params()
        settings.load_mode = llama.llama_load_mode_from_str("+".join(modes or ["none"]).encode())
        settings.n_gpu_layers = options.gpu_layers if is_gpu else 0
        return settings

    def _load_model(self, settings: Any) -> Any:
        """Return llama.cpp's model. Raises OutOfMemory, UnsupportedModel, BrokenWeights."""
        llama, name = self.llama, self._file.name
        LOG.errors.clear()
        model = llama.llama_model_load_from_file(str(self._file).encode(), settings)
        if not model:
            reason = LOG.reason()
            if is_out_of_memory(reason):
                raise OutOfMemory(f"{name} does not fit in memory: {reason}")
            if "unknown model architecture" in reason:
                message = f"llama.cpp does not support the architecture of {name}: {reason}"
                raise UnsupportedModel(message)
            raise BrokenWeights(f"llama.cpp cannot load {name}: {reason}")
        description = None
        if llama.llama_model_has_encoder(model):
            description = "a model with an encoder beside its decoder"
        elif llama.llama_model_is_diffusion(model):
            description = "a diffusion model, which does not write in order"
        if description is not None:
            llama.llama_model_free(model)
            raise UnsupportedModel(f"{name} is {description}; only decoder models are supported")
        return model

    def keeps_windows_only(self, model: Any, context_tokens: int) -> bool:
        """Return whether the model has layers with a sliding window that keep only the window of a
        slot's context."""
        return keeps_windows_only(int(self.llama.llama_model_n_swa(model)), context_tokens)

    def has_experts(self, model: Any) -> bool:
        architecture = self._metadata(model, "general.architecture")
        return self._metadata(model, f"{architecture}.expert_count") not in ("", "0")

    def _metadata(self, model: Any, key: str) -> str:
        """Return the value of a metadata key of the file as text; "" if it does not have the
        key."""
        buffer = ctypes.create_string_buffer(256)
        size = self.llama.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if size >= 0 else ""

    def context(self, model: Any, context_tokens: int | None = None) -> Any:
        """Return a new llama.cpp context: the KV cache and the buffers of all slots.

        `context_tokens`: tokens of a slot; None: as configured. Raises OutOfMemory,
        BackendUnavailable.
        """
        llama, config, requested = self.llama, self.config, self.config.settings
        if context_tokens is not None:
            requested = msgspec.structs.replace(requested, context_tokens=context_tokens)
        settings = llama.llama_context_default_params()
        settings.n_ctx = requested.pool_tokens
        if not self.is_unified:
            settings.n_ctx = requested.slots * kv_row_tokens(requested.context_tokens)
        settings.n_batch = requested.step_tokens
        settings.n_ubatch = PASS_TOKENS
        settings.n_seq_max = settings.n_outputs_max = requested.slots
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.flash_attn_type = FLASH_ATTENTION[self.attention]
        settings.type_k = settings.type_v = KV_TYPES[self.kv_dtype]
        settings.kv_unified = self.is_unified
        settings.swa_full = not self.keeps_windows_only(model, requested.context_tokens)
        settings.offload_kqv = settings.op_offload = config.device == "gpu"
        settings.no_perf = True
        context = llama.llama_init_from_model(model, settings)
        if not context:
            reason = LOG.reason()
            error_type = OutOfMemory if is_out_of_memory(reason) else BackendUnavailable
            raise error_type(
                f"llama.cpp cannot make a context of {settings.n_ctx} tokens in {requested.slots} "
                f"slots ({self.kv_dtype}): {reason}"
            )
        return context
