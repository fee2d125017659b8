"""What the installed torch can do. Runs in a process of its own."""

from __future__ import annotations

import importlib.metadata

import msgspec

from serving.backends.spec import BackendProbe
from serving.errors import Cause


def probe() -> BackendProbe:
    """Import it; where it sees a GPU, multiply matrices there."""
    import torch

    details = {
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "transformers": importlib.metadata.version("transformers"),
    }
    answer = BackendProbe("torch", True, str(torch.__version__), details=details)

    def no_gpu(cause: Cause, note: str) -> BackendProbe:
        return msgspec.structs.replace(answer, gpu_cause=cause, gpu_note=note)

    built_for = torch.version.cuda or getattr(torch.version, "hip", None)
    if not built_for:
        return no_gpu(Cause.backend_missing, "this build of torch is for the CPU only")
    details["built_for"] = built_for
    if not torch.cuda.is_available():
        return no_gpu(Cause.no_device, "torch sees no GPU")
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability(0))
    try:
        ones = torch.ones(256, 256, device="cuda")
        total = float((ones @ ones).sum().cpu())
    except RuntimeError as problem:
        text = str(problem).splitlines()[0]
        return no_gpu(_cause(text), f"{text} ({capability})")
    if total != 256.0**3:
        return no_gpu(Cause.driver_mismatch, f"a product on the GPU came out wrong: {total}")
    details["capability"] = capability
    return msgspec.structs.replace(answer, gpu=True, gpu_note=torch.cuda.get_device_name(0))


def _cause(text: str) -> Cause:
    if "kernel image" in text:
        return Cause.arch_unsupported
    return Cause.insufficient_vram if "memory" in text else Cause.driver_mismatch
