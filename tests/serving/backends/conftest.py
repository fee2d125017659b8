"""Engines over tiny models that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.random_weights import write_gguf
from crossover.serving.backends.backend_table import backend_class
from tests.serving.backends.backend_steps import Make
from tests.shapes import TINY_LLAMA
from tests.tools.with_settings import engine_config


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A seeded GGUF file of a shape, made once."""
    folder = tmp_path_factory.mktemp("gguf")

    def file(spec: ModelSpec = TINY_LLAMA, weight_format: str = "F16") -> Path:
        path = folder / f"{spec.name}-{weight_format}.gguf"
        if not path.exists():
            write_gguf(spec, path, weight_format, seed=3)
        return path

    return file


@pytest.fixture
def threads_of_torch() -> Iterator[None]:
    """The threads of PyTorch, which an engine changes, are as before after the test."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make(request: pytest.FixtureRequest, gguf_file: Callable[..., Path]) -> Iterator[Make]:
    """Makes engines of the backend that the test's parameter `backend_name` names, else its folder,
    of a path or, for llama_cpp, of a shape and a format.
    """
    parameters = getattr(request.node, "callspec", None)
    name = parameters.params.get("backend_name") if parameters is not None else None
    name, opened = name or request.path.parent.name, []
    if name == "torch":
        request.getfixturevalue("threads_of_torch")

    def build(source: Path | str | ModelSpec = TINY_LLAMA, **settings: Any) -> Any:
        kind = settings.pop("kind", None) or backend_class(name)
        progress = settings.pop("progress", lambda what, fraction: None)
        if isinstance(source, ModelSpec):
            source = gguf_file(source, settings.get("weight_format", "F16"))
        context = 256 if name == "llama_cpp" else 128
        settings = {"slots": 5, "context_tokens": context, "threads": 1} | settings
        if name == "onnx":
            settings["options"] = {"spinning": False} | settings.get("options", {})
        opened.append(kind(engine_config(name, str(source), "m", **settings), progress))
        return opened[-1]

    yield build
    for backend in opened:
        backend.close()
