"""Trained weights in a basis in which 8 bits hold them: the same function, another inside.

    rows = Turned(spec, rows, token_ids)

A trained model has a few channels a hundred times as large as the others; with one scale a token
they take the 8 bits of an activation for themselves. Two changes of basis leave the function and
the graph as they are:

  - A root mean square does not change when a vector is turned. With the weights of each norm moved
    into the matrices behind it, all that reads the hidden state is multiplied by an orthogonal
    matrix (which mixes all channels alike) on its inputs, all that writes it on its outputs.
  - Channel j of an MLP is divided by s_j in up_proj and multiplied by it in down_proj: by its size
    in a forward pass over some tokens in float32, and by its weights in down_proj.

SmolLM2-135M-Instruct, KL to float32: see docs/benchmarks.md.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import scipy.fft

from models.float_forward import forward
from models.safetensors_reader import EMBEDDING, HEAD, Floats, Rows
from models.spec import ModelSpec
from models.tokenizer import DATA

EXPONENT = 0.6  # of an MLP channel's size in s; the rest is the weights'
_NORMS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "input_layernorm"),
    **dict.fromkeys(("gate_proj", "up_proj"), "post_attention_layernorm"),
}


def calibration_text() -> str:
    """Read once by the model that is converted: 8 bits are spent where text needs them."""
    return (DATA / "calibration.txt").read_text(encoding="utf-8")


def turned(values: Floats) -> Floats:
    """[rows, size] times an orthogonal matrix that mixes all columns alike: signs, then cosines."""
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), values.shape[1])
    mixed: Floats = scipy.fft.dct(values * signs, norm="ortho")
    return mixed


class Turned:
    """The rows of the same model in such a basis: models.safetensors_reader.Rows.

    `ids`: tokens [sequences, tokens] to even the MLPs' channels by; None: they stay as they are.
    """

    def __init__(
        self, spec: ModelSpec, rows: Rows, ids: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._spec, self._rows = spec, rows
        self._lock = threading.Lock()
        self._written: tuple[str, Floats] = ("", np.empty((0, 0), np.float32))
        self._even = np.ones((spec.layers, spec.intermediate), np.float32)
        if ids is not None:
            for layer, x in zip(range(spec.layers), forward(spec, rows, ids), strict=False):
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
        """A matrix that writes the hidden state, [hidden, inputs]."""
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
