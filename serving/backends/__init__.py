"""The table of backends. A new backend is a folder and a row: see docs/adding-a-backend.md.

"package.module:Class" is accepted wherever a backend's name is.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from models.formats import DEFAULT_FORMATS, FORMATS, PACKED_FORMATS
from serving.backends.llama_cpp.extra_buffers import planned_extra_bytes
from serving.backends.spec import MIB, UNKNOWN_OVERHEAD, BackendSpec, KvRequest, Overhead
from serving.backends.torch import need as torch_need
from serving.errors import BackendUnavailable, Unsupported
from serving.hardware.gpu_facts import VULKAN

_BF16_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl"}), frozenset({"bf16"})


def _torch_kv(request: KvRequest) -> str:
    """The type of torch's activations (serving.backends.torch.weights.compute_dtype)."""
    if request.weight_format in ("fp32", "fp16"):
        return request.weight_format
    if request.weight_format == "dynamic-int8":
        return "fp32"
    has_bf16 = any(request.isa >= flags for flags in _BF16_FLAGS)
    return "bf16" if request.device == "gpu" or has_bf16 else "fp32"


# Overheads. llama_cpp on the CPU: fitted to loads of 135M, 360M and 1B (2 to 16 slots), within 5 %
# of the measured RSS, weights read into memory. onnx: the file stays mapped, matrices are packed
# into memory of its own: int8 into as much, 4 bits with their scales into 1.4 times as much. torch
# on the GPU: what its largest step takes (torch/need.py).
# Huge pages, 135M on one core: llama_cpp up to 2 % quicker, onnx at one stream 2 to 6 %, torch 0.
BACKENDS: dict[str, BackendSpec] = {
    "llama_cpp": BackendSpec(
        cls="serving.backends.llama_cpp.backend:LlamaCppBackend",
        weights="gguf",
        also_reads=("Q6_K", "Q5_K", "Q4_K", "Q4_1"),
        kv_grain=256,
        may_split=True,
        overhead={
            "cpu": Overhead(82_000_000, 46 << 10, 600),
            "gpu": Overhead(500 * MIB, 46 << 10, 600, 0.02),
        },
        extra_bytes=planned_extra_bytes,
        options=(
            *("flash_attention", "kv_unified", "mmap", "mlock", "repack", "step_tokens"),
            *("ubatch_tokens", "prefill_threads", "wait_policy", "gpu_layers", "dry_run"),
            "warm_up",
        ),
        package="llama_cpp",
        extra="llama-cpp",
        probe="serving.backends.llama_cpp.probe:probe",
        huge_pages=True,
        is_compiled=True,
        gpu_builds={
            "nvidia": ("install CUDA's toolkit (nvcc)", "-DGGML_CUDA=on"),
            "amd": ("install ROCm with hipBLAS and rocBLAS", "-DGGML_HIP=on"),
            VULKAN: ("install glslc, Vulkan's headers and loader, a driver", "-DGGML_VULKAN=on"),
        },
    ),
    "onnx": BackendSpec(
        cls="serving.backends.onnx.backend:OnnxBackend",
        weights="onnx",
        overhead={"cpu": Overhead(200 * MIB, 0, 600, 0.10, {"int4": 0.40, "fp32": 0.25})},
        kv_dtype=lambda _: "fp32",  # of the graphs that models.convert_to_onnx writes
        shares_kv=False,
        options=("file", "spinning", "optimisation", "arena", "prefill_chunk"),
        package="onnxruntime",
        extra="onnx",
        probe="serving.backends.onnx.probe:probe",
        huge_pages=True,
    ),
    "torch": BackendSpec(
        cls="serving.backends.torch.backend:TorchBackend",
        weights="hf",
        cpu_formats=PACKED_FORMATS,
        overhead={
            "cpu": Overhead(400 * MIB, 0, 600, 0.35),
            "gpu": Overhead(0, weight_share=0.01, step_bytes=torch_need.overhead_bytes),
        },
        kv_dtype=_torch_kv,
        shares_kv=False,
        options=(
            *("graphs", "device_sampling", "run_ahead", "attention", "kernels", "margin"),
            "prefill_chunk",
        ),
        kv_grain=64,
        kv_spare_tokens=1,
        package="torch",
        extra="torch",
        probe="serving.backends.torch.probe:probe",
        gpu_builds={
            "nvidia": ("install torch built for CUDA, see pytorch.org", ""),
            "amd": ("install torch built for ROCm, see pytorch.org", ""),
        },
    ),
    "fake": BackendSpec(
        cls="serving.backends.fake:FakeBackend",
        weights="none",
        default_format="none",
        overhead={"cpu": Overhead(60 * MIB), "gpu": Overhead(60 * MIB)},
        about="no model: scripted step times, for tests of everything else",
    ),
}
# Tried in this order where the user names no backend.
DEFAULTS: dict[str, tuple[str, ...]] = {"cpu": ("llama_cpp",), "gpu": ("torch", "llama_cpp")}


def spec_of(name: str) -> BackendSpec:
    """The row of a backend; one made up for "package.module:Class". Raises BackendUnavailable."""
    if name in BACKENDS:
        return BACKENDS[name]
    if ":" in name:
        devices = {"cpu": UNKNOWN_OVERHEAD, "gpu": UNKNOWN_OVERHEAD}
        return BackendSpec(cls=name, weights=None, default_format="fp16", overhead=devices)
    raise BackendUnavailable(
        f"unknown backend {name!r}; known: {', '.join(BACKENDS)}, or package.module:Class"
    )


def backend_class(name: str) -> Any:
    """The class of a backend. Raises BackendUnavailable with the package to install."""
    spec = spec_of(name)
    module_name, _, class_name = spec.cls.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except ImportError as problem:
        advice = f"; {spec.install}" if spec.extra else ""
        raise BackendUnavailable(
            f"backend {name!r} cannot be imported: {problem}{advice}"
        ) from problem


def format_of(name: str, weight_format: str | None) -> str:
    """The weight format as the backend spells it; None: its default. Raises Unsupported."""
    spec = spec_of(name)
    if not weight_format:
        return spec.format_by_default
    if not spec.formats:
        return weight_format
    return _spelt(name, weight_format, spec.formats, spec.also_reads)


def _spelt(
    name: str, weight_format: str, formats: tuple[str, ...], more: tuple[str, ...] = ()
) -> str:
    for one in (*formats, *more):
        if one.lower() == weight_format.lower():
            return one
    if weight_format == "dynamic-int8" and "int8" in formats:  # its name in older campaigns
        return "int8"
    raise Unsupported(
        f"backend {name!r} has no weight format {weight_format!r}; it has {', '.join(formats)}",
        "weight_format",
    )


def weights_of(name: str, weight_format: str | None = None) -> tuple[str, str]:
    """Kind of files to make (gguf, hf, onnx, none) and their format; "" without weights."""
    spec = spec_of(name)
    if spec.weights == "none":
        return spec.weights, ""
    if spec.weights is not None:
        if not weight_format:
            return spec.weights, spec.format_by_default
        return spec.weights, _spelt(name, weight_format, spec.formats)
    if not weight_format:
        return "hf", DEFAULT_FORMATS["hf"]
    for kind in ("hf", *FORMATS):  # safetensors first: onnx has fp32 too
        if weight_format in FORMATS[kind]:
            return kind, weight_format
    formats = tuple(one for kind in FORMATS.values() for one in kind)
    chosen = _spelt(name, weight_format, formats)
    return next(kind for kind in FORMATS if chosen in FORMATS[kind]), chosen


def backend_for(kind: str) -> str:
    """The first backend that reads this kind of files."""
    return next(name for name, spec in BACKENDS.items() if spec.weights == kind)


def missing_backends() -> dict[str, str]:
    """Backends whose package is not installed -> what to do; nothing is imported."""
    return {
        name: f"its package {spec.package} is not installed ({spec.install})"
        for name, spec in BACKENDS.items()
        if spec.package is not None and find_spec(spec.package) is None
    }


def probed() -> Iterator[str]:
    """Backends that can be asked what they can do here."""
    return (name for name, spec in BACKENDS.items() if spec.probe is not None)
