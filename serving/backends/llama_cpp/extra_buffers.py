"""Memory of the matrices that llama.cpp arranges anew for this CPU (ggml-cpu/amx and repack.cpp).

They lie in a buffer of their own, in place of the file's bytes, save an embedding that is the
output matrix too: rows are read from it as it is in the file, so that it is held twice.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from models.formats import GGUF_FORMATS, gguf_tensors
from models.spec import ModelSpec

# CPU flag -> types that are arranged for it, and by what share of their bytes they grow.
_ARRANGED: dict[str, dict[str, float]] = {
    "amx_int8": {
        **dict.fromkeys(("F16", "Q4_0", "Q4_1", "Q6_K"), 0.0),
        "Q8_0": 4 / 34,
        "Q4_K": 4 / 144,
        "Q5_K": 4 / 176,
        "IQ4_XS": 2 / 136,
    },
    "asimddp": dict.fromkeys(("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"), 0.0),
    "avx2": dict.fromkeys(("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"), 0.0),
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
    extra = 0.0
    for name, (shape, kind, size) in found.items():
        is_tied = name == "token_embd.weight" and "output.weight" not in found
        shares = [_ARRANGED[flag].get(kind) for flag in _ARRANGED if flag in isa]
        share = next((one for one in shares if one is not None), None)
        is_matrix = is_tied or name == "output.weight" or name.startswith("blk.")
        if is_matrix and len(shape) == 2 and shape[1] % 8 == 0 and share is not None:
            extra += (share + is_tied) * size
    return int(extra)
