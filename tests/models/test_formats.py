"""The table of tensor types against the quantiser it imitates."""

from pathlib import Path

import msgspec
import pytest

from models.convert_to_gguf import quantise
from models.errors import UnsupportedModel
from models.formats import GGUF_FORMATS, gguf_name, gguf_tensors, weight_bytes
from models.gguf_reader import read_header
from models.ladder import rung
from models.random_weights import write_gguf
from models.spec import ModelSpec
from tests.shapes import TINY_LLAMA, TINY_QWEN2

# Row lengths of the ladder's narrow rungs, an odd number of layers, the 80 layers that mark a 70B,
# a width no block divides.
SMALL = msgspec.structs.replace(TINY_LLAMA, vocabulary=512)
reshaped = msgspec.structs.replace
SHAPES = [
    reshaped(
        SMALL,
        name="narrow",
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        layers=10,
    ),
    reshaped(
        SMALL,
        name="wide",
        hidden=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=512,
        layers=17,
        tied=False,
    ),
    reshaped(
        TINY_QWEN2,
        name="qwen",
        hidden=896,
        heads=14,
        kv_heads=2,
        head_dim=64,
        intermediate=768,
        layers=3,
        tied=True,
    ),
    reshaped(
        SMALL,
        name="80-layers",
        hidden=256,
        heads=8,
        kv_heads=1,
        head_dim=32,
        intermediate=256,
        layers=80,
        tied=False,
    ),
    reshaped(
        SMALL,
        name="odd",
        hidden=48,
        heads=4,
        kv_heads=2,
        head_dim=12,
        intermediate=80,
        layers=3,
        tied=False,
    ),
]


@pytest.mark.parametrize("spec", SHAPES, ids=lambda spec: spec.name)
def test_types_are_those_that_llama_cpp_would_choose(spec: ModelSpec, tmp_path: Path) -> None:
    write_gguf(spec, tmp_path / "float.gguf", "F32")
    for weight_format in ("Q4_K_M",) if spec.layers == 80 else ("F16", "Q8_0", "Q4_0", "Q4_K_M"):
        quantise(tmp_path / "float.gguf", tmp_path / "quantised.gguf", weight_format)
        found = read_header(tmp_path / "quantised.gguf").tensors
        assert {name: entry.type for name, entry in found.items()} == {
            t.name: t.type for t in gguf_tensors(spec, weight_format)
        }
        assert sum(entry.bytes for entry in found.values()) == weight_bytes(spec, weight_format)


def test_sizes_are_those_of_published_files() -> None:
    # Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf as published: 4,920,7xx,xxx bytes, about 8 MB of them
    # tokenizer.
    assert weight_bytes(rung("8b").spec, "Q4_K_M") == pytest.approx(4_912_900_000, rel=1e-3)
    assert weight_bytes(rung("3b").spec, "Q8_0") == pytest.approx(3_413_400_000, rel=1e-3)


def test_every_format_weighs_every_tensor() -> None:
    for weight_format in GGUF_FORMATS:
        assert (
            sum(t.elements for t in gguf_tensors(TINY_QWEN2, weight_format))
            == TINY_QWEN2.parameters
        )


def test_gguf_names() -> None:
    assert gguf_name("model.layers.12.self_attn.q_proj.bias") == "blk.12.attn_q.bias"
    assert gguf_name("lm_head.weight") == "output.weight"


def test_unknown_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="IQ1"):
        gguf_tensors(TINY_LLAMA, "IQ1")
    with pytest.raises(UnsupportedModel, match="IQ1.*Q4_K_M"):
        write_gguf(TINY_LLAMA, tmp_path / "x.gguf", "IQ1")
