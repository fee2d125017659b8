"""Rotates trained weights, so that the model computes the same function but loses less in 8 bits.

    rows = RotatedRows(spec, rows, Path("SmolLM2-135M"))

A trained model has a few channels a hundred times as large as the others. If a token's activations
share one scale, these channels use up its 8 bits. Two changes keep the function and the graph:

  - Rotation (as in QuaRot, Ashkboos et al. 2024): the root mean square of a vector does not change
    when the vector is rotated. So the weights of each norm are moved into the matrices behind it.
    Then every matrix that reads the hidden state is multiplied by an orthogonal matrix on its
    inputs, and every matrix that writes it on its outputs. The orthogonal matrix mixes all channels
    equally.
  - Smoothing (as in SmoothQuant, Xiao et al. 2023): channel j of an MLP is divided by s_j in
    up_proj and multiplied by it in down_proj. s_j follows from the channel's size in a forward pass
    over a text, in float32, and from its weights in down_proj.

docs/benchmarks.md has the KL divergence of SmolLM2-135M-Instruct from float32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.fft

from crossover.models.shape.model_spec import ModelSpec
from crossover.models.text.tokenizer import DATA, load_tokenizer
from crossover.models.weights.random_weights import rope_factors
from crossover.models.weights.safetensors_reader import EMBEDDING, HEAD, Floats, Rows

BLOCK = 1 << 20  # floats of a matrix that are in memory at once
COLUMNS = 256  # of a matrix that are rotated at once

SMOOTHING_EXPONENT = 0.6  # of a channel's size in s_j; that of its weights is 1 minus this
# Matrix -> the norm whose output it reads.
_NORMS = {
    "q_proj": "input_layernorm",
    "k_proj": "input_layernorm",
    "v_proj": "input_layernorm",
    "gate_proj": "post_attention_layernorm",
    "up_proj": "post_attention_layernorm",
}


def rotary_angles(spec: ModelSpec, length: int) -> tuple[Floats, Floats]:
    """Return the cosines and sines of the rotary angles (RoPE) of each position, both
    [length, head_dim / 2]."""
    frequencies = 1.0 / spec.rope_theta ** (np.arange(0, spec.head_dim, 2) / spec.head_dim)
    if spec.rope_scaling is not None:
        frequencies = frequencies / rope_factors(spec, spec.rope_scaling)
    angles = np.outer(np.arange(length), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def calibration_ids(source: Path, spec: ModelSpec) -> list[int]:
    """Return the token ids of the text with which the sizes of channels are measured; [] if the
    folder has no tokenizer of the model."""
    if not (source / "tokenizer.json").is_file():
        return []
    text = (DATA / "calibration.txt").read_text(encoding="utf-8")
    ids = load_tokenizer(source).encode(text)[: spec.context]
    return ids if max(ids, default=0) < spec.vocabulary else []


def mlp_inputs(spec: ModelSpec, rows: Rows, ids: list[int]) -> Iterator[Floats]:
    """Yield the inputs of down_proj in each layer, [tokens, intermediate], in a forward pass over
    these tokens. At most BLOCK floats of the weights are in memory at once."""
    length, half = len(ids), spec.head_dim // 2
    cos, sin = (angles[:, None] for angles in rotary_angles(spec, length))
    mask = np.triu(np.full((length, length), -np.inf, np.float32), 1)

    def product(x: Floats, name: str, outputs: int) -> Floats:
        """Return x @ W.T, [tokens, outputs]."""
        step = max(1, BLOCK // x.shape[1])
        parts = [
            x @ rows(f"{name}.weight", first, min(outputs, first + step)).T
            for first in range(0, outputs, step)
        ]
        return np.concatenate(parts, 1)

    def norm(x: Floats, name: str) -> Floats:
        """Return the RMS norm of x, in its shape."""
        size = np.sqrt(np.mean(x**2, -1, keepdims=True) + np.float32(spec.norm_epsilon))
        normed: Floats = x / size * rows(name, 0, x.shape[-1])
        return normed

    def heads(x: Floats, path: str, part: str, count: int) -> Floats:
        """Return queries, keys or values (`part`: q, k, v), [tokens, count, head_dim]."""
        y = product(x, f"{path}.{part}_proj", count * spec.head_dim)
        if spec.qkv_bias:
            y = y + rows(f"{path}.{part}_proj.bias", 0, y.shape[1])
        y = y.reshape(length, count, spec.head_dim)
        if part == "v":
            return y
        if spec.qk_norm:
            y = norm(y, f"{path}.{part}_norm.weight")
        first_half, second_half = y[..., :half], y[..., half:]
        rotated = [first_half * cos - second_half * sin, second_half * cos + first_half * sin]
        return np.concatenate(rotated, -1)

    x = np.concatenate([rows(EMBEDDING, token, token + 1) for token in ids])
    for layer in range(spec.layers):
        path = f"model.layers.{layer}"
        y, attention = norm(x, f"{path}.input_layernorm.weight"), f"{path}.self_attn"
        q = heads(y, attention, "q", spec.heads)
        q = q.reshape(length, spec.kv_heads, -1, spec.head_dim)
        k = heads(y, attention, "k", spec.kv_heads)
        v = heads(y, attention, "v", spec.kv_heads)
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


def rotated(values: Floats) -> Floats:
    """Return [rows, size] times an orthogonal matrix that mixes all columns equally: random signs,
    then a discrete cosine transform."""
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), values.shape[1])
    mixed: Floats = scipy.fft.dct(values * signs, norm="ortho")
    return mixed


class RotatedRows:
    """The rows of the rotated and smoothed weights, as safetensors_reader.Rows.

    `rows`: those of the model's own weights. `source`: the model's folder, whose tokenizer is used
    for the smoothing; without one, the MLPs are not smoothed.
    """

    def __init__(self, spec: ModelSpec, rows: Rows, source: Path) -> None:
        self._spec, self._rows = spec, rows
        self._lock = threading.Lock()
        # The last matrix that was rotated as a whole, with its name.
        self._rotated_outputs: tuple[str, Floats] = ("", np.empty((0, 0), np.float32))
        self._smoothing = np.ones((spec.layers, spec.intermediate), np.float32)
        if ids := calibration_ids(source, spec):
            for layer, x in enumerate(mlp_inputs(spec, rows, ids)):
                down = rows(f"model.layers.{layer}.mlp.down_proj.weight", 0, spec.hidden)
                self._smoothing[layer] = smoothing_factors(x, down)

    def __call__(self, name: str, first: int, last: int) -> Floats:
        path = name.split(".")
        part = path[-2]
        if part == "norm" or part.endswith("layernorm"):
            return np.ones(last - first, np.float32)  # its weights are in the matrices behind it
        if part in ("o_proj", "down_proj"):
            # They write the hidden state, so their columns are rotated, which takes all rows.
            with self._lock:
                if self._rotated_outputs[0] != name:
                    self._rotated_outputs = (name, self._rotate_outputs(name))
                return self._rotated_outputs[1][first:last]
        values = self._rows(name, first, last)
        if values.ndim == 1:  # biases, norms of heads
            return values
        if name != EMBEDDING:
            norm = "model.norm" if name == HEAD else f"{'.'.join(path[:3])}.{_NORMS[part]}"
            values = values * self._rows(f"{norm}.weight", 0, self._spec.hidden)
        if part == "up_proj":
            values /= self._smoothing[int(path[2]), first:last, None]
        return rotated(values)

    def _rotate_outputs(self, name: str) -> Floats:
        """Return a matrix that writes the hidden state, rotated, [hidden, inputs]."""
        matrix = self._rows(name, 0, self._spec.hidden)
        if name.endswith("down_proj.weight"):
            matrix *= self._smoothing[int(name.split(".")[2])]
        for first in range(0, matrix.shape[1], COLUMNS):
            columns = slice(first, first + COLUMNS)
            matrix[:, columns] = rotated(matrix[:, columns].T).T
        return matrix


def smoothing_factors(x: Floats, weight: Floats) -> Floats:
    """Return the factors s [inputs] by which inputs x [tokens, inputs] are divided, and the weight
    [outputs, inputs] is multiplied, to keep the error of their product small if x is rounded with
    one scale per token and the weight with one scale per row.

    s_j = rms(x_j) ** SMOOTHING_EXPONENT / max|weight_j| ** (1 - SMOOTHING_EXPONENT), divided by the
    geometric mean of all s_j.
    """
    sizes = np.maximum(np.sqrt(np.mean(x**2, 0)), np.float32(1e-6))
    weights = np.maximum(np.maximum(weight.max(0), -weight.min(0)), np.float32(1e-6))
    s = sizes**SMOOTHING_EXPONENT / weights ** (1 - SMOOTHING_EXPONENT)
    factors: Floats = (s / np.exp(np.mean(np.log(s)))).astype(np.float32)
    return factors
