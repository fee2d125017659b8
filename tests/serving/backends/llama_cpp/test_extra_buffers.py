"""Matrices in AMX's buffer and in that of repacked ones: what they take, said before the load."""

from pathlib import Path

import msgspec
import pytest

from models.formats import weight_bytes
from models.random_weights import write_gguf
from models.spec import ModelSpec
from serving.backends.llama_cpp.extra_buffers import extra_bytes
from tests.serving.backends.llama_cpp.engines import Make

WIDE = ModelSpec(
    name="wide",
    family="llama",
    layers=2,
    hidden=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1408,
    vocabulary=4096,
    context=2048,
    tied=True,
    rope_theta=10_000.0,
)
AVX = frozenset({"avx2", "avx512f", "avx512_vnni"})
WITH_AMX = AVX | {"amx_int8"}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("weight_format", ["BF16", "F16", "Q8_0", "Q4_0", "Q4_K_M"])
def test_weights_are_predicted_on_this_cpu_to_half_a_percent(
    make: Make, tmp_path: Path, weight_format: str, is_tied: bool
) -> None:
    path = tmp_path / "wide.gguf"
    write_gguf(msgspec.structs.replace(WIDE, tied=is_tied), path, weight_format)
    info = make(model_path=path).info
    assert info.predicted is not None and info.measured is not None
    assert info.predicted.weight_bytes == pytest.approx(info.measured.weight_bytes, rel=0.005)


# What llama.cpp said that it held, of a model of 6 such layers and 8192 tokens: one build of it
# with AMX and one without, on the same CPU.
@pytest.mark.parametrize(
    ("weight_format", "is_tied", "with_amx", "without"),
    [
        ("BF16", True, 43_809_505, 43_809_505),
        ("F16", True, 52_198_113, 43_809_505),
        ("F16", False, 52_198_113, 52_198_113),
        ("Q4_0", True, 16_861_102, 13_421_773),
        ("Q4_0", False, 15_781_069, 15_781_069),
    ],
)
def test_what_was_measured_on_both_kinds_of_cpu_is_planned(
    weight_format: str, is_tied: bool, with_amx: int, without: int
) -> None:
    spec = msgspec.structs.replace(WIDE, layers=6, vocabulary=8192, tied=is_tied)
    for isa, measured in ((WITH_AMX, with_amx), (AVX, without)):
        planned = weight_bytes(spec, weight_format) + extra_bytes(spec, weight_format, isa)
        assert planned == pytest.approx(measured, rel=0.001)
