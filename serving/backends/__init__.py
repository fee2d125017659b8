"""The backends by name. A backend is a class, imported when chosen; "package.module:Class" is taken literally."""

from __future__ import annotations

import importlib

from serving.backends.base import Backend
from serving.errors import BackendUnavailable

BACKENDS: dict[str, str] = {
    "fake": "serving.backends.fake:FakeBackend",
    "llama_cpp": "serving.backends.llama_cpp:LlamaCppBackend",
    "onnx": "serving.backends.onnx_runtime:OnnxBackend",
    "torch": "serving.backends.torch_transformers:TorchBackend",
}


def backend_class(name: str) -> type[Backend]:
    """The class behind a backend's name. Raises BackendUnavailable where it cannot be imported, saying what to install."""
    target = BACKENDS.get(name, name)
    if ":" not in target:
        raise BackendUnavailable(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}, or package.module:Class")
    module_name, _, class_name = target.partition(":")
    try:
        found: type[Backend] = getattr(importlib.import_module(module_name), class_name)
    except ImportError as problem:
        extra = {"llama_cpp": "llama-cpp", "onnx": "onnx", "torch": "torch"}.get(name)
        advice = f"; pip install 'llm-crossover[{extra}]'" if extra else ""
        raise BackendUnavailable(f"backend {name!r} cannot be imported: {problem}{advice}") from problem
    return found
