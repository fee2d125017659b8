"""Weight formats: those that Crossover writes, those that it reads, and the bytes that they take.

    >>> from crossover.models.identity.model_ladder import ladder_model
    >>> {t.type for t in gguf_tensors(ladder_model("8b").spec, "Q4_K_M")} == {"F32", "Q4_K", "Q6_K"}
    True
    >>> round(weight_bytes(ladder_model("135m").spec, "Q4_0") / 2**20)
    86

Existing GGUF files may have any type that the gguf library knows. Files that Crossover writes have
the type that llama.cpp would choose for each tensor (`llama_tensor_get_type` in
src/llama-quant.cpp), so that a file with random weights takes the memory and time of a real one.
"""

from __future__ import annotations

import difflib
import math
import re
from functools import cache
from typing import NamedTuple

import msgspec

from crossover.models.errors import UnsupportedModel
from crossover.models.shape.model_families import FAMILIES
from crossover.models.shape.model_spec import ModelSpec, TensorShape


class Block(NamedTuple):
    """A quantized block: its number of weights, and its bytes (ggml-common.h)."""

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
    "MXFP4": Block(32, 17),
}
GGUF_FORMATS: tuple[str, ...] = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M")
HF_FORMATS: tuple[str, ...] = ("bf16", "fp16", "fp32")
ONNX_FORMATS: tuple[str, ...] = ("int4", "int8", "fp32")
# The formats that Crossover writes, by kind of file. "none": a model without weights.
FORMATS: dict[str, tuple[str, ...]] = {
    "gguf": GGUF_FORMATS,
    "hf": HF_FORMATS,
    "onnx": ONNX_FORMATS,
    "none": (),
}
DEFAULT_FORMATS = {"gguf": "Q4_0", "hf": "bf16", "onnx": "int8", "none": ""}
# Approximate bits per weight. int4 has one float32 scale per 32 weights (MatMulNBits), int8 one per
# row. Q4_K_M has some matrices in 6 bits; published files have 4.85 on average.
_BITS = {"bf16": 16.0, "fp16": 16.0, "fp32": 32.0, "int4": 5.0, "int8": 8.0, "Q4_K_M": 4.85}
# Bits of a weight in the formats of GPU servers, in which embedding and head stay in 16 bits. Names
# as in compressed-tensors: bits of weights and activations. Groups of 128 weights share a scale of
# 16 bits and a zero point in w4a16, 16 weights share one of 8 bits in fp4 (NVFP4).
GPU_FORMATS = {"bf16": 16.0, "fp8": 8.0, "w8a8": 8.0, "w8a16": 8.0, "w4a16": 4.25, "fp4": 4.5}
# The type of a tensor whose rows are not a multiple of 256, by the type that it would have had.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@cache
def gguf_names() -> dict[str, float]:
    """Return the names of all weight formats that a GGUF file may have (llama.cpp's file types and
    tensor types), with approximate bits per weight: the number in the name, and half a bit more for
    the scales of quantized formats."""
    from gguf import GGMLQuantizationType, LlamaFileType

    bits_of: dict[str, float] = {}
    for kind in (*GGMLQuantizationType, *LlamaFileType):
        if kind.name == "GUESSED":
            continue
        name = kind.name.removeprefix("ALL_").removeprefix("MOSTLY_")
        bits = int(re.findall(r"\d+", name)[0])
        bits_of[name] = bits + 0.5 if bits < 16 else float(bits)
    return bits_of


def normalized_format(kind: str, weight_format: str) -> str:
    """Return the format in the spelling of this kind of file, with upper and lower case corrected.
    Raises UnsupportedModel if the kind does not have the format."""
    for names in (FORMATS[kind], gguf_names() if kind == "gguf" else ()):
        for name in names:
            if name.lower() == weight_format.lower():
                return name
    raise UnsupportedModel(
        f"{weight_format!r} cannot be made for files of kind {kind!r}. Available formats: "
        f"{', '.join(FORMATS[kind])}"
    )


class GgufTensorLayout(msgspec.Struct, frozen=True):
    """One tensor of a GGUF file."""

    name: str  # in the GGUF file
    hf_name: str | None  # in the checkpoint; None: it is computed, as RoPE factors are
    shape: tuple[int, ...]  # as in Hugging Face: (rows, columns) or (length,)
    type: str  # a key of BLOCKS

    @property
    def bytes(self) -> int:
        """The size of the tensor in the file."""
        block = BLOCKS[self.type]
        return math.prod(self.shape) // block.weights * block.bytes


def gguf_tensors(spec: ModelSpec, weight_format: str) -> list[GgufTensorLayout]:
    """Return all tensors of the GGUF file that Crossover writes for this shape, in file order.
    Raises UnsupportedModel if it does not write the format."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    if weight_format not in GGUF_FORMATS:
        raise UnsupportedModel(
            f"GGUF files of format {weight_format!r} cannot be made, only "
            f"{', '.join(GGUF_FORMATS)}. Existing files of any format that llama.cpp reads are "
            "served."
        )
    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    architecture = architectures[FAMILIES[spec.family].gguf]
    name_of = get_tensor_name_map(architecture, spec.layers).get_name
    tensors = []
    for tensor in spec.tensors():
        name = name_of(tensor.name, (".weight", ".bias"))
        kind = tensor_type(spec, weight_format, tensor)
        tensors.append(GgufTensorLayout(name, tensor.name, tensor.shape, kind))
    if spec.rope_scaling is not None:
        tensors.append(GgufTensorLayout("rope_freqs.weight", None, (spec.head_dim // 2,), "F32"))
    return tensors


def tensor_type(spec: ModelSpec, weight_format: str, tensor: TensorShape) -> str:
    """Return the type that llama.cpp chooses for one tensor of a model in this format, which must
    be one of GGUF_FORMATS."""
    if len(tensor.shape) == 1:
        return "F32"
    name, columns, kind = tensor.name, tensor.shape[1], weight_format.removesuffix("_M")
    if kind in ("F32", "F16", "BF16"):
        return kind
    if name == ("model.embed_tokens.weight" if spec.tied else "lm_head.weight"):
        if kind != "Q8_0":
            kind = "Q8_0" if columns % BLOCKS[kind].weights else "Q6_K"
    elif weight_format == "Q4_K_M" and name.endswith(("v_proj.weight", "down_proj.weight")):
        # The first and last eighth of the layers, and every third between them (use_more_bits).
        layer, eighth = int(name.split(".")[2]), spec.layers // 8
        if not eighth <= layer < 7 * spec.layers // 8 or (layer - eighth) % 3 == 2:
            kind = "Q6_K"
        elif "v_proj" in name and spec.layers == 80 and spec.heads != spec.kv_heads:
            kind = "Q5_K"  # 70B models with grouped-query attention, where values are small
    if columns % BLOCKS[kind].weights:
        kind = _NARROW.get(kind, "F16")
    return "F16" if columns % BLOCKS[kind].weights else kind


def weight_bytes(spec: ModelSpec, weight_format: str) -> int:
    """Return the bytes of all weights in this format: exactly for GGUF files that Crossover writes,
    and otherwise from the approximate bits per weight.

    Raises KeyError if the format is unknown.
    """
    if weight_format in GGUF_FORMATS and spec.counted_parameters is None:
        total_bytes = 0
        for tensor in spec.tensors():
            block = BLOCKS[tensor_type(spec, weight_format, tensor)]
            total_bytes += tensor.elements // block.weights * block.bytes
        return total_bytes
    if weight_format in GPU_FORMATS:
        wide_parameters = spec.looked_up_parameters + spec.vocabulary * spec.hidden
        narrow_parameters = spec.parameters - wide_parameters
        return int((narrow_parameters * GPU_FORMATS[weight_format] + wide_parameters * 16) / 8)
    bits = _BITS.get(weight_format) or gguf_names().get(weight_format)
    if bits is None:
        raise KeyError(f"unknown weight format {weight_format!r}")
    return int(spec.parameters * bits / 8)


def bytes_of_pass(spec: ModelSpec, weight_format: str) -> tuple[float, float]:
    """Return the bytes of weights that every pass reads, and those of all experts.

    Raises KeyError if the format is unknown.
    """
    total_bytes = weight_bytes(spec, weight_format)
    if weight_format in GPU_FORMATS:
        experts = 0 if spec.experts is None else spec.experts.parameters
        expert_bytes = experts * GPU_FORMATS[weight_format] / 8
        return total_bytes - 2 * spec.looked_up_parameters - expert_bytes, expert_bytes
    shared_bytes = spec.step_weight_bytes(0, total_bytes)
    return shared_bytes, spec.step_weight_bytes(math.inf, total_bytes) - shared_bytes


def known_format(text: str) -> str:
    """Return a weight format with upper and lower case corrected. It may be any format that
    Crossover writes or that a GGUF file may have.

    Raises UnsupportedModel for an unknown format; the message suggests similar ones.
    """
    names = list(dict.fromkeys((*GGUF_FORMATS, *_BITS, *gguf_names())))
    if text in names:  # BF16 is a format of GGUF files, bf16 one of safetensors
        return text
    by_letters = {name.lower(): name for name in reversed(names)}
    if text.lower() in by_letters:
        return by_letters[text.lower()]
    matches = difflib.get_close_matches(text.lower(), by_letters, 3)
    near = [by_letters[match] for match in matches]
    examples = ("Q4_0", "Q4_K_M", "Q8_0", "int4", "int8", "bf16")
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Examples: {', '.join(examples)}."
    raise UnsupportedModel(f"{text!r} is not a known weight format. {hint}")


def known_gpu_format(text: str) -> str:
    """Return a weight format of GPUs with upper and lower case corrected: one of GPU_FORMATS, or a
    format that `known_format` knows. Raises UnsupportedModel for an unknown format."""
    if text.lower() in GPU_FORMATS:
        return text.lower()
    try:
        return known_format(text)
    except UnsupportedModel as problem:
        raise UnsupportedModel(
            f"{text!r} is not a known weight format of GPUs. Available formats: "
            f"{', '.join(GPU_FORMATS)}, and those of GGUF files"
        ) from problem
