"""docs/adding-a-model-family.md, followed to the letter: a dense family, a mixture of experts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossover.models.errors import UnsupportedModel
from crossover.models.gguf import shapes
from crossover.models.identity.model_ladder import PUBLISHED, shape_models
from crossover.models.shape.hf_config import read_config, read_spec, spec_of_config
from crossover.models.shape.model_families import FAMILIES, ModelFamily
from crossover.models.shape.model_spec import ModelSpec, Routing
from crossover.models.weights.convert_to_onnx import make_onnx
from crossover.models.weights.random_weights import write_gguf_shape, write_hf_folder
from crossover.models.weights.weight_formats import gguf_tensors
from tests.gguf_files import gguf_logits
from tests.graph_logits import divergence, graph_logits
from tests.serving.backends.hf_folders import logprobs_of

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-model-family.md"
IDS = np.random.default_rng(20).integers(3, 600, (1, 12))


def blocks(language: str) -> list[str]:
    """The blocks of the page in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """The shape of the page's second block, with the record of its first among the families."""
    record, shape, *_ = blocks("python")
    names: dict[str, Any] = {"ModelFamily": ModelFamily, "ModelSpec": ModelSpec}
    for name, family in eval(f"{{{record}}}", names).items():
        assert name not in FAMILIES
        monkeypatch.setitem(FAMILIES, name, family)
    exec(shape, names)
    (spec,) = [value for value in names.values() if isinstance(value, ModelSpec)]
    return spec


def test_a_record_and_a_shape_give_the_logits_of_transformers(
    shape: ModelSpec, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    write_hf_folder(shape, source, dtype="fp32")
    assert read_spec(source, shape.name) == shape
    graph = make_onnx(source, tmp_path / "onnx", "fp32") / "model.onnx"
    reference = np.stack([logprobs_of(source, [int(one) for one in row]) for row in IDS])
    assert divergence(reference, graph_logits(graph, IDS, shape)) <= 1e-9
    names = {tensor.name for tensor in gguf_tensors(shape, "Q8_0")}
    assert {"blk.0.attn_q.bias", "blk.1.post_attention_norm.weight"} <= names


def test_values_of_the_record_are_accepted_only_of_this_family(
    shape: ModelSpec, tmp_path: Path
) -> None:
    write_hf_folder(shape, tmp_path / "source", dtype="fp32")
    config = read_config(tmp_path / "source") | {"attention_bias": True}
    assert spec_of_config(config, shape.name) == shape
    with pytest.raises(UnsupportedModel, match="attention_bias"):
        spec_of_config(config | {"model_type": "llama"}, "m")
    with pytest.raises(UnsupportedModel, match="attention_out_bias"):
        spec_of_config(config | {"attention_out_bias": True}, "m")


def test_a_family_and_a_table_give_a_ladder_model_that_llama_cpp_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, layer, row = blocks("python")
    names = dict(vars(shapes))
    exec(layer, names)
    (family,) = eval(f"({row})", names)
    assert family.architecture not in shapes.FAMILIES
    monkeypatch.setitem(shapes.FAMILIES, family.architecture, family)
    (table,) = blocks("toml")
    (model,) = shape_models(table)
    assert model.spec.parameters == model.published_parameters
    assert model.spec.experts is not None and model.spec.experts.routing == Routing(64, 8)
    assert model.spec.name not in [published.spec.name for published in PUBLISHED]
    assert model.shape is not None
    file = tmp_path / "tiny.gguf"
    # As in the published model, there are as many heads of keys as of queries, and experts have the
    # width that the metadata gives an MLP.
    tiny = replace(model.shape, sizes=shapes.Sizes(kv_heads=4, inner=64, expert_inner=64))
    write_gguf_shape(tiny, tiny.spec("tiny"), file, tiny.formats[0])
    logits = gguf_logits(file, IDS)
    assert np.isfinite(logits).all() and logits.std() > 1
