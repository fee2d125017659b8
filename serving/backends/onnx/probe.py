"""What the installed onnxruntime can do. Runs in a process of its own."""

from __future__ import annotations

import importlib.metadata

from serving.backends.backend_table import BackendProbe
from serving.errors import Cause


def probe() -> BackendProbe:
    """Import it and list its providers and the packages beside it."""
    import onnxruntime

    details = {"providers": ", ".join(onnxruntime.get_available_providers())}
    for name in ("onnx", "optimum"):
        try:
            details[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            details[name] = "not installed"
    return BackendProbe(
        "onnx",
        works=True,
        version=onnxruntime.__version__,
        gpu_note="this backend serves on the CPU only",
        gpu_cause=Cause.backend_missing,
        details=details,
    )
