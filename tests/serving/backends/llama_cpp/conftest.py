"""Tiny GGUF files, and engines over them that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from models.random_weights import write_gguf
from models.spec import ModelSpec
from serving.backends.backend_interface import EngineConfig
from serving.backends.llama_cpp.backend import LlamaCppBackend
from tests.serving.backends.llama_cpp.engines import Make
from tests.shapes import TINY_LLAMA


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelSpec, str], Path]:
    folder = tmp_path_factory.mktemp("gguf")

    def file(spec: ModelSpec, weight_format: str = "F16") -> Path:
        path = folder / f"{spec.name}-{weight_format}.gguf"
        if not path.exists():
            write_gguf(spec, path, weight_format, seed=3)
        return path

    return file


@pytest.fixture
def make(files: Callable[[ModelSpec, str], Path]) -> Iterator[Make]:
    opened: list[LlamaCppBackend] = []

    def build(
        spec: ModelSpec = TINY_LLAMA, weight_format: str = "F16", **settings: Any
    ) -> LlamaCppBackend:
        settings = {"slots": 5, "context_tokens": 256, "threads": 1} | settings
        progress = settings.pop("progress", lambda what, fraction: None)
        path = str(settings.pop("model_path", None) or files(spec, weight_format))
        config = EngineConfig(backend="llama_cpp", model_path=path, model_name="m", **settings)
        backend = LlamaCppBackend(config, progress)
        opened.append(backend)
        return backend

    yield build
    for backend in opened:
        backend.close()
