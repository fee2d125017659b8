"""The forward pass of Llama, Mistral, Qwen2 and Qwen3 in float32, over weights read in blocks.

    *_, logits = forward(spec, stored_rows(folder, spec), ids)

No more of the weights is in memory than a block. It says what conversions must keep: the logits,
and what each MLP's last product reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from models.random_weights import rope_factors
from models.safetensors_reader import EMBEDDING, Floats, Rows
from models.spec import ModelSpec

Ids = npt.NDArray[np.int64]
BLOCK = 1 << 20  # floats of a matrix that are worked on at once


def rotations(spec: ModelSpec, length: int) -> tuple[Floats, Floats]:
    """Cosines and sines of each position's rotary angles, [length, head_dim / 2]."""
    frequencies = 1.0 / spec.rope_theta ** (np.arange(0, spec.head_dim, 2) / spec.head_dim)
    if spec.rope_scaling is not None:
        frequencies = frequencies / rope_factors(spec, spec.rope_scaling)
    angles = np.outer(np.arange(length), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def forward(spec: ModelSpec, rows: Rows, ids: Ids) -> Iterator[Floats]:
    """What down_proj reads in each layer, [tokens, intermediate], for ids [sequences, tokens]; then
    the logits, [sequences, tokens, vocabulary]."""
    count, length = ids.shape
    group, half = spec.heads // spec.kv_heads, spec.head_dim // 2
    cos, sin = (one[:, None] for one in rotations(spec, length))
    mask = np.triu(np.full((length, length), -np.inf, np.float32), 1)

    def product(x: Floats, name: str, outputs: int) -> Floats:
        step = max(1, BLOCK // x.shape[1])
        parts = [
            x @ rows(f"{name}.weight", first, min(outputs, first + step)).T
            for first in range(0, outputs, step)
        ]
        return np.concatenate(parts, 1)

    def norm(x: Floats, name: str) -> Floats:
        size = np.sqrt(np.mean(x**2, -1, keepdims=True) + np.float32(spec.norm_epsilon))
        normed: Floats = x / size * rows(name, 0, x.shape[-1])
        return normed

    def heads(x: Floats, path: str, part: str, number: int) -> Floats:
        y = product(x, f"{path}.{part}_proj", number * spec.head_dim)
        if spec.qkv_bias:
            y = y + rows(f"{path}.{part}_proj.bias", 0, y.shape[1])
        y = y.reshape(count, length, number, spec.head_dim)
        if part == "v":
            return y
        if spec.qk_norm:
            y = norm(y, f"{path}.{part}_norm.weight")
        a, b = y[..., :half], y[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = np.concatenate([rows(EMBEDDING, int(one), int(one) + 1) for one in ids.reshape(-1)])
    for layer in range(spec.layers):
        path = f"model.layers.{layer}"
        y, attention = norm(x, f"{path}.input_layernorm.weight"), f"{path}.self_attn"
        q = heads(y, attention, "q", spec.heads)
        q = q.reshape(count, length, spec.kv_heads, group, spec.head_dim)
        k, v = (heads(y, attention, part, spec.kv_heads) for part in ("k", "v"))
        scores = np.einsum("nqhgd,nkhd->nhgqk", q, k) * np.float32(spec.head_dim**-0.5) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        y = np.einsum("nhgqk,nkhd->nqhgd", scores, v).reshape(count * length, -1)
        x = x + product(y, f"{attention}.o_proj", spec.hidden)
        y = norm(x, f"{path}.post_attention_layernorm.weight")
        gate = product(y, f"{path}.mlp.gate_proj", spec.intermediate)
        y = gate / (1 + np.exp(-gate)) * product(y, f"{path}.mlp.up_proj", spec.intermediate)
        yield y
        x = x + product(y, f"{path}.mlp.down_proj", spec.hidden)
    logits = product(norm(x, "model.norm.weight"), "lm_head", spec.vocabulary)
    yield logits.reshape(count, length, -1)
