"""What placement says of an engine's memory, against what its process takes when its KV is full.

Each engine loads in a process of its own, as it does in the product. The models are small: the
libraries' own memory, which is a round figure in the table, is much of the sum.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.convert_to_onnx import make_onnx
from crossover.models.weights.random_weights import write_gguf, write_hf_folder
from crossover.serving.hardware.machine_facts import hardware_facts
from crossover.serving.placement.engines import Engine
from crossover.serving.placement.placement_policy import predict
from tests.tools.with_settings import engine_config, placement_request

MEDIUM = ModelSpec(
    *("medium", "llama"),
    layers=6,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=64,
    intermediate=2816,
    vocabulary=8192,
    context=2048,
    tied=True,
    rope_theta=10_000.0,
)
SLOTS, CONTEXT = 4, 512
FILL = """
import sys, msgspec, numpy as np
from crossover.serving.backends.backend_table import backend_class
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.hardware.machine_facts import resident_bytes
from crossover.serving.sampling.step_inputs import Row
config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
backend = backend_class(config.backend)(config, lambda what, fraction: None)
for slot in range(config.settings.slots):
    for start in range(0, config.settings.context_tokens, 256):
        backend.step([Row(slot, np.full(256, 7, np.int32), start, False)])
print(resident_bytes())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("medium") / "hf"
    write_hf_folder(MEDIUM, path, "fp32")
    return path


@pytest.mark.parametrize(
    ("backend", "weight_format"),
    [
        ("llama_cpp", "Q4_0"),
        ("onnx", "int8"),
        pytest.param("torch", "fp32", marks=pytest.mark.slow),
    ],
)
def test_memory_is_what_placement_predicted(
    folder: Path, tmp_path: Path, backend: str, weight_format: str
) -> None:
    path = folder
    if backend == "llama_cpp":
        path = tmp_path / "weights.gguf"
        write_gguf(MEDIUM, path, weight_format)
    elif backend == "onnx":
        path = make_onnx(folder, tmp_path / "onnx", weight_format, spec=MEDIUM)
    sizes = {"slots": SLOTS, "context_tokens": CONTEXT, "threads": 1}
    config = engine_config(backend, str(path), "medium", weight_format=weight_format, **sizes)
    command = [sys.executable, "-c", FILL, msgspec.json.encode(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    request = placement_request(MEDIUM, slots=SLOTS, context_tokens=CONTEXT, prompt_cache_bytes=0)
    predicted = predict(request, hardware_facts(), Engine(backend, weight_format, "cpu"))
    assert predicted.need_bytes == pytest.approx(int(done.stdout.split()[-1]), rel=0.4)
