"""Which GPU, and which engine on it: made-up machines with several of them, divided ones, too small
ones, and what an engine on the chosen one is told.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crossover.models.errors import BrokenWeights
from crossover.models.identity.identify_model import ModelIdentity, identify
from crossover.models.identity.model_ladder import ladder_model
from crossover.models.identity.resolve_model import ResolvedModel
from crossover.serving.backends.backend_interface import EngineConfig
from crossover.serving.backends.backend_table import BACKENDS, BackendSpec
from crossover.serving.engine.ipc_messages import CONFIG_VARIABLE
from crossover.serving.errors import Cause, Unsupported
from crossover.serving.hardware.gpus import GpuFacts
from crossover.serving.placement.engine_times import EngineTimes, save_times
from crossover.serving.placement.engines import Obstacles
from crossover.serving.placement.fastest_backend import EngineCandidate
from crossover.serving.placement.placement_policy import (
    Placement,
    explain,
    narrowed,
    plan,
)
from crossover.serving.registry.prepare_model import (
    engine_question,
    files_of_engines,
    options_by_backend,
    prepare,
    with_measured_fallbacks,
)
from crossover.serving.server_options import ModelOptions
from crossover.serving.supervisor.engine_process import environment
from tests.serving.placement.test_plan import machine, with_gpu
from tests.tools.made_up_machines import MadeUp, MadeUpMachine, made_up_machines, placed_on
from tests.tools.with_settings import placement_request

GIB = 1 << 30
ONE, EIGHT = ladder_model("1b").spec, ladder_model("8b").spec


def nvidia(name: str, total: float, free: float | None = None, **more: Any) -> GpuFacts:
    usable = int((total if free is None else free) * GIB)
    return GpuFacts(name, "nvidia", int(total * GIB), usable, "550.1", **more)


def amd(name: str, total: float, **more: Any) -> GpuFacts:
    return GpuFacts(name, "amd", int(total * GIB), int(total * GIB), **more)


def placed(
    *gpus: GpuFacts,
    spec: Any = ONE,
    trouble: dict[str, tuple[Cause, str]] | None = None,
    memory_gib: float = 64,
    **options: Any,
) -> Placement:
    facts = machine(memory_gib, gpus=gpus, gpu_cause=None, gpu_note=None)
    request = placement_request(model=spec, **{"context_tokens": 2048, **options})
    return plan(request, facts, Obstacles({}, trouble or {}))


def test_the_card_with_most_free_memory_is_named_to_the_engine() -> None:
    placement = placed(
        nvidia("Old", 24, 3, uuid="GPU-1"), nvidia("New", 12, 11, uuid="GPU-2", index=1)
    )
    first = placement.attempts[0]
    assert (first.device_name, first.device_id, first.vendor) == ("New", "GPU-2", "nvidia")


@pytest.mark.parametrize("one", list(made_up_machines()), ids=lambda one: one.name)
def test_a_model_goes_where_it_must_on_made_up_machines(one: MadeUpMachine) -> None:
    assert placed_on(one) == one.expected


def test_what_bf16_does_not_fit_is_tried_in_llama_cpps_format() -> None:
    placement = placed(nvidia("RTX 4070", 12), spec=EIGHT, slots=4)
    first, second = placement.attempts
    assert (first.device, first.backend, first.weight_format) == ("gpu", "llama_cpp", "Q4_0")
    assert second.device == "cpu"
    assert [r.cause for r in placement.reasons if r.cause] == [Cause.insufficient_vram]
    no_build = {"llama_cpp": (Cause.backend_missing, "built for the CPU only")}
    assert placed(nvidia("RTX 4070", 12), spec=EIGHT, trouble=no_build).device == "cpu"


def test_an_engine_sees_only_its_gpu() -> None:
    def seen(**settings: Any) -> dict[str, str]:
        found = environment(EngineConfig("fake", "", "m", **settings), {})
        json.loads(found[CONFIG_VARIABLE])
        return {key: value for key, value in found.items() if "VISIBLE_DEVICES" in key}

    assert seen(device="gpu", device_id="GPU-1", device_vendor="nvidia") == {
        "CUDA_VISIBLE_DEVICES": "GPU-1"
    }
    assert seen(device="gpu") == {}, "no driver said what its name is"
    hidden = seen(device="cpu")
    assert hidden["CUDA_VISIBLE_DEVICES"] == hidden["HIP_VISIBLE_DEVICES"] == "-1"
    assert hidden["GGML_VK_VISIBLE_DEVICES"] == ""


def test_each_engine_gets_its_own_options() -> None:
    both = ("torch", "llama_cpp")
    found = options_by_backend({"mlock": True}, both)
    assert found == {"torch": {}, "llama_cpp": {"mlock": True}}
    for wrong in ("mlok", "torch.margin", "spinning"):
        with pytest.raises(Unsupported, match=f"No engine here has the option '{wrong}'"):
            options_by_backend({wrong: 1}, both)
    assert options_by_backend({"what": 1}, ("some.where:Mine",)) == {"some.where:Mine": {"what": 1}}


@pytest.mark.parametrize("name", [name for name, one in BACKENDS.items() if one.options])
def test_the_table_names_the_options_that_a_backend_has(name: str) -> None:
    spec: BackendSpec = BACKENDS[name]
    folder = importlib.import_module(spec.cls.rpartition(".")[0])
    modules = [
        importlib.import_module(f"{folder.__name__}.{module.name}")
        for module in pkgutil.iter_modules(folder.__path__)
    ]
    (options,) = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
        and kind.__name__.endswith("Options")
    }
    assert spec.options is not None
    assert set(spec.options) == set(options.__struct_fields__)


def test_a_fallback_without_weights_keeps_no_gpu_from_serving(tmp_path: Path) -> None:
    class Offline(MadeUp):
        def files_of(
            self, model: ModelIdentity, backend: str, weight_format: str | None
        ) -> ResolvedModel:
            if backend == "llama_cpp":
                raise BrokenWeights("the disk is full")
            return ResolvedModel("m", ONE, str(tmp_path), "bf16", str(tmp_path), True)

    here = Offline(with_gpu(memory_available_bytes=64 * GIB))
    found = here.place(placement_request(model=ONE, context_tokens=2048), here.facts())
    files, placement = files_of_engines(identify("1b"), found, here)
    assert [(one.device, one.backend) for one in placement.attempts] == [
        *(("gpu", "torch"), ("cpu", "torch"))
    ]
    assert list(files) == ["torch"]
    text = "\n".join(explain(placement))
    assert (
        "no fallback to llama_cpp on the CPU: its weights are not available: the disk is full"
        in text
    )
    broken = narrowed(found, found.attempts[1:])
    with pytest.raises(BrokenWeights):
        files_of_engines(identify("1b"), broken, here)


@pytest.mark.parametrize(("is_timed", "expected"), [(False, "llama_cpp"), (True, "onnx")])
def test_a_fallback_is_chosen_by_the_step_times_that_are_known(
    tmp_path: Path, is_timed: bool, expected: str
) -> None:
    here = MadeUp(with_gpu(memory_available_bytes=64 * GIB))
    here.cache = str(tmp_path)
    model = ModelOptions(source="135m", threads=1)
    request = placement_request(model=ladder_model("135m").spec, context_tokens=2048)
    question = engine_question(model, request, here)
    assert question is not None
    for backend, weight_format, seconds in (("llama_cpp", "Q4_0", 0.02), ("onnx", "int8", 0.01)):
        engine = EngineCandidate(backend=backend, weight_format=weight_format)
        times = EngineTimes(
            slots=16,
            prompt_tokens_per_second=1 / seconds,
            pass_seconds=0.0,
            decode_seconds=seconds,
            decode_slots_seconds=seconds,
        )
        if is_timed:
            save_times(here.cache, here.facts(), question.key(engine), times)
    request = with_measured_fallbacks(request, question, here, here.facts())
    assert here.place(request, here.facts()).attempts[1].backend == expected


def test_the_placement_is_what_the_engines_get() -> None:
    gpu = msgspec.structs.replace(with_gpu().gpus[0], uuid="GPU-7")
    facts = msgspec.structs.replace(with_gpu(), gpus=(gpu,))
    model = ModelOptions(source="fake", name="m", backend="fake", slots=2)
    on_gpu, on_cpu = prepare(model, MadeUp(facts)).configs
    assert (on_gpu.device_id, on_gpu.device_vendor, on_gpu.settings.slots) == ("GPU-7", "nvidia", 2)
    assert (on_cpu.device_id, on_cpu.device_vendor, on_cpu.settings.slots) == ("", "", 2)


@pytest.mark.parametrize(
    ("settings", "spins"),
    [({}, None), ({"nice": 5}, "1000"), ({"nice": 5, "shares_cores": True}, "100")],
    ids=["cores of its own", "beside HTTP", "beside another engine"],
)
def test_threads_of_an_engine_spin_as_long_as_its_cores_are_its_own(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], spins: str | None
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    config = EngineConfig("llama_cpp", "", "m", **settings)
    assert environment(config, {}).get("GOMP_SPINCOUNT") == spins
