"""Packed and widened weights of the torch backend, and its tables of positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.convert.torch import int4_groups, int8_rows, make_torch, rounded_tokens, unpacked
from models.manifest import read_manifest
from serving.backends.torch.forward_pass import rope_tables
from serving.backends.torch.torch_weights import WIDEN_ELEMENTS, Widened, dynamic_int8
from serving.errors import Unsupported
from tests.serving.backends.backend_contract import (
    check_contract,
)
from tests.serving.backends.backend_steps import greedy_alone, near_tie
from tests.serving.backends.hf_folders import hf_folder
from tests.serving.backends.torch.engines import Make
from tests.shapes import TINY


@pytest.mark.parametrize("precision", ["int8", "dynamic-int8", "int4"])
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen2"])
def test_packed_weights_give_the_same_tokens_alone_and_batched(
    make: Make, tmp_path: Path, shape: str, precision: str
) -> None:
    folder = make_torch(hf_folder(shape), tmp_path / "packed", precision, spec=TINY[shape])
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.quality_kl_nats is not None
    assert (
        0 < manifest.quality_kl_nats < {"int8": 2e-3, "dynamic-int8": 2e-2, "int4": 0.5}[precision]
    )
    backend, alone, judge = make(folder), make(folder, slots=1), make(folder, slots=1)
    assert backend.info.weight_format == precision
    check_contract(backend, greedy_alone(alone), tie=near_tie(judge, 0.3))
    predicted, measured = backend.info.predicted, backend.info.measured
    assert predicted is not None and measured is not None
    assert predicted.weight_bytes == pytest.approx(measured.weight_bytes, rel=0.05)
    with pytest.raises(Unsupported, match="packed beforehand"):
        make(folder, weight_format="bf16")


def test_dynamic_int8_is_exactly_the_rounded_product_in_any_company() -> None:
    generator = torch.Generator().manual_seed(7)
    weight, bias = torch.randn(48, 96, generator=generator), torch.randn(48, generator=generator)
    # a row of largest weights: pairs of products are as large as they can be, and must not overflow
    weight[5] = 3.0
    values, scale = int8_rows(weight)
    x = (
        torch.randn(9, 96, generator=generator) * torch.logspace(-3, 3, 9)[:, None]
    )  # tokens of very different size
    x[4] = x[4].abs().amax()
    x[8] = 0.0
    matrix = dynamic_int8(values, scale, bias)
    together = matrix(x)
    exact = torch.nn.functional.linear(
        rounded_tokens(x).double(),
        unpacked("m", {"m.int8": values, "m.scale": scale}).double(),
        bias.double(),
    )
    torch.testing.assert_close(
        together.double(), exact, rtol=2e-6, atol=2e-5 * float(exact.abs().max()) / 1000
    )
    for one in range(9):
        assert torch.equal(matrix(x[one : one + 1])[0], together[one])
    assert matrix.resident_bytes == 48 * (96 + 12)


def test_packing_rounds_to_the_nearest_step() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    values, scale = int8_rows(weight)
    assert (
        unpacked("m", {"m.int8": values, "m.scale": scale}) - weight
    ).abs().max() <= scale.max() / 2 * 1.001
    nibbles, scales = int4_groups(weight)
    assert nibbles.shape == (6, 32) and nibbles.dtype == torch.uint8 and scales.shape == (6, 2)
    error = (
        (unpacked("m", {"m.int4": nibbles, "m.scale": scales}) - weight)
        .abs()
        .unflatten(1, (-1, 32))
        .amax(2)
    )
    assert (error <= scales / 2 * 1.001).all()


def test_widened_bfloat16_is_the_float32_product_of_the_same_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(5000, 600, generator=generator).bfloat16()  # more than one block
    assert weight.numel() > WIDEN_ELEMENTS
    bias = torch.randn(5000, generator=generator)
    linear = Widened(weight, torch.empty(WIDEN_ELEMENTS), bias)
    for count in (1, 2, 3, 9):
        x = torch.randn(count, 600, generator=generator)
        torch.testing.assert_close(
            linear(x), x @ weight.float().T + bias, rtol=2e-2, atol=0.5 if count <= 2 else 1e-3
        )


def test_rope_tables_are_those_of_transformers() -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for shape in ("tiny-llama", "tiny-llama3"):
        rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(hf_folder(shape)))
        cos, sin = rotary(torch.zeros(1), torch.arange(1500)[None])
        mine = rope_tables(TINY[shape], 1500)
        torch.testing.assert_close(mine[0], cos[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mine[1], sin[0], rtol=1e-6, atol=1e-6)
