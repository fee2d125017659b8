"""Which engine a server takes where no backend is named. The table of step times is scripted."""

import time
from pathlib import Path
from typing import Any

import pytest

from models.cache import Wish, synthetic_path
from models.ladder import rung
from serving.hardware.machine_facts import hardware_facts
from serving.placement.fastest_backend import EngineChoice, EngineTimes, keep
from serving.registry.engine_config import Machine, best_for, find_model, place
from serving.server_options import ModelOptions

SPEC = rung("135m").spec


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Where both engines' weights are there, and onnx is twice as quick with one thread."""
    machine = Machine(str(tmp_path))
    synthetic_path(SPEC, Wish("onnx", "int8", tmp_path)).mkdir(parents=True)
    for backend, name, seconds in (("llama_cpp", "Q4_0", 0.02), ("onnx", "int8", 0.01)):
        one = EngineTimes(
            model=SPEC.name,
            parameters=SPEC.parameters,
            backend=backend,
            weight_format=name,
            threads=1,
            slots=16,
            prompt_tokens=256,
            prompt_tokens_per_second=1 / seconds,
            decode_seconds=seconds,
            decode_slots_seconds=seconds,
            spent_seconds=1.0,
            unix_seconds=time.time(),
        )
        keep(tmp_path, hardware_facts(), one)
    return machine


def taken(machine: Machine, **options: Any) -> EngineChoice | None:
    model = ModelOptions(source="135m", threads=1, **options)
    found, facts = find_model(model, machine), machine.facts()
    placement = place(found, machine, facts)
    return best_for(found, placement, machine.split("", 1), machine, facts)


@pytest.mark.parametrize("is_serving", [False, True])
def test_the_kept_table_decides_between_engines_whose_weights_are_there(
    machine: Machine, is_serving: bool
) -> None:
    machine.is_serving = is_serving
    choice = taken(machine)
    assert choice is not None
    assert (choice.backend, choice.weight_format) == ("onnx", "int8")


@pytest.mark.parametrize(
    "options",
    [{"calibration": False}, {"backend": "llama_cpp"}, {"options": {"mlock": True}}],
)
def test_who_names_a_backend_or_its_options_or_wants_no_calibration_has_the_fixed_order(
    machine: Machine, options: dict[str, Any]
) -> None:
    assert taken(machine, **options) is None


@pytest.mark.parametrize(
    ("weight_format", "backend"), [("q4_0", "llama_cpp"), ("bf16", "torch"), ("int4", "onnx")]
)
def test_the_format_asked_for_decides(machine: Machine, weight_format: str, backend: str) -> None:
    """As before, where its weights are there for no engine: those of the usual one are made."""
    choice = taken(machine, weight_format=weight_format)
    assert choice is not None and choice.backend == backend


def test_weights_that_are_not_made_do_not_exclude_an_engine(machine: Machine) -> None:
    synthetic_path(SPEC, Wish("onnx", "int8", Path(machine.cache or ""))).rmdir()
    choice = taken(machine)
    assert choice is not None and choice.backend == "onnx"
