"""The table of backends. A new backend is a folder and a row: see docs/adding-a-backend.md.

"package.module:Class" is accepted wherever a backend's name is; CROSSOVER_BACKENDS gives such ones
a name of their own: "mine=package.module:Class,...". Where the class has a static method `row`, it
returns its BackendSpec.
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
from crossover.models.model_spec import ModelSpec
from crossover.models.weight_formats import (
    BLOCKS,
    DEFAULT_FORMATS,
    FORMATS,
    GGUF_FORMATS,
    spelt,
    tensor_type,
)
from crossover.serving.backends.backend_probe import BackendProbe
from crossover.serving.backends.llama_cpp.cache_layout import buffer_bytes as llama_buffer_bytes
from crossover.serving.backends.llama_cpp.cache_layout import kv_bytes as llama_kv_bytes
from crossover.serving.backends.llama_cpp.cache_layout import state_bytes as llama_state_bytes
from crossover.serving.backends.torch.memory_overhead import overhead_bytes as torch_overhead_bytes
from crossover.serving.capacity.scheduler_settings import AUTO, SchedulerSettings
from crossover.serving.errors import BackendUnavailable, Unsupported
from crossover.serving.hardware.gpus import run_probe

MIB = 1 << 20
PROBE_SECONDS = 60.0
# (--kv-dtype or "auto", weight format, "cpu" or "gpu", CPU flags) -> the type of the KV cache.
KvDtype = Callable[[str, str, str, Collection[str]], str]


class Overhead(msgspec.Struct, frozen=True):
    """Memory beside weights and KV cache: libraries, buffers, tokenizer, copies of weights."""

    fixed_bytes: int
    bytes_per_hidden: int = 0
    bytes_per_vocabulary: int = 0
    weight_share: float = 0.0
    format_shares: Mapping[str, float] = {}  # instead of weight_share
    # Of the step: (model, weight format, settings) -> bytes, instead of what follows from the
    # logits.
    step_bytes: Callable[[ModelSpec, str, SchedulerSettings], int] | None = None

    def total_bytes(
        self, model: ModelSpec, weight_format: str, weight_bytes: int, settings: SchedulerSettings
    ) -> int:
        """Return bytes for this model; each slot has a row of float32 logits."""
        copied = int(self.format_shares.get(weight_format, self.weight_share) * weight_bytes)
        if self.step_bytes is not None:
            return self.fixed_bytes + copied + self.step_bytes(model, weight_format, settings)
        of_vocabulary = (self.bytes_per_vocabulary + 4 * settings.slots) * model.vocabulary
        return self.fixed_bytes + copied + of_vocabulary + self.bytes_per_hidden * model.hidden


UNKNOWN_OVERHEAD = Overhead(500 * MIB, 0, 600, 0.35)


class BackendSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One row of crossover.serving.backends.BACKENDS. None and "": there is none."""

    cls: str  # "module:Class", imported when the backend is chosen
    overhead: Mapping[str, Overhead]  # by device, "cpu" or "gpu"; other devices are refused
    weights: str | None  # kind of files: gguf, hf, onnx, none; None: any
    # On the CPU: (model, weight format, CPU flags) -> bytes that it holds beyond the weights' own.
    extra_bytes: Callable[[ModelSpec, str, Collection[str]], int] | None = None
    kv_dtype: KvDtype = lambda asked, *_: "fp16" if asked == AUTO else asked
    kv_row_tokens: Callable[[int], int] = int  # of a slot's own KV row, by the context's
    # On the CPU: (model, tokens that a row attends to, slots) -> bytes that a step's computation
    # takes; 0 where the overhead has it.
    buffer_bytes: Callable[[ModelSpec, int, int], int] = lambda model, tokens, slots: 0
    # (model, KV tokens of all slots, slots, KV type) -> bytes of the KV cache.
    kv_bytes: Callable[[ModelSpec, int, int, str], int] = lambda model, tokens, slots, kv_dtype: (
        tokens * model.kv_bytes_per_token(kv_dtype)
    )
    # (model, KV tokens of all slots, slots, KV type, whether prefixes are reused) -> bytes of
    # recurrent states and of what takes a slot back where it cannot be cut back.
    state_bytes: Callable[[ModelSpec, int, int, str, bool], int] = lambda *_: 0
    shares_kv: bool = True  # a pool of fewer tokens than slots x context takes less memory
    options: tuple[str, ...] | None = None  # names of its options; None: any
    package: str | None = None  # Python package that must be installed
    distribution: str | None = None  # that has the package; its version stands in every record
    # Timed where the CPU's best engine is chosen and nobody names a format, in its default format.
    is_cpu_candidate: bool = False
    # Device -> its place among the backends that are tried when the user names none, lowest first.
    # A device that is left out is served by this backend only if the user names it.
    default_rank: Mapping[str, int] = {}
    extra: str = ""  # pip extra that installs it
    probe: str | None = None  # "module:function" -> BackendProbe, called in a process of its own
    huge_pages: bool = False  # large allocations are quicker on huge pages
    is_compiled: bool = False  # pip compiles the package, for Vulkan too where asked
    gpu_build: str = ""  # how to get a build for GPUs

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.overhead)

    def overhead_on(self, device: str) -> Overhead:
        """Its overhead on a device; a guess for one that it does not name."""
        return self.overhead.get(device, UNKNOWN_OVERHEAD)

    @property
    def formats(self) -> tuple[str, ...]:
        """Weight formats that can be made for it; (): any."""
        return FORMATS[self.weights] if self.weights is not None else ()

    @property
    def has_weights(self) -> bool:
        return self.weights != "none"

    @property
    def install(self) -> str:
        """Return the command that adds its package: pip takes the llm-crossover that is
        installed."""
        return f"pip install 'llm-crossover[{self.extra}]'"

    @property
    def reinstall(self) -> str:
        """Return the command that compiles the same version anew, for this CPU or a GPU."""
        name = self.distribution or "?"
        requirement = f"{name}=={importlib.metadata.version(name)}"
        return f"pip install --force-reinstall --no-cache-dir --no-deps {requirement}"


def _torch_kv(requested: str, weight_format: str, device: str, isa: Collection[str]) -> str:
    """Return the type of torch's activations
    (crossover.serving.backends.torch.torch_weights.compute_dtype)."""
    if weight_format in ("fp32", "fp16"):
        return weight_format
    has_bf16 = "bf16" in isa or {"avx512f", "avx512bw", "avx512vl"}.issubset(isa)
    return "bf16" if device == "gpu" or has_bf16 else "fp32"


def _torch_extra(model: ModelSpec, weight_format: str, isa: Collection[str]) -> int:
    """Return a CPU that is slow with bf16 computes with float32 weights."""
    is_wide = weight_format == "bf16" and _torch_kv(AUTO, weight_format, "cpu", isa) == "fp32"
    return 2 * model.parameters if is_wide else 0


def _llama_extra(model: ModelSpec, weight_format: str, isa: Collection[str]) -> int:
    """Return where llama.cpp arranges the output matrix for the CPU (AMX, Arm's dot products) and
    that is the embedding too, it is held twice."""
    is_arranged = not {"amx_int8", "asimddp"}.isdisjoint(isa)
    is_ours = weight_format in GGUF_FORMATS and weight_format not in ("F32", "BF16")
    if not (is_arranged and is_ours and model.tied):
        return 0
    embedding = model.tensors()[0]
    block = BLOCKS[tensor_type(model, weight_format, embedding)]
    return embedding.elements // block.weights * block.bytes


# Overheads. llama_cpp on the CPU: libraries and what does not depend on the context, measured with
# tiny models, 135M and 360M (4 slots of 512 and 2,048 tokens: 54 to 65 MiB); weights are read into
# memory. onnx: the file stays mapped, matrices are packed
# into memory of its own: int8 into as much, 4 bits with their scales into 1.4 times as much. torch
# on the GPU: what its largest step takes (torch/memory_overhead.py).
# Huge pages, 135M on one core: llama_cpp up to 2 % quicker, onnx at one stream 2 to 6 %, torch 0.
BACKENDS: dict[str, BackendSpec] = {
    "llama_cpp": BackendSpec(
        cls="crossover.serving.backends.llama_cpp.backend:LlamaCppBackend",
        weights="gguf",
        kv_row_tokens=lambda context: -(-context // 256) * 256,
        overhead={
            "cpu": Overhead(62_000_000, 0, 600),
            "gpu": Overhead(500 * MIB, 46 << 10, 600, 0.02),
        },
        extra_bytes=_llama_extra,
        buffer_bytes=llama_buffer_bytes,
        kv_bytes=llama_kv_bytes,
        state_bytes=llama_state_bytes,
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
        overhead={"cpu": Overhead(185 * MIB, 0, 600, 0.10, {"int4": 0.40, "fp32": 0.25})},
        kv_dtype=lambda *_: "fp32",  # of the graphs that crossover.models.convert_to_onnx writes
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
            "cpu": Overhead(400 * MIB, 0, 600, 0.35),
            "gpu": Overhead(0, weight_share=0.01, step_bytes=torch_overhead_bytes),
        },
        extra_bytes=_torch_extra,
        kv_dtype=_torch_kv,
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
    ranks = {
        name: spec.default_rank[device]
        for name, spec in BACKENDS.items()
        if device in spec.default_rank
    }
    return tuple(sorted(ranks, key=ranks.__getitem__))


# The backends that are tried, in this order, when the user names none.
DEFAULTS: dict[str, tuple[str, ...]] = {
    device: _by_default_rank(device) for device in ("cpu", "gpu")
}


def spec_of(name: str) -> BackendSpec:
    """Return the row of a backend; its class's own, or one made up, for "package.module:Class".

    Raises BackendUnavailable.
    """
    if name in BACKENDS:
        return BACKENDS[name]
    if ":" in name:
        return _foreign_row(name)
    raise BackendUnavailable(
        f"The backend {name!r} is unknown. Backends: {', '.join(BACKENDS)}, or package.module:Class"
    )


def _foreign_row(path: str) -> BackendSpec:
    with contextlib.suppress(BackendUnavailable):  # whoever loads it will say why
        row = getattr(_imported(path, path), "row", None)
        if row is not None:
            spec: BackendSpec = row()
            return spec
    devices = {"cpu": UNKNOWN_OVERHEAD, "gpu": UNKNOWN_OVERHEAD}
    return BackendSpec(cls=path, weights=None, overhead=devices)


def backend_class(name: str) -> Any:
    """Return the class of a backend. Raises BackendUnavailable with the package to install."""
    spec = spec_of(name)
    return _imported(spec.cls, name, f"; {spec.install}" if spec.extra else "")


def _imported(path: str, name: str, advice: str = "") -> Any:
    module_name, _, class_name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as problem:
        raise BackendUnavailable(
            f"backend {name!r} cannot be imported: {problem}{advice}"
        ) from problem


def format_of(name: str, weight_format: str | None) -> str:
    """Return the weight format as the backend spells it; None: its default. Raises Unsupported."""
    spec = spec_of(name)
    if not weight_format:
        return DEFAULT_FORMATS[spec.weights or "hf"] or "none"
    if spec.weights is None or not spec.formats:
        return weight_format
    try:
        return spelt(spec.weights, weight_format)
    except UnsupportedModel as problem:
        formats = ", ".join(spec.formats)
        text = f"The backend {name!r} has no weight format {weight_format!r}. Formats: {formats}"
        raise Unsupported(text, "weight_format") from problem


def weights_of(name: str, weight_format: str | None = None) -> tuple[str, str]:
    """Return kind of files (gguf, hf, onnx, none) and their format; "" without weights."""
    spec = spec_of(name)
    if spec.weights is not None:
        return spec.weights, format_of(name, weight_format) if spec.has_weights else ""
    for kind in ("hf", "gguf", "onnx"):  # safetensors first: onnx has fp32 too
        with contextlib.suppress(UnsupportedModel):
            return kind, spelt(kind, weight_format or DEFAULT_FORMATS[kind])
    raise Unsupported(f"No engine has the weight format {weight_format!r}", "weight_format")


def backend_for(kind: str) -> str:
    """Return the first backend that reads this kind of files."""
    return next(name for name, spec in BACKENDS.items() if spec.weights == kind)


def missing_backends() -> dict[str, str]:
    """Return backends whose package is not installed -> what to do; nothing is imported."""
    return {
        name: f"its package {spec.package} is not installed ({spec.install})"
        for name, spec in BACKENDS.items()
        if spec.package is not None and find_spec(spec.package) is None
    }


def library_versions() -> dict[str, str]:
    """Return the version of each installed distribution that a backend computes with."""
    versions = {}
    for spec in BACKENDS.values():
        if spec.distribution is not None:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[spec.distribution] = importlib.metadata.version(spec.distribution)
    return versions


def probe_backend(name: str) -> BackendProbe:
    """Import the library in a child and ask it. Never raises, takes PROBE_SECONDS at most."""
    function = spec_of(name).probe
    if function is None:
        return BackendProbe(name, True)
    ran = run_probe(function, PROBE_SECONDS)
    if ran.status == 0:
        return msgspec.json.decode(ran.output, type=BackendProbe)
    problem = f"importing it took longer than {PROBE_SECONDS:g} s"
    return BackendProbe(name, False, problem=problem if ran.status is None else ran.reason)


for _entry in filter(None, os.environ.get("CROSSOVER_BACKENDS", "").split(",")):
    _name, _, _path = _entry.partition("=")
    BACKENDS[_name] = _foreign_row(_path)
