from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from crossover.models.gguf.reader import read_header
from crossover.models.gguf.shapes import GgufShape, Sizes
from crossover.models.identity.model_ladder import PUBLISHED, ladder_model
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.random_weights import (
    RandomWeights,
    write_gguf,
    write_gguf_shape,
    write_hf_folder,
)
from crossover.models.weights.safetensors_reader import EMBEDDING, check_tensors
from crossover.models.weights.weight_formats import GGUF_FORMATS, gguf_tensors
from tests.gguf_files import gguf_logits
from tests.shapes import TINY, TINY_LLAMA

ALL = list(TINY.values())
SHAPES: dict[str, GgufShape] = {
    model.spec.name: model.shape for model in PUBLISHED if model.shape is not None
}


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_llama_cpp_runs_every_format_with_useful_logits(spec: ModelSpec, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(3, spec.vocabulary, (2, 24))
    for weight_format in GGUF_FORMATS:
        file = tmp_path / f"{weight_format}.gguf"
        write_gguf(spec, file, weight_format)
        logits = gguf_logits(file, ids)
        assert logits.shape == (2, 24, spec.vocabulary)
        assert np.isfinite(logits).all()
        # Near 3, as it was made: neither flat (every engine would draw another token) nor one token
        # for ever.
        assert 2.0 < logits.std() < 4.5
        assert len(set(logits.argmax(-1).ravel().tolist())) > 12


@pytest.mark.parametrize("name", SHAPES)
def test_llama_cpp_runs_each_shape_of_mixtures_hybrids_and_windows(
    name: str, tmp_path: Path
) -> None:
    """The published shape with tiny sizes: the same tensors, types and metadata for each layer."""
    shape = SHAPES[name]
    sizes = shape.sizes
    period = sizes.global_period
    tiny = Sizes(
        layers=2 * period,
        experts=min(sizes.experts, 8),
        expert_type=sizes.expert_type,
        global_period=period,
        global_kv_heads=min(sizes.global_kv_heads, 1),
        shared_kv_layers=period if sizes.shared_kv_layers else 0,
        tied=sizes.tied,
    )
    files = []
    for number in range(2):
        file = tmp_path / f"{number}.gguf"
        spec = ladder_model(name).spec
        write_gguf_shape(replace(shape, sizes=tiny), spec, file, shape.formats[0])
        files.append(file.read_bytes())
    assert files[0] == files[1]
    assert read_header(file).spec(name).family == spec.family
    ids = np.random.default_rng(1).integers(3, 600, (1, 24))
    logits = gguf_logits(file, ids)
    assert np.isfinite(logits).all() and 2.0 < logits.std() < 4.5
    assert len(set(logits.argmax(-1).ravel().tolist())) > 12
    assert (logits.argmax(-1) == ids).mean() < 0.5, "it repeats its last token"


def test_the_header_describes_the_requested_shape(tmp_path: Path) -> None:
    sizes = "layers hidden heads kv_heads head_dim intermediate vocabulary context tied".split()
    for spec in ALL:
        write_gguf(spec, tmp_path / "x.gguf", "Q4_K_M")
        header = read_header(tmp_path / "x.gguf")
        found = header.spec("x")
        assert header.weight_format == "Q4_K_M"
        assert [getattr(found, one) for one in sizes] == [getattr(spec, one) for one in sizes]
        factors = spec.head_dim // 2 if spec.rope_scaling else 0
        assert found.parameters == spec.parameters + factors


def test_no_two_rows_of_an_embedding_are_alike() -> None:
    """Twins would tie at every argmax, and engines break ties differently.

    The largest vocabulary wraps around its pool of blocks.
    """
    spec = msgspec.structs.replace(ladder_model("0.5b").spec, layers=1, intermediate=64)
    kinds = {tensor.hf_name: tensor.type for tensor in gguf_tensors(spec, "Q4_0")}
    stored = b"".join(RandomWeights(spec, seed=0).stream(EMBEDDING, kinds[EMBEDDING]))
    rows = np.frombuffer(stored, np.uint8).reshape(spec.vocabulary, -1)
    assert len({hash(row.tobytes()) for row in rows}) == spec.vocabulary


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    files, folders = [], []
    for seed in (0, 0, 1):
        write_gguf(TINY_LLAMA, tmp_path / "x.gguf", seed=seed)
        files.append((tmp_path / "x.gguf").read_bytes())
        write_hf_folder(TINY_LLAMA, tmp_path / "x", seed=seed)
        folders.append((tmp_path / "x" / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]
    assert folders[0] == folders[1] != folders[2]


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_transformers_loads_the_folder_whole(spec: ModelSpec, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    write_hf_folder(spec, tmp_path / "x", "fp32")
    assert check_tensors(tmp_path / "x", spec) == "fp32"
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "x", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values())
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.parameters
    assert not model.model.norm.weight.eq(1).all()
    with torch.inference_mode():
        assert torch.isfinite(model(torch.arange(3, 40)[None]).logits).all()
