"""Which engine a server takes where no backend is named. The table of step times is scripted."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossover.models.identity.identify_model import ModelIdentity
from crossover.models.identity.model_ladder import ladder_model
from crossover.serving.errors import Cause
from crossover.serving.hardware.gpus import GpuFacts
from crossover.serving.hardware.machine_facts import hardware_facts
from crossover.serving.placement.engine_times import EngineTimes, save_times
from crossover.serving.placement.fastest_backend import (
    EngineCandidate,
    EngineQuestion,
    fastest_backend,
)
from crossover.serving.placement.placement_policy import Placement, with_settings
from crossover.serving.registry import prepare_model
from crossover.serving.registry.prepare_model import (
    Host,
    engine_question,
    find_model,
    prepare,
)
from crossover.serving.server_options import ModelOptions
from tests.serving.backends.hf_folders import children_here, hf_folder
from tests.tools.core_splits import split_of_one_core
from tests.tools.made_up_machines import MadeUp
from tests.tools.with_settings import placement_request

SPEC = ladder_model("135m").spec


@pytest.fixture
def machine(tmp_path: Path) -> Host:
    """Where onnx is twice as quick with one thread. No weights are made yet."""
    question = EngineQuestion(request=placement_request(SPEC), split_of=split_of_one_core())
    for backend, name, seconds in (("llama_cpp", "Q4_0", 0.02), ("onnx", "int8", 0.01)):
        times = EngineTimes(
            slots=16,
            prompt_tokens_per_second=1 / seconds,
            pass_seconds=0.0,
            decode_seconds=seconds,
            decode_slots_seconds=seconds,
        )
        engine = EngineCandidate(backend=backend, weight_format=name)
        save_times(tmp_path, hardware_facts(), question.key(engine), times)
    return Host(str(tmp_path))


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
    machine: Host, options: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    model = ModelOptions(source="135m", threads=1, **options)
    facts = machine.facts()
    request = with_settings(find_model(model, machine, facts)[0], context_tokens=2048)
    question = engine_question(model, request, machine)
    choice = question and fastest_backend(question, facts, machine.say, machine.progress)
    assert (choice and (choice.backend, choice.weight_format)) == expected


def test_a_server_starts_with_the_slots_that_its_step_times_and_memory_give(
    machine: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps cost the same with any number of rows, so memory decides: 32 slots of the model's 8,192
    tokens take less than a quarter of it, and 64 do not."""

    class Placed(Exception):
        def __init__(self, placement: Placement) -> None:
            self.placement = placement

    def stop(model: ModelIdentity, placement: Placement, *_: object) -> None:
        raise Placed(placement)

    monkeypatch.setattr(prepare_model, "files_of_engines", stop)
    facts = msgspec.structs.replace(
        hardware_facts(), memory_available_bytes=64 << 30, cgroup_memory_bytes=None
    )
    with pytest.raises(Placed) as stopped:
        prepare(ModelOptions(source="135m", threads=1), machine, facts)
    chosen = stopped.value.placement
    assert (chosen.backend, chosen.settings.context_tokens) == ("onnx", 8192)
    assert chosen.settings.slots == 32
    assert "; with 32 slots " in " ".join(reason.text for reason in chosen.reasons)


def test_a_model_of_the_hub_goes_to_onnx_in_8_bits_and_to_torch_where_there_is_a_gpu(
    machine: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    no_build = {"torch": (Cause.backend_missing, "this build of torch is for the CPU only")}
    for facts, trouble, expected in (
        (hardware_facts(), {}, ("onnx", "int8")),
        (gpu, {}, ("torch", "fp32")),
        (gpu, no_build, ("onnx", "int8")),
    ):
        here = MadeUp(facts, trouble)
        here.cache = machine.cache
        request, files = find_model(model, here, facts)
        wanted = request.wanted
        assert list(files) == [expected[0]]
        assert (wanted.backends, wanted.formats) == (expected[:1], expected[1:])
