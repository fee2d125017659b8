"""The probe of the torch backend: what the installed torch can do on this machine."""

from __future__ import annotations

from crossover.serving.backends.backend_probe import BackendProbe
from crossover.serving.errors import Cause


def probe() -> BackendProbe:
    """Return what the installed torch can do. If it finds a GPU, it has to multiply two matrices
    correctly there. Runs in a child process."""
    import torch

    details = {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    built_for = torch.version.cuda or torch.version.hip
    cause: Cause | None = None
    if not built_for:
        cause, note = Cause.backend_missing, "this build of torch is for the CPU only"
    elif not torch.cuda.is_available():
        cause, note = Cause.no_device, "torch sees no GPU"
    else:
        details["built_for"] = built_for
        note = torch.cuda.get_device_name(0)
        try:
            for dtype in (torch.float32, torch.bfloat16):
                ones = torch.ones(256, 256, device="cuda", dtype=dtype)
                product_sum = float((ones @ ones).float().sum().cpu())
                if product_sum != 256.0**3:
                    cause, note = Cause.driver_mismatch, f"a product of {dtype} came out wrong"
        except RuntimeError as problem:
            note = str(problem).splitlines()[0]
            cause = cause_of_cuda(note)
    return BackendProbe(
        "torch",
        works=True,
        version=str(torch.__version__),
        gpu=cause is None,
        gpu_note=note,
        gpu_cause=cause,
        gpu_vendor=("amd" if torch.version.hip else "nvidia") if built_for else None,
        details=details,
    )


def cause_of_cuda(text: str) -> Cause:
    """Return the cause for an error message of CUDA or HIP."""
    if "kernel image" in text or "invalid device function" in text:
        return Cause.arch_unsupported
    if "memory" in text:
        return Cause.insufficient_vram
    is_gone = "no CUDA-capable device" in text or "is lost" in text or "busy" in text
    return Cause.no_device if is_gone else Cause.driver_mismatch
