"""Safetensors to GGUF, checked against the source.

    make_gguf("SmolLM2-135M", "smollm2-135m-Q4_0.gguf", "Q4_0")

Weights go unchanged into a GGUF file of the source's own precision (the query and key rows of Llama
and Mistral reordered: llama.cpp rotates neighbours, transformers rotates halves). llama.cpp's
quantiser makes the wanted format from it. Then three things are checked, else nothing is left
behind: every tensor of the file is the source's, as near as its type can hold it; the tokenizer
cuts text as the source's does; llama.cpp's logits on text are those of transformers with the file's
own weights, dequantised. None of these depends on how coarse the format is. What the format costs
(KL divergence and greedy agreement with the float model) is kept in the manifest.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.compare_logits import (
    Comparison,
    Floats,
    Ids,
    compared_ids,
    distance_of,
    logits_of,
    reference_fits,
)
from models.convert_from_gguf import dequantised
from models.convert_tokenizer import compare_tokenizers, gguf_vocabulary
from models.errors import BrokenWeights, UnsupportedModel
from models.formats import GGUF_FORMATS, GgufTensor, check_made, gguf_name
from models.gguf_reader import read_header
from models.gguf_vocabulary import GgufTokenizer, llama_library, read_by_child
from models.gguf_writer import ARCHITECTURES, write_file
from models.hf_config import read_config
from models.manifest import Manifest, Progress, atomic_file, manifest_path, write_manifest
from models.random_quant_blocks import to_bf16
from models.random_weights import rope_factors
from models.safetensors_reader import Stored, check_tensors, read_tensors
from models.source_and_manifest import Result, manifest_of, source_spec
from models.spec import ModelSpec
from models.tokenizer import load_tokenizer

OWN_FORMAT = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
# Greatest distance (compare.Comparison) of llama.cpp's logits from transformers' with the same
# weights: llama.cpp rounds activations to the weights' precision, to 8 bits for quantised ones.
LIMITS = {"F32": 1e-3, "F16": 1e-2, "BF16": 5e-2}
QUANTISED_LIMIT = 0.35
# Greatest root mean square of a tensor's rounding, over that of the tensor; the worst that blocks
# of one large weight among small ones can have. Another tensor, or rows in another order: 1.4.
ROUNDING = {
    "F32": 0.0,
    "F16": 1e-3,
    "BF16": 4e-3,
    "Q8_0": 0.03,
    "Q6_K": 0.2,
    "Q5_0": 0.25,
    "Q5_1": 0.25,
    "Q5_K": 0.25,
    "Q4_0": 0.4,
    "Q4_K": 0.4,
}
_CHUNK_ROWS_BYTES = 64 << 20


def make_gguf(
    hf_folder: str | Path,
    out_file: str | Path,
    weight_format: str = "Q4_0",
    *,
    spec: ModelSpec | None = None,
    sequences: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Convert a Hugging Face folder to a GGUF file, replaced if it was there; returns its manifest.

    `spec`: the shape that the folder must have. `sequences`: token ids to compare on, all of one
    length; None: of text. Where the float32 reference does not fit into free memory, logits are not
    compared, `progress` says so, and the manifest has no quality. Raises UnsupportedModel,
    BrokenWeights.
    """
    say = progress or (lambda what, fraction: None)
    source, target = Path(hf_folder), Path(out_file)
    check_made(weight_format)
    found = source_spec(source, spec)
    manifest_path(target).unlink(missing_ok=True)
    with atomic_file(target) as temporary:
        _write(source, found, weight_format, temporary, say)
        say("comparing the tokenizers", None)
        compare_tokenizers(load_tokenizer(source), _own_tokenizer(temporary, source), source.name)
        say("comparing the weights with the source's", None)
        is_compared = reference_fits(found)
        weights = _checked_weights(source, temporary, found, keep=is_compared)
        quality = None
        if is_compared:
            say("comparing the logits with the source's", None)
            quality = compare(source, temporary, found, weights, sequences)
        else:
            say("logits not compared: the float32 reference does not fit into free memory", None)
        result = Result("gguf", weight_format, found, quality)
        manifest = manifest_of(source, {target.name: temporary}, result)
    write_manifest(target, manifest)
    return manifest


def _write(source: Path, spec: ModelSpec, weight_format: str, out: Path, say: Progress) -> None:
    """The GGUF file in the source's own precision, then in the wanted format."""
    own_format = OWN_FORMAT[check_tensors(source, spec)]
    vocabulary = gguf_vocabulary(source, spec.vocabulary)
    stored = read_tensors(source)
    # `making` finds what a killed conversion leaves by this name.
    left = f".{out.name.lstrip('.')}."
    with tempfile.TemporaryDirectory(".part", left, dir=out.parent) as scratch:
        whole = Path(scratch, "own.gguf")
        write_file(
            spec,
            own_format,
            vocabulary,
            whole,
            lambda tensor: _data(source, stored, spec, tensor),
            say,
            "copying weights",
        )
        if weight_format == own_format:
            os.replace(whole, out)
            return
        say(f"quantising to {weight_format}", None)
        quantise(whole, out, weight_format)


def quantise(source: Path, target: Path, weight_format: str, threads: int | None = None) -> None:
    """Requantise a GGUF file with llama.cpp. Raises BrokenWeights where llama.cpp refuses."""
    llama = llama_library()
    params = llama.llama_model_quantize_default_params()
    params.ftype = GGUF_FORMATS[weight_format][1]
    params.nthread = threads or len(os.sched_getaffinity(0))
    status = llama.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    if status != 0:
        raise BrokenWeights(
            f"llama.cpp cannot quantise {source.name} to {weight_format}: status {status}"
        )


def compare(
    source: Path,
    file: Path,
    spec: ModelSpec,
    weights: dict[str, Floats],
    sequences: Sequence[Sequence[int]] | None = None,
) -> Comparison:
    """llama.cpp's logits on `file` against transformers' on the source's float weights.

    Raises BrokenWeights where they are not those of `weights`, the file's own.
    """
    import torch

    ids, config = compared_ids(source, spec, sequences), read_config(source)
    held = {name: torch.from_numpy(values) for name, values in weights.items()}
    logits = gguf_logits(file, ids)
    weight_format = read_header(file).weight_format
    distance_of(logits_of(config, held, ids), logits).check(
        LIMITS.get(weight_format, QUANTISED_LIMIT), f"the {weight_format} file of {source.name}"
    )
    stored = read_tensors(source)
    plain = {
        tensor.name: torch.from_numpy(_floats(source, stored[tensor.name], tensor.name))
        for tensor in spec.tensors()
    }
    return distance_of(logits_of(config, plain, ids), logits)


def _checked_weights(source: Path, file: Path, spec: ModelSpec, keep: bool) -> dict[str, Floats]:
    """The file's tensors as transformers names and orders them; {} unless they are kept.

    Raises BrokenWeights with the first that is not the source's.
    """
    header, stored = read_header(file), read_tensors(source)
    kept: dict[str, Floats] = {}
    for tensor in spec.tensors():
        wanted = _floats(source, stored[tensor.name], tensor.name)
        kind = header.tensors[gguf_name(tensor.name)].type
        begin, error, size = 0, 0.0, 0.0
        pieces = []
        for values in dequantised(header, spec, tensor):
            want = wanted[begin : begin + len(values)]
            begin += len(values)
            error += float(np.sum((values - want) ** 2))
            size += float(np.sum(want**2))
            if keep:
                pieces.append(values)
        if not error <= ROUNDING[kind] ** 2 * size:
            raise BrokenWeights(
                f"the tensor {tensor.name} of {source.name} is another one in the file that was "
                f"made: {(error / max(size, 1e-30)) ** 0.5:.2g} away, more than {ROUNDING[kind]:g}"
            )
        if keep:
            kept[tensor.name] = np.concatenate(pieces)
    return kept


def _own_tokenizer(file: Path, source: Path) -> GgufTokenizer:
    """The file's tokenizer, read by a child first: llama.cpp ends a process on a vocabulary that it
    does not expect."""
    read_by_child(file, f"the tokenizer of {source.name}")
    return GgufTokenizer(file)


def gguf_logits(file: Path, ids: Ids) -> Floats:
    """llama.cpp's logits [sequences, tokens, vocabulary], with a float32 KV cache."""
    llama = llama_library()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(str(file).encode(), params)
    if not model:
        raise BrokenWeights(f"llama.cpp cannot load {file.name}")
    try:
        vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        settings = llama.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = max(64, ids.shape[1])
        settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
        settings.type_k = settings.type_v = 0  # GGML_TYPE_F32
        settings.flash_attn_type = 0  # off: it rounds to float16
        return np.stack([_logits(llama, model, settings, row, vocabulary) for row in ids])
    finally:
        llama.llama_model_free(model)


def _logits(llama: Any, model: Any, settings: Any, row: Ids, vocabulary: int) -> Floats:
    context = llama.llama_init_from_model(model, settings)
    if not context:
        raise BrokenWeights("llama.cpp cannot make a context for the comparison")
    batch = llama.llama_batch_init(len(row), 0, 1)
    try:
        batch.n_tokens = len(row)
        for position, token in enumerate(row):
            batch.token[position], batch.pos[position] = int(token), position
            batch.n_seq_id[position], batch.seq_id[position][0], batch.logits[position] = 1, 0, 1
        status = llama.llama_decode(context, batch)
        if status != 0:
            raise BrokenWeights(
                f"llama.cpp cannot run the converted model: llama_decode gives {status}"
            )
        return np.ctypeslib.as_array(llama.llama_get_logits(context), (len(row), vocabulary)).copy()
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)


def _data(
    folder: Path, stored: dict[str, Stored], spec: ModelSpec, tensor: GgufTensor
) -> Iterator[bytes]:
    """One tensor's bytes in the type that the GGUF file gives it, a few rows at a time."""
    if tensor.hf_name is None:
        assert spec.rope_scaling is not None
        yield rope_factors(spec, spec.rope_scaling).tobytes()
        return
    entry = stored[tensor.hf_name]
    raw = _bits(folder, entry, tensor.hf_name)
    if ARCHITECTURES[spec.family] == "llama":
        for name, heads in (("q_proj", spec.heads), ("k_proj", spec.kv_heads)):
            if f".{name}." in tensor.hf_name:
                raw = _interleaved(raw, heads)
    rows = max(1, _CHUNK_ROWS_BYTES // max(1, raw[0:1].nbytes))
    for begin in range(0, len(raw), rows):
        yield _as_type(raw[begin : begin + rows], entry.dtype, tensor.type)


def _bits(folder: Path, entry: Stored, name: str) -> npt.NDArray[Any]:
    """A stored tensor's bit patterns. Raises UnsupportedModel."""
    bits = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
    if entry.dtype not in bits:
        raise UnsupportedModel(
            f"{folder.name} has tensor {name} of type {entry.dtype}; known: {', '.join(bits)}"
        )
    return np.memmap(folder / entry.file, bits[entry.dtype], "r", entry.start, entry.shape)


def _floats(folder: Path, entry: Stored, name: str) -> Floats:
    raw = np.ascontiguousarray(_bits(folder, entry, name))
    if entry.dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16 if entry.dtype == "F16" else np.float32).astype(np.float32)


def _interleaved(raw: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of each head from (first half, second half) to pairs: llama.cpp's rotary order."""
    halves = raw.reshape(heads, 2, raw.shape[0] // heads // 2, *raw.shape[1:])
    return halves.swapaxes(1, 2).reshape(raw.shape)


def _as_type(raw: npt.NDArray[Any], have: str, want: str) -> bytes:
    """Bit patterns of a float type as bytes of another. Raises BrokenWeights on overflow."""
    if have == want:
        return raw.tobytes()
    raw = np.ascontiguousarray(raw)
    if have == "BF16":
        values: npt.NDArray[Any] = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.view(np.float16 if have == "F16" else np.float32)
    if want == "BF16":
        return to_bf16(np.ascontiguousarray(values, np.float32)).tobytes()
    if want == "F16" and values.size and float(np.abs(values).max()) > 65504:
        raise BrokenWeights("a weight is too large for float16; choose another format")
    return values.astype(np.float32 if want == "F32" else np.float16).tobytes()
