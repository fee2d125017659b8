"""Trained weights in a basis in which 8 bits hold them: the same function, another inside.

    rows = Turned(spec, rows, token_ids)

A trained model has a few channels a hundred times as large as the others; with one scale a token
they take the 8 bits of an activation for themselves. Two changes of basis leave the function and
the graph as they are:

  - A root mean square does not change when a vector is turned. With the weights of each norm moved
    into the matrices behind it, all that reads the hidden state is multiplied by an orthogonal
    matrix (which mixes all channels alike) on its inputs, all that writes it on its outputs.
  - Channel j of an MLP is divided by s_j in up_proj and multiplied by it in down_proj: by its size
    in a forward pass over some tokens, layer by layer in float32, and by its weights in down_proj.
    The few channels that reach furthest come first: the graph multiplies them in float32
    (`far_channels`).

SmolLM2-135M-Instruct, KL to float32: see docs/benchmarks.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from models.float_forward import BLOCK, forward
from models.safetensors_reader import EMBEDDING, HEAD, Floats, Rows
from models.spec import ModelSpec
from models.tokenizer import DATA

EXPONENT = 0.6  # of an MLP channel's size in s; the rest is the weights'


def calibration_text() -> str:
    """Read once by the model that is converted: 8 bits are spent where text needs them."""
    return (DATA / "calibration.txt").read_text(encoding="utf-8")


@lru_cache(maxsize=8)
def _factors(size: int) -> tuple[Floats, ...]:
    """Orthogonal matrices whose Kronecker product has `size` rows: cosines, then Hadamard's."""
    power = size & -size
    odd = size // power
    n = np.arange(odd)
    cosines = np.cos(np.pi * (n[None] + 0.5) * n[:, None] / odd) * np.sqrt(2 / odd)
    cosines[0] /= np.sqrt(2)
    found = [cosines.astype(np.float32)]
    exponent = power.bit_length() - 1
    for bits in (exponent // 2, exponent - exponent // 2):
        hadamard = np.ones((1, 1))
        for _ in range(bits):
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]]) / np.sqrt(2)
        found.append(hadamard.astype(np.float32))
    return tuple(found)


def turned(values: Floats) -> Floats:
    """[rows, size] times an orthogonal matrix that mixes all columns alike."""
    factors = _factors(values.shape[1])
    y = values.reshape(-1, *(len(one) for one in factors))
    y = np.matmul(y, factors[2])
    y = np.matmul(factors[1], y)
    y = np.matmul(factors[0], y.reshape(len(values), len(factors[0]), -1))
    return np.ascontiguousarray(y.reshape(values.shape))


class Turned:
    """The rows of the same model in such a basis.

    `ids`: tokens [sequences, tokens] to even the MLPs' channels by; None: they stay as they are.
    """

    NORMS = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "input_layernorm.weight"),
        **dict.fromkeys(("gate_proj", "up_proj"), "post_attention_layernorm.weight"),
    }

    def __init__(
        self, spec: ModelSpec, rows: Rows, ids: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._rows = rows
        self._spec = spec
        self._lock = threading.RLock()
        self._held: tuple[str, Any] = ("", None)  # the last whole matrix that was asked for
        self._evened: tuple[str, Any] = ("", None)  # the last layer's order and s
        self._layers = forward(spec, rows, ids) if ids is not None else None

    def __call__(self, name: str, first: int, last: int) -> Floats:
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        layer = layer.rpartition(".")[0]  # model.layers.7
        if name.endswith("layernorm.weight") or name == "model.norm.weight":
            return np.ones(last - first, np.float32)
        if part in ("o_proj", "down_proj"):
            with self._lock:
                if self._held[0] != name:
                    self._held = (name, self._written(name, layer))
                whole: Floats = self._held[1]
            return whole[first:last].copy()
        values = self._rows(name, first, last)
        if name == EMBEDDING:
            return turned(values)
        if name == HEAD:
            self._held = ("", None)  # the head is large itself
            return turned(values * self._norm("model.norm.weight"))
        if part not in self.NORMS:
            return values  # biases, norms of heads
        norm = self._norm(f"{layer}.{self.NORMS[part]}")
        if part not in ("gate_proj", "up_proj"):
            return turned(values * norm)
        order, s = self._mlp(layer)
        for at in np.flatnonzero(order[first:last] != np.arange(first, last)):
            values[at] = self._rows(name, order[first + at], order[first + at] + 1)[0]
        values = turned(values * norm)
        return values / s[first:last, None] if part == "up_proj" else values

    def _norm(self, name: str) -> Floats:
        return self._rows(name, 0, self._spec.hidden)

    def _written(self, name: str, layer: str) -> Floats:
        """A whole matrix that writes the hidden state, [hidden, inputs]."""
        whole = np.concatenate(list(self._blocks(name)))
        if name.endswith("down_proj.weight"):
            order, s = self._mlp(layer)
            moved = np.flatnonzero(order != np.arange(len(order)))
            whole[:, moved] = whole[:, order[moved]]
            whole *= s
        step = max(1, BLOCK // self._spec.hidden)
        for at in range(0, whole.shape[1], step):
            columns = np.ascontiguousarray(whole[:, at : at + step].T)
            whole[:, at : at + step] = turned(columns).T
        return whole

    def _mlp(self, layer: str) -> tuple[npt.NDArray[np.int64], Floats]:
        """Order of a layer's channels and their s, [intermediate]. Layers are asked for in turn."""
        with self._lock:
            if self._evened[0] != layer:
                order = np.arange(self._spec.intermediate)
                s = np.ones(self._spec.intermediate, np.float32)
                if self._layers is not None:
                    x, far = next(self._layers), far_channels(self._spec)
                    for to, at in enumerate(np.argsort(-np.abs(x).max(0))[:far]):
                        here = int(np.flatnonzero(order == at)[0])
                        order[to], order[here] = order[here], order[to]
                    near, name = order[far:], f"{layer}.mlp.down_proj.weight"
                    blocks = (block[:, near] for block in self._blocks(name))
                    s[far:] = even_channels(x[:, near], blocks)
                self._evened = (layer, (order, s))
            found: tuple[npt.NDArray[np.int64], Floats] = self._evened[1]
            return found

    def _blocks(self, name: str) -> Iterator[Floats]:
        """The rows of a matrix that writes the hidden state, some at a time."""
        count, inputs = self._spec.hidden, self._rows(name, 0, 1).shape[1]
        step = max(1, BLOCK // inputs)
        for first in range(0, count, step):
            yield self._rows(name, first, min(count, first + step))


def far_channels(spec: ModelSpec) -> int:
    """How many channels of an MLP the graph multiplies in float32 where the others are int8."""
    return min(64, spec.intermediate // 16)


def even_channels(x: Floats, blocks: Iterable[Floats]) -> Floats:
    """s [inputs] by which x is divided and the weight multiplied, so that rounding x by a scale a
    token and the weight by a scale a row does little harm to their product.

    x: [tokens, inputs]; `blocks`: the weight, some rows at a time.
    """
    sizes = np.maximum(np.sqrt(np.mean(x**2, 0)), np.float32(1e-6))
    weights = np.full_like(sizes, 1e-6)
    for block in blocks:
        np.maximum(weights, np.abs(block).max(0), out=weights)
    s = sizes**EXPONENT / weights ** (1 - EXPONENT)
    even: Floats = (s / np.exp(np.mean(np.log(s)))).astype(np.float32)
    return even
