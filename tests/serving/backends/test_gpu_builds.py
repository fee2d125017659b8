"""What builds for GPUs say, by their own words: no GPU is needed to read them."""

from __future__ import annotations

import pytest

from crossover.serving.backends.llama_cpp.library import LogTail
from crossover.serving.backends.torch.torch_capabilities import cause_of_cuda
from crossover.serving.errors import Cause


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
    log = LogTail()
    log.add(2, f"x: using device {device} - 9000 MiB free".encode(), None)
    assert log.gpu == name


def test_errors_of_llama_cpp_outlive_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    log = LogTail()
    log.add(4, b"CUDA error: out of memory\n", None)
    log.add(3, b"a warning\n", None)
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
    assert cause_of_cuda(text) is cause
