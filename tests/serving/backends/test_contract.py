"""Every backend of the table keeps the contract on a tiny model, so a new row has its test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from crossover.models.shape.model_spec import ModelSpec
from crossover.serving.backends.backend_table import BACKENDS, missing_backends
from tests.serving.backends.backend_contract import (
    check_contract,
    check_contradictions,
    check_seeded,
)
from tests.serving.backends.backend_steps import Make, greedy_unbatched
from tests.serving.backends.hf_folders import hf_folder, onnx_folder
from tests.shapes import TINY_QWEN3

# By the kind of weights that a backend reads.
SOURCES: dict[str | None, Callable[[], Path | ModelSpec]] = {
    "gguf": lambda: TINY_QWEN3,
    "hf": lambda: hf_folder("tiny-qwen3"),
    "onnx": lambda: onnx_folder("qwen3-fp32"),
}
ON_CPU = [
    name
    for name, spec in BACKENDS.items()
    if "cpu" in spec.devices and spec.weights in SOURCES and name not in missing_backends()
]


@pytest.mark.parametrize("backend_name", ON_CPU)
def test_a_backend_of_the_table_keeps_the_contract(make: Make, backend_name: str) -> None:
    source = SOURCES[BACKENDS[backend_name].weights]()
    backend = make(source)
    check_contract(backend, greedy_unbatched(make(source, slots=1)))
    check_seeded(backend)
    check_contradictions(make(source))
