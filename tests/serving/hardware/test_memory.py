"""Memory said before the load against memory measured after it, for weights and KV cache together,
on a model that is big enough to show.

Each engine loads in a process of its own, as it does in the product: what earlier loads left in the
heap would hide what this one takes. Peak RSS, which also holds the libraries and the working memory
of the steps, is another figure and not meant here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.convert_to_onnx import make_onnx
from models.random_weights import write_gguf, write_hf_folder
from models.spec import ModelSpec
from serving.backends.backend_interface import BackendInfo, EngineConfig
from serving.hardware.machine_facts import hardware_facts
from serving.placement.placement_policy import PlacementRequest
from serving.placement.placement_policy import predicted as planned_memory

MEDIUM = ModelSpec(
    name="medium",
    family="llama",
    layers=6,
    hidden=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1408,
    vocabulary=8192,
    context=2048,
    tied=True,
    rope_theta=10_000.0,
)
SLOTS, CONTEXT = 8, 1024
LOAD = """
import sys, msgspec
from serving.backends.backend_table import backend_class
from serving.backends.backend_interface import EngineConfig
config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
backend = backend_class(config.backend)(config, lambda what, fraction: None)
print(msgspec.json.encode(backend.info).decode())
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    folder = tmp_path_factory.mktemp("medium")

    def path(backend: str, weight_format: str) -> Path:
        if backend == "llama_cpp":
            write_gguf(MEDIUM, folder / f"{weight_format}.gguf", weight_format)
            return folder / f"{weight_format}.gguf"
        if not (folder / "hf").exists():
            write_hf_folder(MEDIUM, folder / "hf", "bf16")
        return (
            make_onnx(folder / "hf", folder / weight_format, weight_format, spec=MEDIUM)
            if backend == "onnx"
            else folder / "hf"
        )

    return path


def loaded(**settings: Any) -> BackendInfo:
    config = EngineConfig(
        model_name="medium", slots=SLOTS, context_tokens=CONTEXT, threads=1, **settings
    )
    done = subprocess.run(
        [sys.executable, "-c", LOAD, msgspec.json.encode(config)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return msgspec.convert(json.loads(done.stdout.splitlines()[-1]), BackendInfo)


# kv: bytes of an element of the KV cache, and how much longer than the context a slot may be for
# alignment.
@pytest.mark.parametrize(
    ("backend", "weight_format", "kv", "longer"),
    [
        ("llama_cpp", "Q4_0", 2, 1.0),
        ("llama_cpp", "F16", 2, 1.0),
        ("onnx", "fp32", 4, 1.0),
        ("onnx", "int8", 4, 1.0),
        ("onnx", "int4", 4, 1.0),
        ("torch", "bf16", None, 1.07),
        ("torch", "fp32", 4, 1.07),
    ],
)
def test_weights_and_kv_are_predicted_within_five_percent(
    weights: Callable[[str, str], Path],
    backend: str,
    weight_format: str,
    kv: int | None,
    longer: float,
) -> None:
    path = weights(backend, weight_format)
    info = loaded(backend=backend, model_path=str(path), weight_format=weight_format)
    predicted, measured = info.predicted, info.measured
    assert predicted is not None and measured is not None
    assert measured.weight_bytes is not None and measured.kv_bytes is not None
    assert predicted.weight_bytes == pytest.approx(measured.weight_bytes, rel=0.05)
    both = measured.weight_bytes + measured.kv_bytes
    assert predicted.weight_bytes + (predicted.kv_bytes or 0) == pytest.approx(both, rel=0.05)
    request = PlacementRequest(
        model=MEDIUM, weight_format=weight_format, slots=SLOTS, context_tokens=CONTEXT
    )
    planned = planned_memory(request, hardware_facts(), backend, None)  # before any file
    assert planned.kv_bytes == pytest.approx(measured.kv_bytes, rel=0.01)
    # And neither is far from what the shape says: both could be wrong in the same way.
    if kv is not None:
        least = SLOTS * CONTEXT * MEDIUM.layers * 2 * MEDIUM.kv_heads * MEDIUM.head_dim * kv
        assert least <= measured.kv_bytes <= longer * least
    bits = {"Q4_0": 4.5, "F16": 16, "bf16": 16, "fp32": 32, "int8": 8, "int4": 4.5}[weight_format]
    assert measured.weight_bytes >= MEDIUM.parameters * bits / 8 * 0.98
