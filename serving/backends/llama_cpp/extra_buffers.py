"""Memory of the matrices that llama.cpp arranges anew for this CPU (ggml-cpu/amx and repack.cpp).

They lie in a buffer of their own, in place of the file's bytes, save an embedding that is the
output matrix too: rows are read from it as it is in the file, so that it is held twice.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from models.formats import GGUF_FORMATS, gguf_tensors
from models.spec import ModelSpec

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


def extra_bytes(
    model: ModelSpec | None, weight_format: str, isa: Collection[str], file: str = ""
) -> int:
    """What the weights take beyond their bytes in the file, which is read and not mapped.

    `file`: the GGUF file, whose header has the tensors; "": there is none yet, `model` has them.
    `isa`: CPU flags.
    """
    if file:
        from models.gguf_reader import read_header  # numpy, which `--help` does without

        header = read_header(Path(file)).tensors.items()
        found = {name: (one.shape, one.type, one.bytes) for name, one in header}
    else:
        assert model is not None
        tensors = gguf_tensors(model, weight_format if weight_format in GGUF_FORMATS else "Q4_0")
        found = {one.name: (one.shape[::-1], one.type, one.bytes) for one in tensors}
    extra = 0
    for name, (shape, kind, size) in found.items():
        is_tied = name == "token_embd.weight" and "output.weight" not in found
        if is_tied or name == "output.weight" or name.startswith("blk."):
            added = _added_bytes(shape, kind, isa)
            if added is not None:
                extra += added + is_tied * size
    return extra


def _added_bytes(shape: tuple[int, ...], kind: str, isa: Collection[str]) -> int | None:
    """What a tensor grows by, row length first in its shape; None: it stays as it is."""
    if len(shape) != 2:
        return None
    columns, rows = shape
    grain, block, added = _AMX_TYPES.get(kind, (1, 1, 0))
    if (
        kind in _AMX_TYPES
        and _AMX_FLAGS.issubset(isa)
        and not (columns % grain or rows % _AMX_ROWS)
    ):
        return rows * (columns // block) * added
    is_repacked = any(flag in isa and kind in _REPACK_TYPES[flag] for flag in _REPACK_TYPES)
    return 0 if is_repacked and rows % _REPACK_ROWS == 0 else None
