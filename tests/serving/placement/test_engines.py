"""Which engines can run a model on a machine, and why others cannot: one list for all commands."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from crossover.models.identity.identify_model import Kind, ModelIdentity, identify
from crossover.serving.errors import BackendUnavailable, Cause
from crossover.serving.hardware.machine_facts import HardwareFacts
from crossover.serving.placement.engines import Obstacles, Wanted, engines, usual_format
from crossover.serving.server_options import Policy
from tests.serving.placement.test_plan import machine, with_gpu
from tests.shapes import TINY_LLAMA


def made(kind: Kind, weight_format: str = "") -> ModelIdentity:
    return ModelIdentity(
        name="mine", kind=kind, source="/mine", spec=TINY_LLAMA, weight_format=weight_format
    )


LADDER = identify("135m")
QUANTISED = made("gguf", "Q5_K_M")
TRAINED = made("safetensors", "bf16")
ON_THE_HUB = ModelIdentity(
    name="org/mine", kind="gguf", source="org/mine:x.gguf"
)  # not fetched yet


@pytest.mark.parametrize(
    ("model", "backend", "formats", "expected"),
    [
        (LADDER, "llama_cpp", [], ["Q4_0"]),
        (LADDER, "llama_cpp", ["Q4_0", "bf16", "Q5_K_M"], ["Q4_0", "BF16"]),
        (LADDER, "onnx", [], ["int8"]),
        (LADDER, "torch", ["bf16"], ["bf16"]),
        (QUANTISED, "llama_cpp", [], ["Q5_K_M"]),
        (QUANTISED, "llama_cpp", ["q5_k", "Q4_0"], ["Q5_K_M"]),
        (QUANTISED, "llama_cpp", ["Q4_0"], []),
        (QUANTISED, "onnx", [], []),
        (made("gguf", "MXFP4_MOE"), "llama_cpp", ["MXFP4"], ["MXFP4_MOE"]),
        (ON_THE_HUB, "llama_cpp", ["IQ4_XS"], ["IQ4_XS"]),
        (TRAINED, "onnx", ["int4", "bf16"], ["int4"]),
        (TRAINED, "torch", [], ["bf16"]),
        (TRAINED, "llama_cpp", [], []),
        (made("onnx", "int4"), "onnx", [], ["int4"]),
    ],
)
def test_a_model_runs_on_a_backend_that_reads_it_in_the_formats_that_it_has(
    model: ModelIdentity, backend: str, formats: Sequence[str], expected: list[str]
) -> None:
    wanted = Wanted(Policy.cpu_only, (backend,), tuple(formats))
    found = engines(model, machine(), wanted=wanted)
    names = [engine.weight_format for engine in found if engine.why_not is None]
    assert names == expected


@pytest.mark.parametrize(
    ("model", "facts", "expected"),
    [
        (LADDER, machine(), ["cpu llama_cpp Q4_0", "cpu onnx int8", "cpu torch bf16"]),
        (TRAINED, machine(), ["cpu onnx int8", "cpu torch bf16"]),
        (TRAINED, with_gpu(), ["gpu torch bf16", "cpu onnx int8", "cpu torch bf16"]),
        (QUANTISED, with_gpu(), ["gpu llama_cpp Q5_K_M", "cpu llama_cpp Q5_K_M"]),
    ],
)
def test_engines_come_in_the_order_in_which_they_are_tried(
    model: ModelIdentity, facts: HardwareFacts, expected: list[str]
) -> None:
    found = [engine for engine in engines(model, facts) if engine.why_not is None]
    assert [f"{engine.device} {engine.name}" for engine in found] == expected


def test_a_format_in_the_spelling_of_a_backend_prefers_that_backend() -> None:
    for weight_format, expected in (("bf16", "torch bf16"), ("BF16", "llama_cpp BF16")):
        wanted = Wanted(Policy.cpu_only, formats=(weight_format,))
        found = [one for one in engines(LADDER, machine(), wanted=wanted) if one.why_not is None]
        assert len(found) == 2 and found[0].name == expected


@pytest.mark.parametrize(
    ("model", "backends", "formats", "text"),
    [
        (
            TRAINED,
            ("llama_cpp",),
            (),
            r"a folder of safetensors in bf16, which llama_cpp cannot run on the CPU\. Engines "
            r"that can: onnx \(int8, .*torch \(bf16, .*For llama_cpp, give a GGUF file",
        ),
        (
            QUANTISED,
            (),
            ("Q4_0",),
            r"which no engine can run in Q4_0 on the CPU\. Engines that can: llama_cpp \(Q5_K_M\)",
        ),
        (
            QUANTISED,
            ("onnx", "torch"),
            (),
            "mine is a GGUF file in Q5_K_M, which onnx, torch cannot run on the CPU",
        ),
    ],
)
def test_a_refusal_names_what_would_run_it(
    model: ModelIdentity, backends: tuple[str, ...], formats: tuple[str, ...], text: str
) -> None:
    wanted = Wanted(Policy.cpu_only, backends, formats)
    (refused,) = [one for one in engines(model, machine(), wanted=wanted) if one.device == "cpu"]
    assert refused.why_not is not None and refused.why_not.cause is Cause.unsupported
    assert re.search(text, refused.why_not.text)


def test_each_obstacle_of_the_machine_is_the_reason_of_its_engine() -> None:
    no_build = (Cause.backend_missing, "this build of torch is for the CPU only")
    obstacles = Obstacles({"onnx": "its package is not installed"}, {"torch": no_build})
    found = engines(LADDER, with_gpu(), obstacles)
    reasons = {(one.device, one.backend): one.why_not and one.why_not.text for one in found}
    assert reasons == {
        ("gpu", "torch"): "Test GPU was found, but torch cannot use it: this build of torch is for "
        "the CPU only",
        ("gpu", "llama_cpp"): None,
        ("cpu", "llama_cpp"): None,
        ("cpu", "onnx"): "backend 'onnx' cannot run: its package is not installed",
        ("cpu", "torch"): None,
    }
    named = engines(LADDER, with_gpu(), wanted=Wanted(Policy.gpu_only, ("onnx",)))
    texts = [one.why_not.text for one in named if one.why_not is not None]
    on_gpus, policy = texts  # other tests may have added backends of their own
    assert on_gpus.startswith("backend 'onnx' does not run on GPUs; backends that do: fake, llama")
    assert policy == "the policy gpu-only excludes the CPU"
    with pytest.raises(BackendUnavailable, match="The backend 'nonsense' is unknown"):
        engines(LADDER, machine(), wanted=Wanted(backends=("nonsense",)))


def test_the_usual_format_of_a_model_is_that_of_its_first_engine_on_a_cpu() -> None:
    formats = [usual_format(model) for model in (LADDER, QUANTISED, TRAINED, ON_THE_HUB)]
    assert formats == ["Q4_0", "Q5_K_M", "int8", ""]
