"""What the installed llama-cpp-python can do. Runs in a process of its own."""

from __future__ import annotations

from serving.backends.backend_table import BackendProbe
from serving.backends.llama_cpp.library import VENDORS, gpu_build, library
from serving.errors import Cause


def probe() -> BackendProbe:
    """Import it and ask which GPUs it was built for."""
    llama_cpp = library()
    info = llama_cpp.llama_print_system_info().decode(errors="replace").strip()
    gpu = bool(llama_cpp.llama_supports_gpu_offload())
    build = gpu_build(llama_cpp)
    cause, note = Cause.backend_missing, "this build of llama.cpp is for the CPU only"
    if build is not None:
        cause, note = Cause.no_device, f"built with {build}"
    return BackendProbe(
        "llama_cpp",
        works=True,
        version=llama_cpp.__version__,
        gpu=gpu,
        gpu_note=note if gpu or not build else f"{note}, which shows no device here",
        gpu_cause=None if gpu else cause,
        gpu_vendor=VENDORS.get(build or ""),
        details={"system_info": info},
    )
