"""The table of backends. A new backend is a folder and a row: see docs/adding-a-backend.md.

"package.module:Class" is accepted wherever a backend's name is. The environment variable
CROSSOVER_BACKENDS gives such classes a name: "mine=package.module:Class,...". If the class has a
static method `row`, that returns its BackendSpec.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from typing import Any

import msgspec

from crossover.models.errors import UnsupportedModel
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.weight_formats import (
    BLOCKS,
    DEFAULT_FORMATS,
    FORMATS,
    GGUF_FORMATS,
    normalized_format,
    tensor_type,
)
from crossover.serving.backends.backend_probe import BackendProbe
from crossover.serving.backends.llama_cpp.cache_layout import buffer_bytes as llama_buffer_bytes
from crossover.serving.backends.llama_cpp.cache_layout import kv_bytes as llama_kv_bytes
from crossover.serving.backends.llama_cpp.cache_layout import kv_row_tokens as llama_kv_row_tokens
from crossover.serving.backends.llama_cpp.cache_layout import state_bytes as llama_state_bytes
from crossover.serving.backends.torch.memory_overhead import overhead_bytes as torch_overhead_bytes
from crossover.serving.capacity.scheduler_settings import AUTO, SchedulerSettings
from crossover.serving.errors import BackendUnavailable, Unsupported
from crossover.serving.hardware.gpus import run_probe

MIB = 1 << 20
PROBE_SECONDS = 60.0
LOGIT_BYTES = 4  # logits are float32
# (--kv-dtype or "auto", weight format, "cpu" or "gpu", CPU flags) -> the type of the KV cache.
KvDtype = Callable[[str, str, str, Collection[str]], str]
# (model, weight format, CPU flags) -> bytes.
ExtraBytes = Callable[[ModelSpec, str, Collection[str]], int]
# (model, weight format, settings) -> bytes.
StepBytes = Callable[[ModelSpec, str, SchedulerSettings], int]
# (model, tokens that a row attends to, slots) -> bytes.
BufferBytes = Callable[[ModelSpec, int, int], int]
# (model, KV tokens of all slots, slots, KV type) -> bytes.
KvBytes = Callable[[ModelSpec, int, int, str], int]
# (model, KV tokens of all slots, slots, KV type, whether prefixes are reused) -> bytes.
StateBytes = Callable[[ModelSpec, int, int, str, bool], int]


class Overhead(msgspec.Struct, frozen=True):
    """Memory beside weights and KV cache: libraries, buffers, tokenizer, copies of weights."""

    fixed_bytes: int
    bytes_per_hidden: int = 0  # times the width of the hidden state
    bytes_per_vocabulary: int = 0  # times the size of the vocabulary
    weight_share: float = 0.0  # weights that are held twice, as a share of all
    format_shares: Mapping[str, float] = {}  # weight format -> its weight_share, where it differs
    # Bytes of a step, which replace the terms of vocabulary, logits and hidden state.
    step_bytes: StepBytes | None = None

    def total_bytes(
        self, model: ModelSpec, weight_format: str, weight_bytes: int, settings: SchedulerSettings
    ) -> int:
        """Return the overhead of a model with `weight_bytes` bytes of weights."""
        copied_share = self.format_shares.get(weight_format, self.weight_share)
        total = self.fixed_bytes + int(copied_share * weight_bytes)
        if self.step_bytes is not None:
            return total + self.step_bytes(model, weight_format, settings)
        logits_bytes_per_token_id = LOGIT_BYTES * settings.slots
        total += (self.bytes_per_vocabulary + logits_bytes_per_token_id) * model.vocabulary
        return total + self.bytes_per_hidden * model.hidden


# A cautious guess for backends and devices that have no measured overhead.
UNKNOWN_OVERHEAD = Overhead(fixed_bytes=500 * MIB, bytes_per_vocabulary=600, weight_share=0.35)


def _requested_or_fp16(
    requested: str, weight_format: str, device: str, isa: Collection[str]
) -> str:
    return "fp16" if requested == AUTO else requested


def _full_kv_bytes(model: ModelSpec, tokens: int, slots: int, kv_dtype: str) -> int:
    """Return the bytes of a KV cache that keeps every token in every layer."""
    return tokens * model.kv_bytes_per_token(kv_dtype)


def _no_buffer_bytes(model: ModelSpec, attended: int, slots: int) -> int:
    return 0


def _no_state_bytes(
    model: ModelSpec, tokens: int, slots: int, kv_dtype: str, prefix_reuse: bool
) -> int:
    return 0


class BackendSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One row of BACKENDS: what the other modules need to know of a backend before it is imported.

    None or "" means that the backend has no such thing, unless the field says otherwise.
    """

    cls: str  # "module:Class", imported when the backend is chosen
    overhead: Mapping[str, Overhead]  # by device, "cpu" or "gpu"; other devices are refused
    weights: str | None  # the kind of files that it reads: gguf, hf, onnx, none; None: any
    # Bytes of weights on the CPU beyond those of the files, for a faster layout or type.
    extra_bytes: ExtraBytes | None = None
    kv_dtype: KvDtype = _requested_or_fp16
    # Context tokens of a slot -> tokens of its KV row, which may be rounded up.
    kv_row_tokens: Callable[[int], int] = int
    # Buffers of a step on the CPU; 0 if `overhead` includes them.
    buffer_bytes: BufferBytes = _no_buffer_bytes
    kv_bytes: KvBytes = _full_kv_bytes
    # Recurrent states, and the checkpoints of slots that cannot be truncated.
    state_bytes: StateBytes = _no_state_bytes
    # It can export the KV of a slot, and so have a prompt cache on a CPU.
    has_export: bool = False
    # By which share a decode step takes longer on the CPU when there are twice as many slots, over
    # which its rows are spread.
    slot_doubling_cost: float = 0.0
    shares_kv: bool = True  # a pool of fewer tokens than slots x context takes less memory
    options: tuple[str, ...] | None = None  # names of its options; None: any
    package: str | None = None  # Python package that must be installed
    distribution: str | None = None  # which has the package; every run records its version
    # It is timed, in its default format, when the fastest engine of the CPU is chosen and the user
    # names no format.
    is_cpu_candidate: bool = False
    # Device -> its rank among the backends that are tried when the user names none, lowest first.
    # On a device that is left out, it serves only if the user names it.
    default_rank: Mapping[str, int] = {}
    extra: str = ""  # pip extra that installs it
    probe: str | None = None  # "module:function", which returns a BackendProbe in a child process
    huge_pages: bool = False  # it is faster if large allocations are on huge pages
    is_compiled: bool = False  # pip compiles the package
    gpu_build: str = ""  # how to get a build for GPUs

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.overhead)

    def overhead_on(self, device: str) -> Overhead:
        """Return its overhead on a device; a cautious guess for a device that it does not list."""
        return self.overhead.get(device, UNKNOWN_OVERHEAD)

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the weight formats that Crossover can make for it; (): any."""
        return FORMATS[self.weights] if self.weights is not None else ()

    @property
    def has_weights(self) -> bool:
        return self.weights != "none"

    @property
    def install(self) -> str:
        """Return the command that installs its package, by an extra of this distribution."""
        return f"pip install 'llm-crossover[{self.extra}]'"

    @property
    def reinstall(self) -> str:
        """Return the command that compiles the installed version again, for this CPU or a GPU.

        Raises importlib.metadata.PackageNotFoundError if it is not installed.
        """
        name = self.distribution or "?"
        requirement = f"{name}=={importlib.metadata.version(name)}"
        return f"pip install --force-reinstall --no-cache-dir --no-deps {requirement}"


def _torch_kv_dtype(requested: str, weight_format: str, device: str, isa: Collection[str]) -> str:
    """Return the type of torch's KV cache, which is that of its activations. The same rule as
    torch_weights.compute_dtype, without importing torch."""
    if weight_format in ("fp32", "fp16"):
        return weight_format
    has_bf16 = "bf16" in isa or {"avx512f", "avx512bw", "avx512vl"}.issubset(isa)
    return "bf16" if device == "gpu" or has_bf16 else "fp32"


def _onnx_kv_dtype(requested: str, weight_format: str, device: str, isa: Collection[str]) -> str:
    """Return the type of the KV cache in every graph that is supported."""
    return "fp32"


def _torch_extra_bytes(model: ModelSpec, weight_format: str, isa: Collection[str]) -> int:
    """Return the bytes by which float32 weights exceed bf16 ones, if this CPU is slow with bf16 and
    torch therefore converts them; else 0."""
    if weight_format != "bf16" or _torch_kv_dtype(AUTO, weight_format, "cpu", isa) != "fp32":
        return 0
    return 2 * model.parameters


def _llama_extra_bytes(model: ModelSpec, weight_format: str, isa: Collection[str]) -> int:
    """Return the bytes of the second copy of a tied embedding; 0 if llama.cpp makes none.

    With AMX or Arm's dot products, llama.cpp repacks the output matrix of quantized files. A tied
    embedding is that matrix too, and is kept as it was beside the repacked copy.
    """
    can_repack = "amx_int8" in isa or "asimddp" in isa
    is_repacked_format = weight_format in GGUF_FORMATS and weight_format not in ("F32", "BF16")
    if not (can_repack and is_repacked_format and model.tied):
        return 0
    embedding = model.tensors()[0]
    block = BLOCKS[tensor_type(model, weight_format, embedding)]
    return embedding.elements // block.weights * block.bytes


# Where the overheads come from:
# - llama_cpp on the CPU: the libraries and everything that does not depend on the context, measured
#   with tiny models, 135M and 360M (4 slots of 512 and 2,048 tokens: 54 to 65 MiB). It reads the
#   weights into memory.
# - onnx: the file stays mapped, and ONNX Runtime packs the matrices into memory of its own: int8
#   into as much again, 4 bits with their scales into 1.4 times as much.
# - torch on the GPU: what its largest step takes (torch/memory_overhead.py).
# Huge pages make 135M on one core faster by up to 2 % with llama_cpp, by 2 to 6 % with onnx in a
# single stream, and by nothing with torch.
BACKENDS: dict[str, BackendSpec] = {
    "llama_cpp": BackendSpec(
        cls="crossover.serving.backends.llama_cpp.backend:LlamaCppBackend",
        weights="gguf",
        kv_row_tokens=llama_kv_row_tokens,
        # Eight rows that are spread over 64 slots take 1.21 times as long as in neighboring ones.
        slot_doubling_cost=0.066,
        overhead={
            "cpu": Overhead(fixed_bytes=62_000_000, bytes_per_vocabulary=600),
            "gpu": Overhead(
                fixed_bytes=500 * MIB,
                bytes_per_hidden=46 << 10,
                bytes_per_vocabulary=600,
                weight_share=0.02,
            ),
        },
        extra_bytes=_llama_extra_bytes,
        buffer_bytes=llama_buffer_bytes,
        kv_bytes=llama_kv_bytes,
        state_bytes=llama_state_bytes,
        has_export=True,
        options=("flash_attention", "mlock", "gpu_layers"),
        package="llama_cpp",
        distribution="llama-cpp-python",
        is_cpu_candidate=True,
        default_rank={"cpu": 1, "gpu": 2},
        extra="llama-cpp",
        probe="crossover.serving.backends.llama_cpp.library:probe",
        huge_pages=True,
        is_compiled=True,
        gpu_build="set CMAKE_ARGS to -DGGML_CUDA=on (needs nvcc), -DGGML_HIP=on (needs ROCm) or "
        "-DGGML_VULKAN=on (needs glslc and Vulkan's headers)",
    ),
    "onnx": BackendSpec(
        cls="crossover.serving.backends.onnx.backend:OnnxBackend",
        weights="onnx",
        overhead={
            "cpu": Overhead(
                fixed_bytes=185 * MIB,
                bytes_per_vocabulary=600,
                weight_share=0.10,
                format_shares={"int4": 0.40, "fp32": 0.25},
            )
        },
        kv_dtype=_onnx_kv_dtype,
        has_export=True,
        shares_kv=False,
        options=("spinning", "flash_attention"),
        package="onnxruntime",
        distribution="onnxruntime",
        is_cpu_candidate=True,
        default_rank={"cpu": 2},
        extra="onnx",
        probe="crossover.serving.backends.onnx.onnx_folder:probe",
        huge_pages=True,
    ),
    "torch": BackendSpec(
        cls="crossover.serving.backends.torch.backend:TorchBackend",
        weights="hf",
        overhead={
            "cpu": Overhead(fixed_bytes=400 * MIB, bytes_per_vocabulary=600, weight_share=0.35),
            "gpu": Overhead(fixed_bytes=0, weight_share=0.01, step_bytes=torch_overhead_bytes),
        },
        extra_bytes=_torch_extra_bytes,
        kv_dtype=_torch_kv_dtype,
        shares_kv=False,
        options=(),
        package="torch",
        distribution="torch",
        default_rank={"cpu": 3, "gpu": 1},
        extra="torch",
        probe="crossover.serving.backends.torch.torch_capabilities:probe",
        gpu_build="install torch built for CUDA or ROCm, see pytorch.org",
    ),
}


def _by_default_rank(device: str) -> tuple[str, ...]:
    """Return the backends that are tried on a device when the user names none, in their order."""
    ranks = {
        name: spec.default_rank[device]
        for name, spec in BACKENDS.items()
        if device in spec.default_rank
    }
    return tuple(sorted(ranks, key=ranks.__getitem__))


DEFAULTS: dict[str, tuple[str, ...]] = {
    device: _by_default_rank(device) for device in ("cpu", "gpu")
}


def spec_of(name: str) -> BackendSpec:
    """Return the row of a backend. Raises BackendUnavailable if there is no such backend.

    `name` is a name in BACKENDS, or "package.module:Class", which need not be in the table.
    """
    if name in BACKENDS:
        return BACKENDS[name]
    if ":" in name:
        return _row_of_class(name)
    raise BackendUnavailable(
        f"The backend {name!r} is unknown. Backends: {', '.join(BACKENDS)}, or package.module:Class"
    )


def _row_of_class(path: str) -> BackendSpec:
    """Return the row of "package.module:Class": what its static method `row` returns, or a row with
    guesses if it has none or cannot be imported. Whoever loads the class reports why it cannot."""
    with contextlib.suppress(BackendUnavailable):
        make_row = getattr(_import_class(path, path), "row", None)
        if make_row is not None:
            row: BackendSpec = make_row()
            return row
    devices = {"cpu": UNKNOWN_OVERHEAD, "gpu": UNKNOWN_OVERHEAD}
    return BackendSpec(cls=path, weights=None, overhead=devices)


def backend_class(name: str) -> Any:
    """Return the class of a backend. Raises BackendUnavailable with the package to install."""
    spec = spec_of(name)
    return _import_class(spec.cls, name, f"; {spec.install}" if spec.extra else "")


def _import_class(path: str, name: str, advice: str = "") -> Any:
    """Return the class at "module:Class". Raises BackendUnavailable, whose message has the
    backend's `name` and ends with `advice`."""
    module_name, _, class_name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as problem:
        raise BackendUnavailable(
            f"backend {name!r} cannot be imported: {problem}{advice}"
        ) from problem


def format_of(name: str, weight_format: str | None) -> str:
    """Return the weight format as the backend spells it. Raises Unsupported.

    `weight_format` None or "": the backend's default, which is "none" if it reads no weights.
    """
    spec = spec_of(name)
    if not weight_format:
        return DEFAULT_FORMATS[spec.weights or "hf"] or "none"
    if spec.weights is None or not spec.formats:
        return weight_format
    try:
        return normalized_format(spec.weights, weight_format)
    except UnsupportedModel as problem:
        formats = ", ".join(spec.formats)
        message = f"The backend {name!r} has no weight format {weight_format!r}. Formats: {formats}"
        raise Unsupported(message, "weight_format") from problem


def weights_of(name: str, weight_format: str | None = None) -> tuple[str, str]:
    """Return the kind of files that a backend reads (gguf, hf, onnx, none), and their weight format
    ("" for kind "none"). Raises Unsupported.

    A backend that reads every kind gets the first kind that has the format. Safetensors come first,
    because ONNX files have fp32 as well.
    """
    spec = spec_of(name)
    if not spec.has_weights:
        return "none", ""
    if spec.weights is not None:
        return spec.weights, format_of(name, weight_format)
    for kind in ("hf", "gguf", "onnx"):
        with contextlib.suppress(UnsupportedModel):
            return kind, normalized_format(kind, weight_format or DEFAULT_FORMATS[kind])
    raise Unsupported(f"No engine has the weight format {weight_format!r}", "weight_format")


def missing_backends() -> dict[str, str]:
    """Return, for each backend whose package is not installed, a text that says how to install it.
    Nothing is imported."""
    return {
        name: f"its package {spec.package} is not installed ({spec.install})"
        for name, spec in BACKENDS.items()
        if spec.package is not None and find_spec(spec.package) is None
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the backends' distributions, by name, as far as they are installed."""
    versions = {}
    for spec in BACKENDS.values():
        if spec.distribution is not None:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[spec.distribution] = importlib.metadata.version(spec.distribution)
    return versions


def probe_backend(name: str) -> BackendProbe:
    """Return what a backend's probe finds in a child process, within PROBE_SECONDS. Never raises:
    a probe that crashes or hangs is reported in `problem`."""
    function = spec_of(name).probe
    if function is None:
        return BackendProbe(name, works=True)
    child = run_probe(function, PROBE_SECONDS)
    if child.status == 0:
        return msgspec.json.decode(child.output, type=BackendProbe)
    problem = child.reason
    if child.status is None:
        problem = f"importing it took longer than {PROBE_SECONDS:g} s"
    return BackendProbe(name, works=False, problem=problem)


def _add_backends_of_environment() -> None:
    """Add the rows that CROSSOVER_BACKENDS names: "mine=package.module:Class,..."."""
    for entry in os.environ.get("CROSSOVER_BACKENDS", "").split(","):
        if entry:
            name, _, path = entry.partition("=")
            BACKENDS[name] = _row_of_class(path)


_add_backends_of_environment()
