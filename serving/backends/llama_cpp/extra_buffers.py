"""Memory of the matrices that llama.cpp arranges anew for this CPU (ggml-cpu/amx and repack.cpp).

They lie in a buffer of their own. An embedding that is the output matrix too is held twice: rows
are read from it as it is in the file. So is all that the mapped part of a file has in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from models.formats import GGUF_FORMATS, gguf_tensors
from models.spec import ModelSpec

AMX, REPACK = "AMX", "CPU_REPACK"  # llama.cpp's names of the buffers
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
_AMX_FLAGS = frozenset({"amx_int8", "avx512_vnni"})
_AMX_ROWS, _REPACK_ROWS = 32, 8  # rows are a multiple of it

# Types that AMX multiplies: columns are a multiple of it, weights of a block, bytes that it adds.
_AMX_TYPES: dict[str, tuple[int, int, int]] = {
    "F16": (16, 1, 0),
    "Q4_0": (32, 32, 0),
    "Q4_1": (32, 32, 0),
    "Q8_0": (32, 32, 4),
    "Q4_K": (256, 256, 4),
    "Q5_K": (256, 256, 4),
    "Q6_K": (256, 256, 0),
    "IQ4_XS": (256, 256, 2),
}
# CPU flag -> types that are repacked for it.
_REPACK_TYPES: dict[str, tuple[str, ...]] = {
    "avx2": ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"),
    "avx512f": ("Q2_K",),
    "asimddp": ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"),
}


class Weight(NamedTuple):
    """A tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]  # row length first
    type: str
    bytes: int
    start: int = 0  # in the file


def extra_bytes(
    weights: Iterable[Weight], buffers: Collection[str], isa: Collection[str], is_mapped: bool
) -> int:
    """What the weights take beyond their bytes in the file. `buffers`: which of the two there are,
    `isa`: CPU flags."""
    by_name = {weight.name: weight for weight in weights}
    arranged, left = 0, []
    for weight in by_name.values():
        is_tied = weight.name == EMBEDDING and OUTPUT not in by_name
        held = None
        if is_tied or weight.name == OUTPUT or weight.name.startswith("blk."):
            held = _bytes_in_buffer(weight, buffers, isa)
        arranged += held or 0
        if is_tied or held is None:
            left.append(weight)
    others = sum(weight.bytes for weight in left)
    if is_mapped and left:  # from the first to the last of them
        others = max(one.start + one.bytes for one in left) - min(one.start for one in left)
    return arranged + others - sum(weight.bytes for weight in by_name.values())


def _bytes_in_buffer(weight: Weight, buffers: Collection[str], isa: Collection[str]) -> int | None:
    """Bytes in one of the buffers; None: it stays as it is in the file."""
    if len(weight.shape) != 2:
        return None
    columns, rows = weight.shape
    if AMX in buffers and weight.type in _AMX_TYPES:
        grain, block, added = _AMX_TYPES[weight.type]
        if columns % grain == 0 and rows % _AMX_ROWS == 0:
            return weight.bytes + rows * (columns // block) * added
    is_repacked = any(flag in isa and weight.type in _REPACK_TYPES[flag] for flag in _REPACK_TYPES)
    return weight.bytes if REPACK in buffers and is_repacked and rows % _REPACK_ROWS == 0 else None


def planned_extra_bytes(
    model: ModelSpec, weight_format: str, isa: Collection[str], file: str = ""
) -> int:
    """The same before the load: every buffer that the CPU allows, file read.

    `file`: the GGUF file, whose header has the tensors; "": there is none yet.
    """
    buffers = (AMX, REPACK) if _AMX_FLAGS.issubset(isa) else (REPACK,)
    if file:
        weights = weights_in(Path(file))
    else:
        tensors = gguf_tensors(model, weight_format if weight_format in GGUF_FORMATS else "Q4_0")
        weights = [Weight(one.name, one.shape[::-1], one.type, one.bytes) for one in tensors]
    return extra_bytes(weights, buffers, isa, is_mapped=False)


def weights_in(file: Path) -> list[Weight]:
    """The tensors of a GGUF file."""
    from models.gguf_reader import read_header  # numpy, which `--help` does without

    tensors = read_header(file).tensors
    return [
        Weight(name, one.shape, one.type, one.bytes, one.start) for name, one in tensors.items()
    ]
