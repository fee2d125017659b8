"""Safetensors to packed int8, dynamic-int8 or int4 matrices for the torch backend on the CPU.

    make_torch("SmolLM2-135M", "smollm2-135m-torch-int4", "int4")

Packed offline: quantising at load leaves the float original in the heap (a 1B model of 1.3 GB peaks
at 6.7 GB). Symmetric, rounded to nearest: int8 has one scale an output, int4 one scale for 32
inputs of an output. Two int4 weights share a byte, the earlier in the low half, each stored as
weight + 8; the kernel's layout depends on the CPU and is made at load. dynamic-int8 has int8's
weights and whole-number products: activations are rounded to 7 bits with one scale a token. The
embedding stays bfloat16; a tied head is written apart, packed. Each packed matrix must be the
source's within its rounding; what that costs in logits is measured on text and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.convert.compare import Comparison, compared_ids, distance_of, logits_of
from models.convert.source_and_manifest import (
    Result,
    copy_texts,
    source_spec,
    write_folder_manifest,
)
from models.errors import BrokenWeights, UnsupportedModel
from models.manifest import Progress, atomic_folder
from models.readers.config import read_config
from models.spec import ModelSpec

GROUP = 32
PRECISIONS = ("int8", "dynamic-int8", "int4")
# dynamic-int8: activations are whole numbers from -63 to 63 times a token's scale
ACTIVATION_STEPS = 63


def make_torch(
    hf_folder: str | Path,
    out_folder: str | Path,
    precision: str,
    *,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
) -> Path:
    """Pack a Hugging Face folder; returns `out_folder`, replaced whole if it was there.

    Raises UnsupportedModel, BrokenWeights.
    """
    say = progress or (lambda what, fraction: None)
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise UnsupportedModel(
            f"there is no packed precision {precision!r} for torch; there are {known}"
        )
    source, target = Path(hf_folder), Path(out_folder)
    found = source_spec(source, spec)
    tensors = _pack(source, found, precision, say)
    say("comparing the logits with the source's", 0.9)
    comparison = _compare(source, tensors, found, precision == "dynamic-int8")
    with atomic_folder(target) as folder:
        metadata = {"format": "pt", "crossover_format": precision}
        save_file(tensors, folder / "model.safetensors", metadata=metadata)
        copy_texts(source, folder)
        result = Result("hf", precision, found, comparison)
        write_folder_manifest(source, folder, result)
    say(f"{target.name} is made", 1.0)
    return target


def _pack(source: Path, spec: ModelSpec, precision: str, say: Progress) -> dict[str, Tensor]:
    """Every tensor of the packed folder by its name."""
    shapes = {tensor.name: tensor for tensor in spec.tensors()}
    matrices = [tensor for tensor in shapes.values() if tensor.is_matrix]
    if precision == "int4" and any(matrix.shape[1] % GROUP for matrix in matrices):
        raise UnsupportedModel(
            f"{spec.name} has matrices whose rows are no multiple of {GROUP}, "
            "which int4 blocks need"
        )
    out: dict[str, Tensor] = {}
    for done, (name, tensor) in enumerate(_stored(source, shapes)):
        say(f"packing {name}", done / len(shapes))
        is_embedding = name == "model.embed_tokens.weight"
        if shapes[name].is_matrix and not is_embedding:
            out.update(_packed(name.removesuffix(".weight"), tensor, precision))
            continue
        out[name] = tensor.to(torch.bfloat16) if is_embedding else tensor.float()
        if is_embedding and spec.tied:
            out.update(_packed("lm_head", tensor, precision))
    return out


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and float32 scales [out]: weight ~ int8 * scale."""
    scale = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def int4_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [out, in / 2] of two values + 8 each, and float32 scales [out, in / GROUP]."""
    grouped = weight.view(weight.shape[0], -1, GROUP)
    scale = grouped.abs().amax(2).clamp(min=1e-12) / 7
    values = ((grouped / scale[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8).flatten(1)
    return values[:, 0::2] | (values[:, 1::2] << 4), scale


def unpacked(module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The float32 matrix that packed tensors stand for."""
    scale = tensors[f"{module}.scale"]
    if f"{module}.int8" in tensors:
        return tensors[f"{module}.int8"].float() * scale[:, None]
    nibbles = tensors[f"{module}.int4"]
    values = torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(1).float() - 8
    return (values.view(values.shape[0], -1, GROUP) * scale[..., None]).flatten(1)


def rounded_tokens(x: Tensor) -> Tensor:
    """Activations [..., inputs] rounded to whole steps of each token's own scale."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (x / scale * ACTIVATION_STEPS).round() / ACTIVATION_STEPS * scale


def _compare(
    source: Path, tensors: Mapping[str, Tensor], spec: ModelSpec, is_dynamic: bool
) -> Comparison:
    """transformers in float32 with the source's weights against the same with the packed ones.

    `is_dynamic`: the latter with rounded activations.
    """
    shapes = {tensor.name: tensor for tensor in spec.tensors()}
    plain = {name: tensor.float() for name, tensor in _stored(source, shapes)}
    if spec.tied:
        plain["lm_head.weight"] = plain["model.embed_tokens.weight"]
    packed = {name: _restored(name, tensor, tensors) for name, tensor in plain.items()}
    ids = compared_ids(source, spec)
    config = read_config(source)
    before = logits_of(config, plain, ids)
    after = logits_of(config, packed, ids, rounded_tokens if is_dynamic else None)
    return distance_of(before, after)


def _restored(name: str, plain: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """A float matrix as it was packed. Raises BrokenWeights where that is another matrix."""
    module = name.removesuffix(".weight")
    if f"{module}.scale" not in tensors:
        return plain
    found, scale = unpacked(module, tensors), tensors[f"{module}.scale"]
    groups = scale.view(len(plain), -1, 1)  # half a step is all that rounding may take
    error = (found - plain).abs().view(len(plain), groups.shape[1], -1)
    if not bool((error <= 0.501 * groups).all()):
        raise BrokenWeights(f"the packed form of {name} is another matrix than the source's")
    return found


def _packed(module: str, weight: Tensor, precision: str) -> dict[str, Tensor]:
    kind = "int4" if precision == "int4" else "int8"
    values, scale = (int4_groups if kind == "int4" else int8_rows)(weight.float())
    return {f"{module}.{kind}": values, f"{module}.scale": scale}


def _stored(source: Path, shapes: Mapping[str, object]) -> list[tuple[str, Tensor]]:
    """The named tensors of a folder, memory-mapped."""
    found: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in list(opened.keys()):
                    if name in shapes:
                        found[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as problem:
            raise BrokenWeights(
                f"{file.name} of {source.name} cannot be read: {problem}; it may be cut off"
            ) from problem
    missing = [name for name in shapes if name not in found]
    if missing:
        raise BrokenWeights(f"{source.name} lacks the tensor {missing[0]!r}")
    return [(name, found[name]) for name in shapes]
