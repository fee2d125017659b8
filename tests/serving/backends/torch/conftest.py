"""Torch engines over tiny folders that are closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.backends.backend_interface import EngineConfig
from serving.backends.torch.backend import TorchBackend
from tests.serving.backends.torch.engines import Make


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[TorchBackend] = []

    def build(path: Path | str, **settings: Any) -> TorchBackend:
        settings = {"slots": 5, "context_tokens": 128, "threads": 1} | settings
        config = EngineConfig(backend="torch", model_path=str(path), model_name="m", **settings)
        opened.append(TorchBackend(config, lambda what, fraction: None))
        return opened[-1]

    yield build
    for backend in opened:
        backend.close()
