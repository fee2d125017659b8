"""Read safetensors headers of a folder: names, shapes, types, completeness."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from models.errors import BrokenWeights, UnsupportedModel
from models.spec import ModelSpec

_MOST_HEADER_BYTES = 100 << 20  # the safetensors library's own limit
_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}
_FORMATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


class Stored(NamedTuple):
    """A tensor: its file, safetensors type, shape, first byte in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int


def read_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's *.safetensors. Raises BrokenWeights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(
            f"{str(folder)!r} holds no *.safetensors; other kinds of weights (.bin, .pt) can run "
            "code and are not read"
        )
    out: dict[str, Stored] = {}
    for file in files:
        begin, header = _header(file)
        for name, entry in header.items():
            out[name] = Stored(
                file.name, entry["dtype"], tuple(entry["shape"]), begin + entry["data_offsets"][0]
            )
    return out


def check_tensors(folder: Path, spec: ModelSpec) -> str:
    """Compare tensors with the shape; return the format (fp32, fp16, bf16) of most.

    Raises BrokenWeights naming the missing or different tensor.
    """
    found = read_tensors(folder)
    for tensor in spec.tensors():
        stored = found.get(tensor.name)
        if stored is None:
            raise BrokenWeights(
                f"{folder.name} has no tensor {tensor.name}, which its config.json asks for"
            )
        if stored.shape != tensor.shape:
            raise BrokenWeights(
                f"{folder.name} has tensor {tensor.name} of shape {stored.shape}, its config.json "
                f"says {tensor.shape}"
            )
    sizes: dict[str, int] = {}
    for stored in found.values():
        sizes[stored.dtype] = sizes.get(stored.dtype, 0) + math.prod(stored.shape)
    most = max(sizes, key=sizes.__getitem__)
    if most not in _FORMATS:
        raise UnsupportedModel(
            f"{folder.name} holds weights of type {most}; known: {', '.join(_FORMATS)}"
        )
    return _FORMATS[most]


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the checked header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
            raise BrokenWeights(
                f"{str(file)!r} is no whole safetensors file: {size} bytes, a header of {length}"
            )
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            for name, entry in header.items():
                begin, stop = entry["data_offsets"]
                width = _WIDTHS.get(entry["dtype"])
                if width is not None and stop - begin != math.prod(entry["shape"]) * width:
                    raise BrokenWeights(
                        f"{str(file)!r} gives tensor {name} {stop - begin} bytes, its shape needs "
                        "another number"
                    )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as problem:
            raise BrokenWeights(
                f"{str(file)!r} has a damaged header: {type(problem).__name__}: {problem}"
            ) from problem
    if 8 + length + end != size:
        raise BrokenWeights(
            f"{str(file)!r} is cut off or padded: {size} bytes, its header says {8 + length + end}"
        )
    return 8 + length, header
