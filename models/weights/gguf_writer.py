"""Writes a GGUF file tensor by tensor.

write_file(spec, "Q4_0", path, data=lambda tensor: [bytes(tensor.bytes)])
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import gguf
import numpy as np

from crossover.models.gguf.shapes import GgufShape
from crossover.models.shape.model_families import FAMILIES
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.text.chat_template import CHATML
from crossover.models.text.tokenizer import SPECIAL_TOKENS, shipped
from crossover.models.weights.weight_formats import GgufTensorLayout, gguf_tensors
from crossover.models.weights.weights_manifest import Progress


def write_file(
    spec: ModelSpec,
    weight_format: str,
    path: Path,
    data: Callable[[GgufTensorLayout], Iterable[bytes | memoryview]],
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file with the shipped tokenizer. `data` returns the bytes of a tensor, in
    chunks."""
    writer = _writer(path, FAMILIES[spec.family].gguf, weight_format)
    _add_shape(writer, spec)
    _add_vocabulary(writer, spec.vocabulary)
    tensors = gguf_tensors(spec, weight_format)
    _write(writer, path, tensors, data, spec.name, weight_format, progress)


def write_shape_file(
    name: str,
    shape: GgufShape,
    weight_format: str,
    path: Path,
    stream: Callable[[str, str], Iterable[bytes | memoryview]],
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file of a shape of crossover.models.gguf.shapes with the shipped tokenizer.

    `stream` returns the bytes of a tensor, in chunks, by its name and type.
    """
    writer = _writer(path, shape.family.architecture, weight_format)
    writer.add_name(name)
    add_methods = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in shape.metadata().items():
        add_methods[type(value)](key, value)
    writer.add_quantization_version(2)
    _add_vocabulary(writer, shape.sizes.vocabulary)
    tensors = [
        GgufTensorLayout(tensor, None, sizes, shape.tensor_type(tensor, sizes))
        for tensor, sizes in shape.tensors().items()
    ]
    _write(
        writer,
        path,
        tensors,
        lambda tensor: stream(tensor.name, tensor.type),
        name,
        weight_format,
        progress,
    )


def _writer(path: Path, architecture: str, weight_format: str) -> gguf.GGUFWriter:
    logging.getLogger("gguf").setLevel(logging.WARNING)
    writer = gguf.GGUFWriter(path, architecture)
    file_type = "ALL_F32" if weight_format == "F32" else f"MOSTLY_{weight_format}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    return writer


def _write(
    writer: gguf.GGUFWriter,
    path: Path,
    tensors: Sequence[GgufTensorLayout],
    data: Callable[[GgufTensorLayout], Iterable[bytes | memoryview]],
    name: str,
    weight_format: str,
    progress: Progress | None,
) -> None:
    """Write the header, then one tensor after the other."""
    for tensor in tensors:
        kind, floats = gguf.GGMLQuantizationType[tensor.type], np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, floats, tensor.bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    total_bytes = sum(tensor.bytes for tensor in tensors)
    done_bytes = 0
    with path.open("ab") as out:
        for tensor in tensors:
            out.write(bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            written = sum(map(out.write, data(tensor)))
            if written != tensor.bytes:
                raise ValueError(
                    f"The tensor {tensor.name} has {written} bytes instead of {tensor.bytes}"
                )
            done_bytes += written
            if progress:
                progress(f"writing {name}-{weight_format}.gguf", done_bytes / total_bytes)
        out.write(bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _add_shape(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Add the metadata of the model's shape."""
    writer.add_name(spec.name)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_epsilon)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocabulary)
    writer.add_quantization_version(2)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add the shipped tokenizer, cut or padded to `size` tokens."""
    model = shipped(size)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model["merges"]:
        writer.add_token_merges([f"{left} {right}" for left, right in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
