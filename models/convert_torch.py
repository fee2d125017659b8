"""Safetensors -> safetensors whose matrices are packed as int8, dynamic-int8 or int4, for the torch backend on the CPU.

    make_torch("SmolLM2-135M", "smollm2-135m-torch-int4", "int4")

Packed offline, because quantising at load leaves the float original in the heap (a 1B model of 1.3 GB then peaks at 6.7 GB). Symmetric,
rounded to nearest: int8 with one scale per output, int4 with one scale per 32 inputs of an output. Two int4 weights share a byte, the
earlier one in the low half, each stored as weight + 8; the kernel's own layout depends on the CPU and is made at load. dynamic-int8 has the
weights of int8 and is multiplied in whole numbers: activations, too, are rounded to 7 bits, with a scale for each token. The embedding
stays bfloat16, and a tied head is written apart, packed. The result is compared with the source in float32, as convert_onnx does, and the
KL divergence kept in the manifest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from models.convert_onnx import TRANSFORMERS_LOCK, Comparison, distance_of, fixed_sequences
from models.errors import BrokenWeights, UnsupportedModel
from models.hf_config import read_config, spec_of, v4_config
from models.manifest import Manifest, Progress, atomic_folder, converter, file_facts, read_manifest, write_manifest
from models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32
PRECISIONS = ("int8", "dynamic-int8", "int4")
ACTIVATION_STEPS = 63  # dynamic-int8: activations are whole numbers from -63 to 63 times a token's scale; the engine imports this
LIMITS = {"int8": 0.35, "dynamic-int8": 0.9, "int4": 1.1}  # see convert_onnx.LIMITS


def make_torch(
    hf_folder: str | Path, out_folder: str | Path, precision: str, *, spec: ModelSpec | None = None, progress: Progress | None = None
) -> Path:
    """Pack a Hugging Face folder; returns `out_folder`, replaced whole if it was there. Raises UnsupportedModel, BrokenWeights."""
    import torch
    from safetensors.torch import save_file

    say = progress or (lambda what, fraction: None)
    if precision not in PRECISIONS:
        raise UnsupportedModel(f"there is no packed precision {precision!r} for torch; there are {', '.join(PRECISIONS)}")
    source, target = Path(hf_folder), Path(out_folder)
    config = read_config(source)
    found = spec_of(config, source.name)
    if spec is not None and msgspec.structs.replace(spec, name=found.name) != found:
        raise BrokenWeights(f"{source.name} does not hold {spec.name}: its config.json describes another shape")
    found = spec or found
    tensors: dict[str, Tensor] = {}
    shapes = {tensor.name: tensor for tensor in found.tensors()}
    if precision == "int4" and any(tensor.shape[1] % GROUP for tensor in shapes.values() if tensor.is_matrix):
        raise UnsupportedModel(f"{found.name} has matrices whose rows are no multiple of {GROUP}, which int4 blocks need")
    for done, (name, tensor) in enumerate(_stored(source, shapes)):
        say(f"packing {name}", done / len(shapes))
        if shapes[name].is_matrix and name != "model.embed_tokens.weight":
            tensors.update(_packed(name.removesuffix(".weight"), tensor, precision))
            continue
        tensors[name] = tensor.to(torch.bfloat16) if shapes[name].is_matrix else tensor.float()
        if name == "model.embed_tokens.weight" and found.tied:
            tensors.update(_packed("lm_head", tensor, precision))
    say("comparing the logits with the source's", 0.9)
    comparison = _compare(source, config, tensors, found, precision == "dynamic-int8")
    if not comparison.distance <= LIMITS[precision]:
        raise BrokenWeights(
            f"{precision} changes {found.name} too much: its logits are {comparison.distance:.3g} away from the source's, "
            f"more than {LIMITS[precision]:g}"
        )
    before = read_manifest(source)
    with atomic_folder(target) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "crossover_format": precision})
        (folder / "config.json").write_text(json.dumps(v4_config(config), indent=2) + "\n", encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        manifest = Manifest(
            kind="hf",
            spec=found,
            weight_format=precision,
            source=before.source if before is not None else source.name,
            files={file.name: file_facts(file) for file in sorted(folder.iterdir())},
            generator=converter("hf"),
            seed=before.seed if before is not None else None,
            quality_kl_nats=comparison.kl_nats,
        )
        write_manifest(folder, manifest)
    say(f"{target.name} is made", 1.0)
    return target


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [out, in] and float32 scales [out]: weight ~ int8 * scale."""
    import torch

    scale = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def int4_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [out, in / 2] of two values + 8 each, and float32 scales [out, in / GROUP]."""
    import torch

    grouped = weight.view(weight.shape[0], -1, GROUP)
    scale = grouped.abs().amax(2).clamp(min=1e-12) / 7
    values = ((grouped / scale[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8).flatten(1)
    return values[:, 0::2] | (values[:, 1::2] << 4), scale


def unpacked(module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The float32 matrix that packed tensors stand for."""
    import torch

    scale = tensors[f"{module}.scale"]
    if f"{module}.int8" in tensors:
        return tensors[f"{module}.int8"].float() * scale[:, None]
    nibbles = tensors[f"{module}.int4"]
    values = torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(1).float() - 8
    return (values.view(values.shape[0], -1, GROUP) * scale[..., None]).flatten(1)


def rounded_tokens(x: Tensor) -> Tensor:
    """Activations [..., inputs] as dynamic-int8 sees them: each token rounded to ACTIVATION_STEPS steps either side of 0."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (x / scale * ACTIVATION_STEPS).round() / ACTIVATION_STEPS * scale


def _compare(source: Path, config: dict[str, Any], tensors: Mapping[str, Tensor], spec: ModelSpec, is_dynamic: bool) -> Comparison:
    """transformers in float32 with the source's weights against the same with the packed ones (and with rounded activations)."""
    with TRANSFORMERS_LOCK:
        return _compare_alone(source, config, tensors, spec, is_dynamic)


def _compare_alone(source: Path, config: dict[str, Any], tensors: Mapping[str, Tensor], spec: ModelSpec, is_dynamic: bool) -> Comparison:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = v4_config(config)
    built = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built, dtype=torch.float32, attn_implementation="eager")
    shapes = {tensor.name: tensor for tensor in spec.tensors()}
    ids = torch.from_numpy(np.array(fixed_sequences(spec.vocabulary), np.int64))
    out = []
    for packed in (False, True):
        state = {}
        for name, tensor in _stored(source, shapes):
            module = name.removesuffix(".weight")
            state[name] = unpacked(module, tensors) if packed and f"{module}.scale" in tensors else tensor.float()
        if spec.tied:
            state["lm_head.weight"] = unpacked("lm_head", tensors) if packed else state["model.embed_tokens.weight"]
        model.load_state_dict(state, strict=True, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(built)  # its table is no parameter, and was made without memory
        if packed and is_dynamic:
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_pre_hook(lambda _, inputs: (rounded_tokens(inputs[0]),))
        with torch.inference_mode():
            out.append(model(ids).logits.float().numpy())
    return distance_of(*out)


def _packed(module: str, weight: Tensor, precision: str) -> dict[str, Tensor]:
    values, scale = int4_groups(weight.float()) if precision == "int4" else int8_rows(weight.float())
    return {f"{module}.{'int4' if precision == 'int4' else 'int8'}": values, f"{module}.scale": scale}


def _stored(source: Path, shapes: Mapping[str, object]) -> list[tuple[str, Tensor]]:
    """The named tensors of a folder, memory-mapped."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in list(opened.keys()):
                    if name in shapes:
                        found[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as problem:
            raise BrokenWeights(f"{file.name} of {source.name} cannot be read: {problem}; it may be cut off") from problem
    missing = [name for name in shapes if name not in found]
    if missing:
        raise BrokenWeights(f"{source.name} lacks the tensor {missing[0]!r}")
    return [(name, found[name]) for name in shapes]
