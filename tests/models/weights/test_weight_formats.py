"""The table of tensor types against the quantiser it imitates, the ladder against model cards."""

from pathlib import Path

import msgspec
import pytest

from crossover.models.errors import UnknownModel, UnsupportedModel
from crossover.models.gguf.reader import read_header
from crossover.models.identity.model_ladder import PUBLISHED, ladder_model
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.random_weights import write_gguf
from crossover.models.weights.weight_formats import gguf_tensors, weight_bytes
from tests.gguf_files import quantise
from tests.shapes import TINY_LLAMA, TINY_QWEN2


def shape(name: str, sizes: str, base: ModelSpec = TINY_LLAMA, tied: bool = False) -> ModelSpec:
    """`sizes`: layers, hidden, heads, kv_heads, head_dim, intermediate."""
    keys = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")
    numbers = dict(zip(keys, map(int, sizes.split()), strict=True))
    return msgspec.structs.replace(base, name=name, vocabulary=640, tied=tied, **numbers)


# Row lengths of the ladder's narrow ladder models, an odd number of layers, the 80 layers that mark
# a 70B, a width no block divides.
SHAPES = [
    shape("narrow", "10 576 9 3 64 1536", tied=True),
    shape("wide", "17 256 4 2 64 512"),
    shape("qwen", "3 896 14 2 64 768", TINY_QWEN2, tied=True),
    shape("80-layers", "80 256 8 1 32 256"),
    shape("odd", "3 48 4 2 12 80"),
]


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            spec,
            id=spec.name,
            marks=[pytest.mark.slow] if spec.name in ("wide", "80-layers") else [],
        )
        for spec in SHAPES
    ],
)
def test_types_are_those_that_llama_cpp_would_choose(spec: ModelSpec, tmp_path: Path) -> None:
    write_gguf(spec, tmp_path / "float.gguf", "F32")
    for weight_format in ("Q4_K_M",) if spec.layers == 80 else ("F16", "Q8_0", "Q4_0", "Q4_K_M"):
        quantise(tmp_path / "float.gguf", tmp_path / "quantised.gguf", weight_format)
        found = read_header(tmp_path / "quantised.gguf").tensors
        assert {name: entry.tensor_type.name for name, entry in found.items()} == {
            t.name: t.type for t in gguf_tensors(spec, weight_format)
        }
        assert sum(entry.n_bytes for entry in found.values()) == weight_bytes(spec, weight_format)


def test_sizes_are_those_of_published_files() -> None:
    # Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf as published: 4,920,7xx,xxx bytes, about 8 MB of them
    # tokenizer.
    assert weight_bytes(ladder_model("8b").spec, "Q4_K_M") == pytest.approx(4_912_900_000, rel=1e-3)
    assert weight_bytes(ladder_model("3b").spec, "Q8_0") == pytest.approx(3_413_400_000, rel=1e-3)
    with pytest.raises(UnsupportedModel, match="IQ1.*Q4_K_M"):
        gguf_tensors(TINY_LLAMA, "IQ1")


def test_the_ladder_has_the_published_numbers_of_parameters() -> None:
    counts = {one.spec.name: one.spec.parameters for one in PUBLISHED}
    assert counts == {one.spec.name: one.published_parameters for one in PUBLISHED}
    dense = [one.spec.parameters for one in PUBLISHED if one.shape is None]
    assert dense == sorted(dense)
    names = [name for one in PUBLISHED for name in (one.spec.name, *one.aliases)]
    assert len(names) == len(set(names)) and ladder_model("8B") == ladder_model("llama-3.1-8b")
    with pytest.raises(
        UnknownModel, match=r"'9b' is not a ladder.*smollm2-135m or 135m.*or 70b, qwen3-30"
    ):
        ladder_model("9b")
