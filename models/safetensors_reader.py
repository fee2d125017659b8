"""Read safetensors of a folder: names, shapes, types, completeness, and rows as floats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from models.errors import BrokenWeights, UnsupportedModel
from models.spec import ModelSpec

Floats = npt.NDArray[np.float32]
# Rows first..last of a tensor (elements of a vector), by its Hugging Face name. Of a tied model
# lm_head.weight is the embedding.
Rows = Callable[[str, int, int], Floats]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FORMATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_BITS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Stored(NamedTuple):
    """A tensor: its file, safetensors type, shape, first byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


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
            with safe_open(file, "np"):  # compares the header with itself and with the size
                pass
        except SafetensorError as problem:
            raise BrokenWeights(
                f"{str(file)!r} is no whole safetensors file: {problem}"
            ) from problem
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start = 8 + length + entry["data_offsets"][0]
            out[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), start)
    return out


def check_tensors(folder: Path, spec: ModelSpec) -> str:
    """Compare tensors with the shape; return the format (fp32, fp16, bf16) of most.

    Raises BrokenWeights naming the missing or different tensor.
    """
    found = read_tensors(folder)
    named = msgspec.structs.replace(spec, name=folder.name)
    named.check_shapes({name: one.shape for name, one in found.items()}, "its config.json")
    sizes: dict[str, int] = {}
    for tensor in spec.tensors():
        stored = found[tensor.name]
        if stored.dtype not in FORMATS:
            raise UnsupportedModel(
                f"{folder.name} has tensor {tensor.name} of type {stored.dtype}; known: "
                f"{', '.join(FORMATS)}"
            )
        sizes[stored.dtype] = sizes.get(stored.dtype, 0) + tensor.elements
    return FORMATS[max(sizes, key=sizes.__getitem__)]


def stored_rows(folder: Path, spec: ModelSpec) -> Rows:
    """Reads the folder's safetensors by offset; nothing is mapped or kept."""
    stored = read_tensors(folder)

    def rows(name: str, first: int, last: int) -> Floats:
        found = stored[EMBEDDING if spec.tied and name == HEAD else name]
        dtype = np.dtype(_BITS[found.dtype])
        each = math.prod(found.shape[1:])
        start = found.start + first * each * dtype.itemsize
        raw = np.fromfile(found.file, dtype, (last - first) * each, offset=start)
        values = raw.reshape(-1, *found.shape[1:])
        if found.dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    return rows
