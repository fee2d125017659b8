"""Widened weights of the torch backend, and its tables of positions."""

from __future__ import annotations

import torch

from serving.backends.torch.forward_pass import rope_tables
from serving.backends.torch.torch_weights import WIDEN_ELEMENTS, Widened
from tests.serving.backends.hf_folders import hf_folder
from tests.shapes import TINY


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
        mine, half = rope_tables(TINY[shape], 1500), TINY[shape].head_dim // 2
        torch.testing.assert_close(mine[0], cos[0, :, :half], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mine[1], sin[0, :, :half], rtol=1e-6, atol=1e-6)
