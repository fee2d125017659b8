"""Weight formats: those that are made here, those that are read, and the bytes they take.

    >>> from models.ladder import rung
    >>> {t.type for t in gguf_tensors(rung("8b").spec, "Q4_K_M")} == {"F32", "Q4_K", "Q6_K"}
    True
    >>> spelt("gguf", "q5_k_m")  # of a file that others made
    'Q5_K_M'

A GGUF file that others made may be of any type that the gguf library knows; its header has the
sizes. What is made here has the types that llama.cpp would give each tensor
(`llama_tensor_get_type` in src/llama-quant.cpp): only then has a synthetic file the memory and time
of a real one. A test compares with `llama_model_quantize`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import msgspec

from models.errors import UnsupportedModel
from models.spec import BITS_PER_WEIGHT, ModelSpec


class Block(NamedTuple):
    """A quantised block: weights in it, bytes of it (ggml-common.h)."""

    weights: int
    bytes: int


BLOCKS: dict[str, Block] = {
    "F32": Block(1, 4),
    "F16": Block(1, 2),
    "BF16": Block(1, 2),
    "Q8_0": Block(32, 34),
    "Q5_0": Block(32, 22),
    "Q5_1": Block(32, 24),
    "Q4_0": Block(32, 18),
    "Q4_K": Block(256, 144),
    "Q5_K": Block(256, 176),
    "Q6_K": Block(256, 210),
}

# Made here: the type of most tensors, and llama.cpp's number for the file (enum llama_ftype).
GGUF_FORMATS: dict[str, tuple[str, int]] = {
    "F32": ("F32", 0),
    "F16": ("F16", 1),
    "BF16": ("BF16", 32),
    "Q8_0": ("Q8_0", 7),
    "Q4_0": ("Q4_0", 2),
    "Q4_K_M": ("Q4_K", 15),
}
HF_FORMATS: tuple[str, ...] = ("bf16", "fp16", "fp32")
ONNX_FORMATS: tuple[str, ...] = ("int4", "int8", "fp32")
# Made here, by kind of file. "none": no weights.
FORMATS: dict[str, tuple[str, ...]] = {
    "gguf": tuple(GGUF_FORMATS),
    "hf": HF_FORMATS,
    "onnx": ONNX_FORMATS,
    "none": (),
}
DEFAULT_FORMATS = {"gguf": "Q4_0", "hf": "bf16", "onnx": "int4", "none": ""}

# What a row that is no multiple of 256 falls back to.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}

# Hugging Face name -> GGUF name, of one layer and of the whole, without .weight and .bias.
_NAMES = {
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{f"self_attn.{one}_norm": f"attn_{one}_norm" for one in "qk"},
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@cache
def gguf_file_formats() -> dict[str, str]:
    """What a GGUF file may be called, llama.cpp's file types and tensor types -> the tensor type of
    most of its bytes."""
    from gguf import GGML_QUANT_SIZES, LlamaFileType

    types = [one.name for one in GGML_QUANT_SIZES]
    found = {one: one for one in types}
    for one in LlamaFileType:
        name = one.name.removeprefix("ALL_").removeprefix("MOSTLY_")
        bases = [known for known in types if name == known or name.startswith(f"{known}_")]
        if bases:
            found[name] = max(bases, key=len)
    # Mixtures that are called by their bits.
    return found | {"IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S", "IQ2_M": "IQ2_S"}


def spelt(kind: str, weight_format: str) -> str:
    """The format as files of this kind spell it. Raises UnsupportedModel."""
    known: list[str] = [*FORMATS[kind], *(gguf_file_formats() if kind == "gguf" else ())]
    for one in known:
        if one.lower() == weight_format.lower():
            return one
    raise UnsupportedModel(
        f"kind {kind!r} has no weight format {weight_format!r}; made here are "
        f"{', '.join(FORMATS[kind])}"
    )


class GgufTensor(msgspec.Struct, frozen=True):
    """One tensor of a GGUF file: both names, shape as in Hugging Face (rows, columns), type."""

    name: str
    hf_name: str | None  # None: computed (rope factors), not part of the checkpoint
    shape: tuple[int, ...]
    type: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        block = BLOCKS[self.type]
        return self.elements // block.weights * block.bytes


def gguf_name(hf_name: str) -> str:
    """The GGUF name of a Hugging Face tensor. Raises KeyError for an unknown one."""
    path, _, kind = hf_name.rpartition(".")
    if path.startswith("model.layers."):
        _, _, layer, path = path.split(".", 3)
        return f"blk.{int(layer)}.{_NAMES[path]}.{kind}"
    return f"{_NAMES[path]}.{kind}"


def gguf_tensors(spec: ModelSpec, weight_format: str) -> list[GgufTensor]:
    """Every tensor of the GGUF file of `spec`, in file order."""
    if weight_format not in GGUF_FORMATS:
        raise UnsupportedModel(
            f"GGUF files of format {weight_format!r} are not made here, only "
            f"{', '.join(GGUF_FORMATS)}; a file of any format that llama.cpp reads is served"
        )
    out = []
    for tensor in spec.tensors():
        name = gguf_name(tensor.name)
        kind = (
            _matrix_type(spec, weight_format, name, tensor.shape[-1]) if tensor.is_matrix else "F32"
        )
        out.append(GgufTensor(name, tensor.name, tensor.shape, kind))
    if spec.rope_scaling is not None:
        out.append(GgufTensor("rope_freqs.weight", None, (spec.head_dim // 2,), "F32"))
    return out


def weight_bytes(spec: ModelSpec, weight_format: str) -> int:
    """Bytes of all weights: exact for a GGUF file that is made here, else by the bits of most
    tensors. Raises KeyError."""
    if weight_format in GGUF_FORMATS and spec.counted_parameters is None:
        return sum(tensor.bytes for tensor in gguf_tensors(spec, weight_format))
    if weight_format not in BITS_PER_WEIGHT and weight_format in gguf_file_formats():
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType[gguf_file_formats()[weight_format]]
        weights, size = GGML_QUANT_SIZES[kind]
        return int(spec.parameters * size / weights)
    return spec.weight_bytes(weight_format)


def known_formats() -> list[str]:
    """The formats that can be planned with."""
    return [*GGUF_FORMATS, *(name for name in BITS_PER_WEIGHT if name not in GGUF_FORMATS)]


def _matrix_type(spec: ModelSpec, weight_format: str, name: str, columns: int) -> str:
    """llama.cpp's choice for one matrix."""
    kind = GGUF_FORMATS[weight_format][0]
    if kind in ("F32", "F16", "BF16"):
        return kind
    is_head = name == "output.weight" or (spec.tied and name == "token_embd.weight")
    if is_head and kind != "Q8_0":
        kind = "Q8_0" if columns % BLOCKS[kind].weights else "Q6_K"
    elif weight_format == "Q4_K_M" and name.startswith("blk."):
        layer = int(name.split(".")[1])
        if name.endswith(("attn_v.weight", "ffn_down.weight")) and _wants_more_bits(
            layer, spec.layers
        ):
            kind = "Q6_K"
        elif name.endswith("attn_v.weight") and spec.layers == 80 and spec.heads != spec.kv_heads:
            # the 70B kinds: eight query heads share one value head, so precision here is cheap
            kind = "Q5_K"
    if columns % BLOCKS[kind].weights:
        kind = _NARROW.get(kind, "F16")
    return "F16" if columns % BLOCKS[kind].weights else kind


def _wants_more_bits(layer: int, layers: int) -> bool:
    """First and last eighth, every third layer between (use_more_bits in llama-quant.cpp)."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
