"""Read safetensors of a folder: names, shapes, types, completeness, and rows as floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from models.errors import BrokenWeights, UnsupportedModel
from models.model_spec import ModelSpec

Floats = npt.NDArray[np.float32]
# Rows first..last of a tensor (elements of a vector), by its Hugging Face name. Of a tied model
# lm_head.weight is the embedding.
Rows = Callable[[str, int, int], Floats]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FORMATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


class Stored(NamedTuple):
    """A tensor: its file, safetensors type, shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's *.safetensors. Raises UnsupportedModel, BrokenWeights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(
            f"{str(folder)!r} holds no *.safetensors; other kinds of weights (.bin, .pt) can run "
            "code and are not read"
        )
    out: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, "np") as opened:  # compares the header with itself and the size
                for name in opened.keys():
                    found = opened.get_slice(name)
                    out[name] = Stored(file, found.get_dtype(), tuple(found.get_shape()))
        except SafetensorError as problem:
            raise BrokenWeights(
                f"{str(file)!r} is no whole safetensors file: {problem}"
            ) from problem
    return out


def check_tensors(folder: Path, spec: ModelSpec) -> str:
    """Compare tensors with the shape; return the format (fp32, fp16, bf16) of the embedding.

    Raises BrokenWeights naming the missing or different tensor, UnsupportedModel.
    """
    found = read_tensors(folder)
    for tensor in spec.tensors():
        stored = found.get(tensor.name)
        if stored is None or stored.shape != tensor.shape:
            has = "missing" if stored is None else f"of shape {stored.shape}"
            raise BrokenWeights(
                f"tensor {tensor.name} of {folder.name} is {has}, its config.json says "
                f"{tensor.shape}"
            )
        if stored.dtype not in FORMATS:
            raise UnsupportedModel(
                f"tensor {tensor.name} of {folder.name} is of type {stored.dtype}; known: "
                f"{', '.join(FORMATS)}"
            )
    return FORMATS[found[EMBEDDING].dtype]


def stored_rows(folder: Path, spec: ModelSpec) -> Rows:
    """Reads rows of the folder's safetensors; the files are mapped, nothing else is kept."""
    import ml_dtypes  # noqa: F401  # it comes with onnx, and numpy has bfloat16 by it

    files = {name: one.file for name, one in read_tensors(folder).items()}
    opened: dict[Path, Any] = {file: safe_open(file, "np") for file in set(files.values())}

    def rows(name: str, first: int, last: int) -> Floats:
        name = EMBEDDING if spec.tied and name == HEAD else name
        floats: Floats = opened[files[name]].get_slice(name)[first:last].astype(np.float32)
        return floats

    return rows
