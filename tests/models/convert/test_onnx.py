"""Conversion to ONNX: what comes out is the source's model, or nothing comes out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from models.convert.compare import distance_of
from models.convert.onnx import LIMITS, check_request, make_onnx, quantiser_target
from models.convert.onnx_int8 import without_weights
from models.errors import BrokenWeights, UnsupportedModel
from models.manifest import read_manifest, verify
from models.spec import ModelSpec
from models.synthetic.write import write_hf_folder
from tests.serving.backends.hf_folders import ONNX, hf_folder, onnx_folder
from tests.shapes import TINY, TINY_LLAMA


@pytest.mark.parametrize("name", list(ONNX))
def test_the_graph_is_compared_with_its_source_and_the_distance_kept(name: str) -> None:
    shape, precision, exporter = ONNX[name]
    folder = onnx_folder(name)
    manifest = read_manifest(folder)
    assert (
        manifest is not None
        and manifest.spec == TINY[shape]
        and manifest.weight_format == precision
        and manifest.kind == "onnx"
    )
    verify(folder, manifest, full=True)
    facts = json.loads((folder / "conversion.json").read_text())
    assert (
        facts["exporter"] == exporter
        and facts["distance"] <= facts["distance_limit"] == LIMITS[precision]
    )
    assert manifest.quality_kl_nats is None and facts["kl_nats"] >= 0  # the weights are random
    most = {"fp32": 1e-9, "int8": 2e-3, "dynamic-int8": 5e-2, "int4": 0.5}[precision]
    assert facts["kl_nats"] <= most
    assert (folder / "tokenizer.json").read_bytes() == (
        hf_folder(shape) / "tokenizer.json"
    ).read_bytes()  # not the stand-in
    assert not [
        file
        for file in folder.parent.iterdir()
        if file.name.startswith("convert-onnx-") and name in file.name
    ]


def test_only_products_with_weights_are_quantised() -> None:
    """Not queries x keys, nor positions x frequencies, which 8 bits cannot hold: the unfused graph
    has both as plain products.
    """
    import onnx

    graph = onnx.load(
        str(onnx_folder("qwen2-growing-dynamic") / "model.onnx"), load_external_data=False
    ).graph
    kinds = [node.op_type for node in graph.node]
    layers = TINY["tiny-qwen2"].layers
    assert kinds.count("MatMulInteger") == 7 * layers + 1  # the head too
    assert kinds.count("MatMul") == 2 * layers + 1 == len(without_weights(graph))
    assert "DynamicQuantizeLinear" not in kinds


def test_a_builder_that_takes_the_wrong_head_leaves_nothing_behind(tmp_path: Path) -> None:
    # onnxruntime-genai 0.15.2 takes another matrix for the head where intermediate_size equals
    # vocab_size.
    spec = ModelSpec(
        name="trap",
        family="llama",
        layers=1,
        hidden=32,
        heads=2,
        kv_heads=1,
        head_dim=16,
        intermediate=512,
        vocabulary=512,
        context=64,
        tied=False,
        rope_theta=10_000.0,
    )
    write_hf_folder(spec, tmp_path / "trap", dtype="fp32", initializer_range=0.1)
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("what was there before")
    try:
        make_onnx(tmp_path / "trap", out, "fp32", spec=spec)
    except BrokenWeights as problem:
        assert "trap" in str(problem)
        assert [file.name for file in out.iterdir()] == ["old"]
    else:  # a later builder does it right
        assert json.loads((out / "conversion.json").read_text())["distance"] <= LIMITS["fp32"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "trap"]


@pytest.mark.parametrize(
    ("precision", "exporter", "words"),
    [
        ("int3", "genai", "'int3'.*int8"),
        ("int4", "optimum", "optimum makes no precision 'int4'"),
        ("fp32", "keras", "'keras'"),
    ],
)
def test_requests_that_no_exporter_can_do_are_refused(
    precision: str, exporter: str, words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        check_request(precision, exporter)


def test_a_folder_that_is_not_what_it_is_taken_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenWeights, match="vocabulary 704 and not 640"):
        make_onnx(hf_folder("tiny-qwen2"), tmp_path / "out", "fp32", spec=TINY_LLAMA)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_bytes(
        (hf_folder("tiny-llama") / "config.json").read_bytes()
    )
    with pytest.raises(BrokenWeights, match="safetensors"):
        make_onnx(tmp_path / "empty", tmp_path / "out", "fp32")
    assert not (tmp_path / "out").exists()


def test_the_distance_of_logits_has_known_values() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((3, 5, 200)).astype(np.float32)
    same = distance_of(logits, logits)
    assert (
        same.distance == 0
        and same.kl_nats == pytest.approx(0, abs=1e-12)
        and same.agreement == 1
        and same.positions == 15
    )
    shifted = distance_of(logits, logits + 7)  # a constant changes logits, and no probability
    assert shifted.kl_nats == pytest.approx(0, abs=1e-9)
    unrelated = distance_of(logits, random.standard_normal(logits.shape).astype(np.float32))
    assert unrelated.distance == pytest.approx(2**0.5, rel=0.05)
    flat = np.zeros((1, 4), np.float32)
    assert distance_of(flat, flat).distance == 0 and distance_of(flat, flat + 1).distance == float(
        "inf"
    )
    two = distance_of(
        np.log(np.array([[0.5, 0.5]], np.float32)), np.log(np.array([[0.9, 0.1]], np.float32))
    )
    assert two.kl_nats == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1), rel=1e-6)


def test_dynamic_quantisation_is_made_for_this_cpu() -> None:
    assert quantiser_target() in ("avx512", "avx512_vnni", "arm64")
    facts = json.loads((onnx_folder("llama3-dynamic") / "conversion.json").read_text())
    assert (
        facts["quantiser_target"] == quantiser_target()
        and facts["activation_scales"] == "per token"
    )
