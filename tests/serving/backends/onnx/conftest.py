"""Onnx engines over tiny graphs that are closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.backends.backend_interface import EngineConfig
from serving.backends.onnx.backend import OnnxBackend
from tests.serving.backends.onnx.engines import Make


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[OnnxBackend] = []

    def build(path: Path | str, **settings: Any) -> OnnxBackend:
        settings = {
            "slots": 5,
            "context_tokens": 128,
            "threads": 1,
            "options": {"spinning": False},
        } | settings
        config = EngineConfig(backend="onnx", model_path=str(path), model_name="m", **settings)
        opened.append(OnnxBackend(config, lambda what, fraction: None))
        return opened[-1]

    yield build
    for backend in opened:
        backend.close()
