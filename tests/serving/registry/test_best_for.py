"""Which engine a server takes where no backend is named. The table of step times is scripted."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossover.models.identity.model_ladder import ladder_model
from crossover.serving.hardware.gpus import GpuFacts
from crossover.serving.hardware.machine_facts import hardware_facts
from crossover.serving.placement.fastest_backend import (
    EngineCandidate,
    EngineQuestion,
    EngineTimes,
    save_times,
)
from crossover.serving.placement.placement_policy import PlacementRequest
from crossover.serving.registry.prepare_model import Machine, choose_engine, find_model
from crossover.serving.server_options import ModelOptions
from tests.serving.backends.hf_folders import children_here, hf_folder

SPEC = ladder_model("135m").spec


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Where onnx is twice as quick with one thread. No weights are made yet."""
    question = EngineQuestion(
        source="135m",
        request=PlacementRequest(model=SPEC),
        threads=1,
        cores=(0,),
    )
    for backend, name, seconds in (("llama_cpp", "Q4_0", 0.02), ("onnx", "int8", 0.01)):
        times = EngineTimes(
            slots=16,
            prompt_tokens_per_second=1 / seconds,
            decode_seconds=seconds,
            decode_slots_seconds=seconds,
        )
        engine = EngineCandidate(backend=backend, weight_format=name)
        save_times(tmp_path, hardware_facts(), question.key(engine), times)
    return Machine(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("onnx", "int8")),
        ({"weight_format": "q4_0"}, ("llama_cpp", "Q4_0")),
        ({"weight_format": "bf16"}, ("torch", "bf16")),
        ({"weight_format": "int4"}, ("onnx", "int4")),
        ({"calibration": False}, None),
        ({"backend": "llama_cpp"}, None),
        ({"options": {"mlock": True}}, None),
    ],
)
def test_the_kept_table_decides_where_neither_backend_nor_its_options_are_named(
    machine: Machine, options: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    model = ModelOptions(source="135m", threads=1, **options)
    request = find_model(model, machine)
    choice = choose_engine(model, request, machine.split("", 1), machine, machine.facts())
    assert (choice and (choice.backend, choice.weight_format)) == expected


def test_a_model_of_the_hub_goes_to_onnx_in_8_bits_and_to_torch_where_there_is_a_gpu(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    children_here(monkeypatch)
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    shutil.copytree(hf_folder("tiny-llama"), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = ModelOptions(source="org/name")
    gpu = msgspec.structs.replace(hardware_facts(), gpus=(GpuFacts("a GPU", "nvidia", 1, 1),))
    for facts, expected in ((hardware_facts(), ("onnx", "int8")), (gpu, ("torch", "fp32"))):
        monkeypatch.setattr(machine, "facts", lambda facts=facts: facts)
        found = find_model(model, machine)
        assert (found.backend, found.weight_format, found.model.name) == (*expected, "org/name")
