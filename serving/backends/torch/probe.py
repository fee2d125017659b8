"""What the installed torch can do. Runs in a process of its own."""

from __future__ import annotations

from typing import Any

from serving.backends.backend_table import BackendProbe
from serving.errors import Cause


def probe() -> BackendProbe:
    """Import it; where it sees a GPU, multiply matrices there."""
    import torch

    details = {"cpu_capability": torch.backends.cpu.get_cpu_capability()}

    def answer(cause: Cause | None, note: str) -> BackendProbe:
        vendor = ("amd" if torch.version.hip else "nvidia") if built_for else None
        version = str(torch.__version__)
        return BackendProbe(
            "torch", True, version, cause is None, note, cause, vendor, None, details
        )

    built_for = torch.version.cuda or getattr(torch.version, "hip", None)
    if not built_for:
        return answer(Cause.backend_missing, "this build of torch is for the CPU only")
    details["built_for"] = built_for
    if not torch.cuda.is_available():
        return answer(Cause.no_device, "torch sees no GPU")
    details["capability"] = architecture_of(torch.cuda.get_device_properties(0))
    try:
        for dtype in (torch.float32, torch.bfloat16):
            ones = torch.ones(256, 256, device="cuda", dtype=dtype)
            total = float((ones @ ones).float().sum().cpu())
            if total != 256.0**3:
                note = f"a product of {dtype} on the GPU came out wrong: {total}"
                return answer(Cause.driver_mismatch, note)
    except RuntimeError as problem:
        text = str(problem).splitlines()[0]
        return answer(cause_of(text), f"{text} ({details['capability']})")
    return answer(None, torch.cuda.get_device_name(0))


def architecture_of(properties: Any) -> str:
    """ "gfx942" where ROCm says so, else "sm_90"."""
    said = getattr(properties, "gcnArchName", "").split(":")[0]
    return said or f"sm_{properties.major}{properties.minor}"


def cause_of(text: str) -> Cause:
    """The cause in the words of CUDA's and HIP's errors."""
    if "kernel image" in text or "invalid device function" in text:
        return Cause.arch_unsupported
    if "memory" in text:
        return Cause.insufficient_vram
    is_gone = "no CUDA-capable device" in text or "is lost" in text or "busy" in text
    return Cause.no_device if is_gone else Cause.driver_mismatch
