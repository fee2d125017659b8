"""Which engines can run a model: one table for `serve`, campaigns and plans."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from crossover.models.identity.identify_model import Kind, ModelIdentity, identify
from crossover.serving.backends.model_engines import engines_on, refusal, usual_engines
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
    ("model", "backend", "formats", "engines"),
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
    model: ModelIdentity, backend: str, formats: Sequence[str], engines: list[str]
) -> None:
    assert engines_on(model, backend, formats) == [(backend, one) for one in engines]


def test_all_engines_of_a_folder_are_compared_and_one_of_a_file() -> None:
    assert [one.name for one in usual_engines(TRAINED)] == ["onnx int8", "torch bf16"]
    assert [one.name for one in usual_engines(QUANTISED)] == ["llama_cpp Q5_K_M"]


@pytest.mark.parametrize(
    ("model", "backends", "formats", "said"),
    [
        (TRAINED, ["llama_cpp"], [], r"a folder of safetensors in bf16, .* can: onnx \(int8, "),
        (QUANTISED, None, ["Q4_0"], r"formats = Q4_0 cannot run. Engines that can: llama_cpp"),
        (QUANTISED, ["onnx", "torch"], [], "mine is a GGUF file in Q5_K_M, which backends = onnx"),
    ],
)
def test_a_refusal_names_what_would_run_it(
    model: ModelIdentity, backends: list[str] | None, formats: Sequence[str], said: str
) -> None:
    assert re.search(said, refusal(model, backends, formats))
