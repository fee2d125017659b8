"""Graphs written tensor by tensor: the source's logits, in any company, in a format's error."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from crossover.models.errors import BrokenWeights, UnsupportedModel
from crossover.models.identity.resolve_model import resolve
from crossover.models.machine_limits import int8_bits
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.convert_to_onnx import make_onnx, make_random_onnx
from crossover.models.weights.random_weights import write_hf_folder
from crossover.models.weights.rotated_weights import RotatedRows, rotated
from crossover.models.weights.safetensors_reader import stored_rows
from crossover.models.weights.weights_manifest import read_manifest
from tests.graph_logits import divergence, graph_logits
from tests.serving.backends.hf_folders import hf_folder, logprobs_of, onnx_folder, onnx_source
from tests.shapes import TINY, TINY_LLAMA, TINY_LLAMA3

FAMILIES = sorted(TINY)
IDS = np.random.default_rng(20).integers(3, 600, (2, 20))


def compared(folder: Path, source: Path, spec: ModelSpec) -> float:
    """Of log-probabilities: they are logits less a constant."""
    reference = np.stack([logprobs_of(source, [int(one) for one in row]) for row in IDS])
    logits = graph_logits(folder / "model.onnx", IDS, spec)
    return divergence(reference, logits)


def unmarked(shape: str, out: Path) -> Path:
    """A folder from somebody else: nothing says that its weights are random, so they are
    rotated."""
    shutil.copytree(hf_folder(shape), out)
    (out / "crossover.json").unlink()
    return out


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize(("weight_format", "most"), [("fp32", 1e-9), ("int8", 8e-3), ("int4", 0.5)])
def test_the_logits_are_those_of_transformers(
    shape: str, weight_format: str, most: float, tmp_path: Path
) -> None:
    if weight_format == "int8" and int8_bits() == 7:
        most *= 2  # half the steps between weights
    folder = make_onnx(unmarked(shape, tmp_path / "source"), tmp_path / "out", weight_format)
    assert compared(folder, hf_folder(shape), TINY[shape]) <= most
    manifest = read_manifest(folder)
    assert manifest is not None and (manifest.kind, manifest.seed) == ("onnx", None)
    assert manifest.weight_format == weight_format
    tokenizer = (folder / "tokenizer.json").read_bytes()
    assert tokenizer == (hf_folder(shape) / "tokenizer.json").read_bytes()


def test_without_vnni_int8_weights_have_seven_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, divergences = {}, {}
    for flags, bits in (({"avx512_vnni"}, 8), ({"avx2"}, 7)):
        with monkeypatch.context() as context:
            context.setattr(
                "crossover.models.machine_limits.cpu_flags", lambda flags=flags: frozenset(flags)
            )
            folder = make_onnx(hf_folder("tiny-llama"), tmp_path / str(bits), "int8")
        manifest = read_manifest(folder)
        assert manifest is not None and f"{bits} bits" in manifest.generator
        import onnx

        graph = onnx.load(str(folder / "model.onnx")).graph
        name = "model.layers.0.mlp.down_proj.weight"
        (weight,) = (one for one in graph.initializer if one.name == name)
        found[bits] = int(np.abs(onnx.numpy_helper.to_array(weight).astype(int)).max())
        divergences[bits] = compared(folder, hf_folder("tiny-llama"), TINY_LLAMA)
    assert found == {8: 127, 7: 64}
    assert divergences[7] < 2e-2
    if int8_bits() == 8:
        assert divergences[8] < divergences[7]
    else:  # products of eight bits saturate on this CPU
        assert divergences[8] > 5 * divergences[7]


def test_a_rotated_model_is_the_same_function_without_channels_that_stick_out(
    tmp_path: Path,
) -> None:
    """Where a channel is a hundred times the others, 8 bits a token lose the rest."""
    from safetensors.torch import load_file, save_file

    source = unmarked("tiny-mistral", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 7] *= 100
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    spec = TINY["tiny-mistral"]
    plain = stored_rows(source, spec)
    even = RotatedRows(spec, plain, source)
    rows = plain("model.embed_tokens.weight", 0, 20)
    moved = even("model.embed_tokens.weight", 0, 20)
    assert np.allclose(np.linalg.norm(rows, axis=1), np.linalg.norm(moved, axis=1), rtol=1e-5)
    assert np.abs(moved).max(1).mean() < np.abs(rows).max(1).mean() / 3
    basis = rotated(np.eye(64, dtype=np.float32))
    assert np.allclose(basis @ basis.T, np.eye(64), atol=1e-5)
    folder = make_onnx(source, tmp_path / "out", "int8")
    shutil.copy(
        hf_folder("tiny-mistral") / "crossover.json", source
    )  # taken for random: not rotated
    untouched = make_onnx(source, tmp_path / "untouched", "int8")
    better, worse = (compared(one, source, spec) for one in (folder, untouched))
    assert better < worse / 2


def test_random_weights_of_a_rung_need_no_float_model(tmp_path: Path) -> None:
    first = make_random_onnx(TINY_LLAMA3, tmp_path / "first", "int8")
    second = make_random_onnx(TINY_LLAMA3, tmp_path / "second", "int8")
    data = [(one / "model.onnx.data").read_bytes() for one in (first, second)]
    assert data[0] == data[1]
    manifest = read_manifest(first)
    assert manifest is not None and (manifest.seed, manifest.source) == (0, "synthetic")
    written = onnx_folder("llama3-int8")
    assert (first / "model.onnx").stat().st_size == (written / "model.onnx").stat().st_size
    logits = graph_logits(first / "model.onnx", IDS, TINY_LLAMA3)
    assert 1.5 < logits.std() < 6 and len(set(logits[0].argmax(-1).tolist())) > 10


@pytest.mark.slow
def test_optimum_exports_what_the_writer_does_not_know(tmp_path: Path) -> None:
    folder, source = onnx_folder("gpt2-growing-int8"), onnx_source("gpt2-growing-int8")
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.spec.family == "gpt2"
    assert manifest.spec.heads == 4 and manifest.weight_format == "int8"
    reference = np.stack([logprobs_of(source, [int(one) for one in row]) for row in IDS])
    logits = graph_logits(folder / "model.onnx", IDS, manifest.spec)
    assert divergence(reference, logits) < 0.05
    found = resolve(str(source), kind="onnx", weight_format="fp32", cache=tmp_path)
    assert Path(found.path, "model.onnx").is_file() and found.spec.context == 256
    with pytest.raises(UnsupportedModel, match="architecture 'gpt2'.* not to int4"):
        make_onnx(source, tmp_path / "out", "int4")


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenWeights, match=r"shape \(704, 64\), but config.json says \(640, 64\)"):
        make_onnx(hf_folder("tiny-qwen2"), tmp_path / "out", "fp32", spec=TINY_LLAMA)
    odd = TINY_LLAMA.__replace__(hidden=48, heads=3, kv_heads=1, head_dim=16)
    write_hf_folder(odd, tmp_path / "odd", dtype="fp32")
    with pytest.raises(UnsupportedModel, match="48 elements, which is not a multiple of 32"):
        make_onnx(tmp_path / "odd", tmp_path / "out", "int4")
    broken = unmarked("tiny-llama", tmp_path / "broken")
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[:-4] + b"\xff\xff\xff\x7f")
    with pytest.raises(BrokenWeights, match="NaN or infinity"):
        make_onnx(broken, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()
