"""Trained weights in a basis in which 8 bits hold them: the same function, another inside.

    rows = Turned(spec, rows, Path("SmolLM2-135M"))

A trained model has a few channels a hundred times as large as the others; with one scale a token
they take the 8 bits of an activation for themselves. Two changes of basis leave the function and
the graph as they are:

  - A root mean square does not change when a vector is turned. With the weights of each norm moved
    into the matrices behind it, all that reads the hidden state is multiplied by an orthogonal
    matrix (which mixes all channels alike) on its inputs, all that writes it on its outputs.
  - Channel j of an MLP is divided by s_j in up_proj and multiplied by it in down_proj: by its size
    in a forward pass over a text in float32, and by its weights in down_proj.

SmolLM2-135M-Instruct, KL to float32: see docs/benchmarks.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.fft

from crossover.models.model_spec import ModelSpec
from crossover.models.random_weights import rope_factors
from crossover.models.safetensors_reader import EMBEDDING, HEAD, Floats, Rows
from crossover.models.tokenizer import DATA, load_tokenizer

BLOCK = 1 << 20  # floats of a matrix that are worked on at once

EXPONENT = 0.6  # of an MLP channel's size in s; the rest is the weights'
_NORMS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "input_layernorm"),
    **dict.fromkeys(("gate_proj", "up_proj"), "post_attention_layernorm"),
}


def rotations(spec: ModelSpec, length: int) -> tuple[Floats, Floats]:
    """Cosines and sines of each position's rotary angles, [length, head_dim / 2]."""
    frequencies = 1.0 / spec.rope_theta ** (np.arange(0, spec.head_dim, 2) / spec.head_dim)
    if spec.rope_scaling is not None:
        frequencies = frequencies / rope_factors(spec, spec.rope_scaling)
    angles = np.outer(np.arange(length), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def calibration_ids(source: Path, spec: ModelSpec) -> list[int]:
    """Text that is read once: 8 bits are spent where it needs them. [] without a tokenizer of the
    model's."""
    if not (source / "tokenizer.json").is_file():
        return []
    text = (DATA / "calibration.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(source).encode(text)[: spec.context]
    return ids if max(ids, default=0) < spec.vocabulary else []


def mlp_inputs(spec: ModelSpec, rows: Rows, ids: list[int]) -> Iterator[Floats]:
    """Yield what down_proj reads in each layer, [tokens, intermediate]; of the weights no more than
    a block is in memory."""
    length, half = len(ids), spec.head_dim // 2
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
        y = y.reshape(length, number, spec.head_dim)
        if part == "v":
            return y
        if spec.qk_norm:
            y = norm(y, f"{path}.{part}_norm.weight")
        a, b = y[..., :half], y[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = np.concatenate([rows(EMBEDDING, one, one + 1) for one in ids])
    for layer in range(spec.layers):
        path = f"model.layers.{layer}"
        y, attention = norm(x, f"{path}.input_layernorm.weight"), f"{path}.self_attn"
        q = heads(y, attention, "q", spec.heads)
        q = q.reshape(length, spec.kv_heads, -1, spec.head_dim)
        k, v = (heads(y, attention, part, spec.kv_heads) for part in ("k", "v"))
        scores = np.einsum("qhgd,khd->hgqk", q, k) * np.float32(spec.head_dim**-0.5) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        y = np.einsum("hgqk,khd->qhgd", scores, v).reshape(length, -1)
        x = x + product(y, f"{attention}.o_proj", spec.hidden)
        y = norm(x, f"{path}.post_attention_layernorm.weight")
        gate = product(y, f"{path}.mlp.gate_proj", spec.intermediate)
        y = gate / (1 + np.exp(-gate)) * product(y, f"{path}.mlp.up_proj", spec.intermediate)
        yield y
        x = x + product(y, f"{path}.mlp.down_proj", spec.hidden)


def turned(values: Floats) -> Floats:
    """[rows, size] times an orthogonal matrix that mixes all columns alike: signs, then cosines."""
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), values.shape[1])
    mixed: Floats = scipy.fft.dct(values * signs, norm="ortho")
    return mixed


class Turned:
    """The rows of the same model in such a basis: crossover.models.safetensors_reader.Rows.

    `source`: the folder whose tokenizer gives the tokens to even the MLPs' channels by.
    """

    def __init__(self, spec: ModelSpec, rows: Rows, source: Path) -> None:
        self._spec, self._rows = spec, rows
        self._lock = threading.Lock()
        self._written: tuple[str, Floats] = ("", np.empty((0, 0), np.float32))
        self._even = np.ones((spec.layers, spec.intermediate), np.float32)
        if ids := calibration_ids(source, spec):
            for layer, x in enumerate(mlp_inputs(spec, rows, ids)):
                down = rows(f"model.layers.{layer}.mlp.down_proj.weight", 0, spec.hidden)
                self._even[layer] = even_channels(x, down)

    def __call__(self, name: str, first: int, last: int) -> Floats:
        path = name.split(".")
        part = path[-2]
        if part == "norm" or part.endswith("layernorm"):
            return np.ones(last - first, np.float32)
        if part in ("o_proj", "down_proj"):  # turned column by column: as a whole
            with self._lock:
                if self._written[0] != name:
                    self._written = (name, self._turned_outputs(name))
                return self._written[1][first:last]
        values = self._rows(name, first, last)
        if values.ndim == 1:  # biases, norms of heads
            return values
        if name != EMBEDDING:
            norm = "model.norm" if name == HEAD else f"{'.'.join(path[:3])}.{_NORMS[part]}"
            values = values * self._rows(f"{norm}.weight", 0, self._spec.hidden)
        if part == "up_proj":
            values /= self._even[int(path[2]), first:last, None]
        return turned(values)

    def _turned_outputs(self, name: str) -> Floats:
        """Return a matrix that writes the hidden state, [hidden, inputs]."""
        whole = self._rows(name, 0, self._spec.hidden)
        if name.endswith("down_proj.weight"):
            whole *= self._even[int(name.split(".")[2])]
        for at in range(0, whole.shape[1], 256):
            whole[:, at : at + 256] = turned(whole[:, at : at + 256].T).T
        return whole


def even_channels(x: Floats, weight: Floats) -> Floats:
    """s [inputs] by which x [tokens, inputs] is divided and the weight multiplied, so that rounding
    x by a scale a token and the weight by a scale a row does little harm to their product."""
    sizes = np.maximum(np.sqrt(np.mean(x**2, 0)), np.float32(1e-6))
    weights = np.maximum(np.maximum(weight.max(0), -weight.min(0)), np.float32(1e-6))
    s = sizes**EXPONENT / weights ** (1 - EXPONENT)
    even: Floats = (s / np.exp(np.mean(np.log(s)))).astype(np.float32)
    return even
