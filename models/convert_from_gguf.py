"""A GGUF file back to float weights: a Hugging Face folder for the engines that read no GGUF.

    make_folder("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-bf16", spec=...)

The weights are those that the file's blocks stand for, rounded to bfloat16: as coarse as the file,
no coarser. Tokenizer, chat template and end tokens are the file's, compared on PROBES.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, dequantize

from models.conversion import finish
from models.convert_tokenizer import compare_tokenizers, hf_tokenizer_files
from models.errors import BrokenWeights, UnsupportedModel
from models.formats import gguf_name
from models.gguf_reader import GgufHeader, read_header
from models.manifest import Progress, atomic_folder
from models.random_quant_blocks import as_bytes, stored_as
from models.random_weights import hf_config, write_safetensors
from models.safetensors_reader import Floats
from models.spec import ModelSpec, TensorShape
from models.tokenizer import load_tokenizer

_CHUNK_BYTES = 64 << 20


def make_folder(
    file: str | Path,
    out_folder: str | Path,
    weight_format: str = "bf16",
    *,
    spec: ModelSpec,
    progress: Progress | None = None,
) -> None:
    """Rebuild `file`, whose shape is `spec`, as a folder, replaced whole if it was there.

    Raises UnsupportedModel where transformers' classes have not all parts of it, BrokenWeights.
    """
    source, target = Path(file), Path(out_folder)
    header = read_header(source, whole_arrays=True)
    part = header.unknown_part(spec)
    if part is not None:
        raise UnsupportedModel(
            f"{source.name} has {part}, which is served by llama_cpp only; for another engine give "
            "the model's folder of safetensors"
        )
    ids = {
        key: header.metadata.get(f"tokenizer.ggml.{key}")
        for key in ("bos_token_id", "eos_token_id")
    }
    with atomic_folder(target) as folder:
        texts = hf_tokenizer_files(source, header.metadata)
        ends = texts["generation_config.json"]["eos_token_id"]
        if ids["eos_token_id"] is None:
            ids["eos_token_id"] = next(iter(ends), None)
        texts["config.json"] = hf_config(spec, "bf16") | ids
        for name, content in texts.items():
            indent = None if "tokenizer" in name else 2
            text = json.dumps(content, ensure_ascii=False, indent=indent)
            (folder / name).write_text(text + "\n", encoding="utf-8")
        compare_tokenizers(load_tokenizer(source), load_tokenizer(folder), source.name)

        def data(tensor: TensorShape) -> Iterator[memoryview]:
            for values in dequantised(header, spec, tensor):
                yield as_bytes(stored_as("BF16", values))

        write_safetensors(spec, folder, "bf16", data, progress)
        finish(source, folder, "hf", "bf16", spec)


def dequantised(header: GgufHeader, spec: ModelSpec, tensor: TensorShape) -> Iterator[Floats]:
    """A tensor's float32 values, some rows at a time, in transformers' order of rows."""
    name = gguf_name(tensor.name)
    entry = header.tensors[name]
    rows = tensor.shape[0] if tensor.is_matrix else 1
    raw = np.memmap(header.path, np.uint8, "r", entry.start, (rows, entry.bytes // rows))
    is_rotated = header.metadata["general.architecture"] == "llama" and name.endswith(
        ("attn_q.weight", "attn_k.weight")
    )
    step = rows if is_rotated else max(1, _CHUNK_BYTES // (4 * tensor.shape[-1]))
    for begin in range(0, rows, step):
        try:
            values = dequantize(
                np.ascontiguousarray(raw[begin : begin + step]), GGMLQuantizationType[entry.type]
            )
        except NotImplementedError as problem:
            raise UnsupportedModel(
                f"tensor {name} of {Path(header.path).name} is of type {entry.type}, whose floats "
                "only llama.cpp can read"
            ) from problem
        if not np.isfinite(values).all():
            raise BrokenWeights(f"tensor {name} of {Path(header.path).name} is not all numbers")
        if is_rotated:
            values = _in_halves(values, spec.heads if "attn_q" in name else spec.kv_heads)
        yield values.astype(np.float32, copy=False).reshape(-1, *tensor.shape[1:])


def _in_halves(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of each head from neighbouring pairs to (first half, second half): from llama.cpp's
    rotary order to transformers'."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
