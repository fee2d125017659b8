"""What builds for GPUs say, by their own words: no GPU is needed to read them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from serving.backends.llama_cpp.library import LogTail, devices_said, dry_run_parts, memory_parts
from serving.backends.torch.probe import architecture_of, cause_of
from serving.errors import Cause

MIB = 1 << 20
LOAD = [
    "llama_model_load_from_file_impl: using device CUDA0 (NVIDIA H100 80GB HBM3) (0000:1b:00.0)"
    " - 80543 MiB free",
    "load_tensors:   CPU_Mapped model buffer size =   281.81 MiB",
    "load_tensors:        CUDA0 model buffer size =  4155.99 MiB",
    "llama_context:  CUDA_Host  output buffer size =     7.83 MiB",
    "llama_kv_cache:      CUDA0 KV buffer size =  1024.00 MiB",
    "llama_kv_cache: size = 1024.00 MiB (  8192 cells,  32 layers)",
    "llama_context:      CUDA0 compute buffer size =   560.00 MiB",
    "llama_context:  CUDA_Host compute buffer size =    24.01 MiB",
]


def test_memory_of_a_gpu_is_that_on_the_gpu() -> None:
    parts = memory_parts(LOAD, "gpu")
    assert parts.weight_bytes == pytest.approx(4155.99 * MIB, abs=MIB)
    assert (parts.kv_bytes, parts.compute_bytes) == (1024 * MIB, 560 * MIB)
    everywhere = memory_parts(LOAD)
    assert everywhere.weight_bytes == pytest.approx((4155.99 + 281.81) * MIB, abs=MIB)
    assert everywhere.compute_bytes == pytest.approx((560 + 24.01 + 7.83) * MIB, abs=MIB)
    planned = dry_run_parts(LOAD, 5 * MIB, "gpu")
    assert (planned.kv_bytes, planned.compute_bytes) == (1024 * MIB, 560 * MIB)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("CUDA0 (NVIDIA H100 80GB HBM3) (0000:1b:00.0)", "NVIDIA H100 80GB HBM3"),
        ("CUDA0 (NVIDIA GeForce RTX 4090)", "NVIDIA GeForce RTX 4090"),
        ("Vulkan0 (AMD Radeon (RADV GFX1103)) (0000:c1:00.0)", "AMD Radeon (RADV GFX1103)"),
        ("Vulkan0 (llvmpipe (LLVM 15, 256 bits)) (unknown id)", "llvmpipe (LLVM 15, 256 bits)"),
    ],
)
def test_a_gpus_name_is_the_same_at_every_load(device: str, name: str) -> None:
    assert devices_said([f"x: using device {device} - 9000 MiB free", "y"]) == [name]


def test_errors_of_llama_cpp_outlive_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    log = LogTail()
    log._take(4, b"CUDA error: out of memory\n", None)
    log._take(3, b"a warning\n", None)
    assert capfd.readouterr().err == "llama.cpp: CUDA error: out of memory\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("CUDA error: no kernel image is available for execution", Cause.arch_unsupported),
        ("HIP error: invalid device function", Cause.arch_unsupported),
        ("CUDA out of memory. Tried to allocate 2 MiB", Cause.insufficient_vram),
        ("GPU is lost", Cause.no_device),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", Cause.no_device),
        ("CUDA driver version is insufficient", Cause.driver_mismatch),
    ],
)
def test_why_a_build_of_torch_cannot_use_a_gpu(text: str, cause: Cause) -> None:
    assert cause_of(text) is cause


def test_architectures_are_named_as_their_makers_do() -> None:
    mi300 = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    assert architecture_of(mi300) == "gfx942"
    assert architecture_of(SimpleNamespace(major=9, minor=0)) == "sm_90"
