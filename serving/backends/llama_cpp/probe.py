"""What the installed llama-cpp-python can do. Runs in a process of its own."""

from __future__ import annotations

from serving.backends.spec import BackendProbe
from serving.errors import Cause


def probe() -> BackendProbe:
    """Import it and ask whether it was built for GPUs."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    info = llama_cpp.llama_print_system_info().decode(errors="replace").strip()
    gpu = bool(llama_cpp.llama_supports_gpu_offload())
    return BackendProbe(
        "llama_cpp",
        works=True,
        version=llama_cpp.__version__,
        gpu=gpu,
        gpu_note="built with GPU support" if gpu else "this build of llama.cpp is for the CPU only",
        gpu_cause=None if gpu else Cause.backend_missing,
        details={"system_info": info},
    )
