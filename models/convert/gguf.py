"""Safetensors to GGUF, checked against the source.

    make_gguf("SmolLM2-135M", "smollm2-135m-Q4_0.gguf", "Q4_0")

Weights go unchanged into a GGUF file of the source's own precision (the query and key rows of Llama
and Mistral reordered: llama.cpp rotates neighbours, transformers rotates halves). llama.cpp's
quantiser makes the wanted format from it. Then the file's tokenizer must cut text as the source's
does, and its logits must be those of transformers in float32 within LIMITS, else nothing is left
behind. The KL divergence to the float model is kept in the manifest.
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

from models.convert.compare import (
    Comparison,
    Floats,
    Ids,
    compared_ids,
    distance_of,
    reference_logits,
    stage,
)
from models.convert.gguf_tokenizer import PROBES, gguf_vocabulary
from models.convert.source_and_manifest import Result, manifest_of, source_spec
from models.errors import BrokenWeights, UnsupportedModel
from models.formats import GGUF_FORMATS, GgufTensor
from models.machine import available_bytes
from models.manifest import Manifest, Progress, atomic_file, manifest_path, write_manifest
from models.readers.safetensors import Stored, check_tensors, read_tensors
from models.spec import ModelSpec
from models.synthetic.gguf_writer import ARCHITECTURES, write_file
from models.synthetic.random_blocks import to_bf16
from models.synthetic.write import rope_factors
from models.tokenization.gguf import GgufTokenizer, llama_library
from models.tokenization.tokenizer import load_tokenizer

OWN_FORMAT = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
# Greatest distance (compare.Comparison). llama.cpp rounds activations to the weights' precision, so
# 16-bit weights are not at 0. Random weights magnify the rounding of quantised formats.
LIMITS: dict[str, float] = {
    "F32": 1e-3,
    "F16": 1e-2,
    "BF16": 5e-2,
    "Q8_0": 0.1,
    "Q4_0": 0.9,
    "Q4_K_M": 0.7,
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
    length; real text gives a better quality figure than the seeded ids. Where the float32
    reference does not fit into free memory, logits are not compared, `progress` says so, and
    `quality_kl_nats` is None. Raises UnsupportedModel, BrokenWeights.
    """
    say = progress or (lambda what, fraction: None)
    source, target = Path(hf_folder), Path(out_file)
    if weight_format not in GGUF_FORMATS:
        raise UnsupportedModel(
            f"unknown GGUF format {weight_format!r}; known: {', '.join(GGUF_FORMATS)}"
        )
    found = source_spec(source, spec)
    manifest_path(target).unlink(missing_ok=True)
    with atomic_file(target) as temporary:
        _write(source, found, weight_format, temporary, say)
        say("comparing the tokenizers", None)
        _compare_tokenizers(source, temporary)
        quality = None
        if _reference_fits(found):
            say("comparing the logits with the source's", None)
            comparison = compare(source, temporary, found, sequences)
            comparison.check(LIMITS[weight_format], f"the {weight_format} file of {source.name}")
            quality = comparison.kl_nats
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
    hf_folder: Path, file: Path, spec: ModelSpec, sequences: Sequence[Sequence[int]] | None = None
) -> Comparison:
    """Logits of a GGUF file against those of transformers in float32 on the same token ids."""
    ids = compared_ids(spec, sequences)
    with tempfile.TemporaryDirectory(prefix="crossover-") as staged:
        stage(hf_folder, Path(staged))
        reference = reference_logits(Path(staged), ids)
    return distance_of(reference, gguf_logits(file, ids))


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
    bits = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
    if entry.dtype not in bits:
        raise UnsupportedModel(
            f"{folder.name} has tensor {tensor.hf_name} of type {entry.dtype}; known: "
            f"{', '.join(bits)}"
        )
    raw: npt.NDArray[Any] = np.memmap(
        folder / entry.file, bits[entry.dtype], "r", entry.start, entry.shape
    )
    if ARCHITECTURES[spec.family] == "llama":
        for name, heads in (("q_proj", spec.heads), ("k_proj", spec.kv_heads)):
            if f".{name}." in tensor.hf_name:
                raw = _interleaved(raw, heads)
    rows = max(1, _CHUNK_ROWS_BYTES // max(1, raw[0:1].nbytes))
    for begin in range(0, len(raw), rows):
        yield _as_type(raw[begin : begin + rows], entry.dtype, tensor.type)


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


def _compare_tokenizers(folder: Path, file: Path) -> None:
    """Raises BrokenWeights with the first text that both cut differently."""
    theirs, ours = load_tokenizer(folder), GgufTokenizer(file)
    for text in PROBES:
        for parse_special in (False, True):
            want = theirs.encode(text, parse_special=parse_special)
            got = ours.encode(text, parse_special=parse_special)
            if want != got:
                raise BrokenWeights(
                    f"the tokenizer written for {folder.name} cuts {text!r} into {got}, the "
                    f"source's into {want}"
                )
    if ours.bos_id != theirs.bos_id:
        raise BrokenWeights(
            f"the tokenizer written for {folder.name} begins with token {ours.bos_id}, the "
            f"source's with {theirs.bos_id}"
        )


def _reference_fits(spec: ModelSpec) -> bool:
    return spec.parameters * 4 * 1.2 < available_bytes()
