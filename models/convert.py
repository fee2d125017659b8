"""Safetensors -> GGUF, checked against the source before anyone may use it.

    make_gguf("SmolLM2-135M", "smollm2-135m-Q4_0.gguf", "Q4_0")

The folder's weights go into a GGUF file of their own precision unchanged (BF16, F16 or F32; the query and key rows of Llama and Mistral
reordered, since llama.cpp rotates neighbours where transformers rotates halves), and llama.cpp's quantiser makes the wanted format from
that. Then two comparisons: the tokenizer in the file gives the ids that the source's gives, and the logits of the file are those of
transformers in float32 on fixed token sequences. Too far off (LIMITS) is an error and nothing is left behind. The KL divergence to the
float model is kept in the manifest as the format's quality.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import psutil

from models.blocks import to_bf16
from models.convert_onnx import Comparison, distance_of, fixed_sequences, reference_logits
from models.convert_tokenizer import PROBES, gguf_vocabulary
from models.errors import BrokenWeights, UnsupportedModel
from models.formats import GGUF_FORMATS, GgufTensor
from models.gguf_write import ARCHITECTURES, write_file
from models.hf_config import read_config, spec_of, v4_config
from models.manifest import Manifest, Progress, atomic_file, converter, file_facts, manifest_path, read_manifest, write_manifest
from models.safetensors_header import Stored, check_tensors, read_tensors
from models.spec import ModelSpec
from models.synthesis import rope_factors
from models.tokenizer import load_tokenizer
from models.tokenizer_gguf import GgufTokenizer, llama_library

OWN_FORMAT = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
# Greatest distance |file - source| / |source - its mean| (root mean squares over all logits) that is let through. Unrelated logits are at
# about 1.4. llama.cpp rounds activations to the weights' precision, so even unchanged 16-bit weights are not at 0; random weights magnify
# the rounding of quantised formats, so that their limits only catch a file that computes something else.
LIMITS: dict[str, float] = {"F32": 1e-3, "F16": 1e-2, "BF16": 5e-2, "Q8_0": 0.1, "Q4_0": 0.9, "Q4_K_M": 0.7}

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
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
    """Convert a Hugging Face folder to a GGUF file (replaced if it was there) and its manifest, which is returned.

    `spec`: what the folder is believed to hold. `sequences`: token ids to compare on, all of one length; real text of the model's kind
    gives a quality figure that means more than the seeded ids used otherwise. Where the float32 reference does not fit into the free
    memory the logits are not compared and `quality_kl_nats` is None, which `progress` is told. Raises UnsupportedModel, BrokenWeights.
    """
    say = progress or (lambda what, fraction: None)
    source, target = Path(hf_folder), Path(out_file)
    if weight_format not in GGUF_FORMATS:
        raise UnsupportedModel(f"unknown GGUF format {weight_format!r}; known: {', '.join(GGUF_FORMATS)}")
    found = spec_of(read_config(source), source.name)
    if spec is not None and msgspec.structs.replace(spec, name=found.name) != found:
        raise BrokenWeights(f"{source.name} does not hold {spec.name}: its config.json describes another shape")
    own_format = OWN_FORMAT[check_tensors(source, found)]
    vocabulary = gguf_vocabulary(source, found.vocabulary)
    stored = read_tensors(source)
    quality = None
    manifest_path(target).unlink(missing_ok=True)
    with atomic_file(target) as temporary, tempfile.TemporaryDirectory(prefix=".convert-", dir=target.parent) as scratch:
        whole = Path(scratch, "own.gguf")
        write_file(found, own_format, vocabulary, whole, lambda tensor: _data(source, stored, found, tensor), progress, "copying weights")
        if weight_format == own_format:
            os.replace(whole, temporary)
        else:
            say(f"quantising to {weight_format}", None)
            quantise(whole, temporary, weight_format)
            whole.unlink()
        say("comparing the tokenizers", None)
        _compare_tokenizers(source, temporary)
        if _reference_fits(found):
            say("comparing the logits with the source's", None)
            comparison = compare(source, temporary, found, sequences)
            if not comparison.distance <= LIMITS[weight_format]:  # also catches NaN
                raise BrokenWeights(
                    f"the {weight_format} file of {source.name} is wrong: its logits are {comparison.distance:.3g} away from the source's, "
                    f"more than {LIMITS[weight_format]:g} (greedy tokens agree at {comparison.agreement:.0%} of {comparison.positions})"
                )
            quality = comparison.kl_nats
        else:
            say("logits not compared: the float32 reference does not fit into the free memory", None)
        facts = file_facts(temporary)
    before = read_manifest(source)
    manifest = Manifest(
        kind="gguf",
        spec=spec or found,
        weight_format=weight_format,
        source=before.source if before is not None else source.name,
        files={target.name: facts},
        generator=converter("gguf"),
        seed=before.seed if before is not None else None,
        quality_kl_nats=quality,
    )
    write_manifest(target, manifest)
    return manifest


def quantise(source: Path, target: Path, weight_format: str, threads: int | None = None) -> None:
    """Requantise a GGUF file with llama.cpp. Raises BrokenWeights where llama.cpp refuses."""
    llama = llama_library()
    params = llama.llama_model_quantize_default_params()
    params.ftype = GGUF_FORMATS[weight_format][1]
    params.nthread = threads or len(os.sched_getaffinity(0))
    status = llama.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if status != 0:
        raise BrokenWeights(f"llama.cpp cannot quantise {source.name} to {weight_format}: status {status}")


def compare(hf_folder: Path, file: Path, spec: ModelSpec, sequences: Sequence[Sequence[int]] | None = None) -> Comparison:
    """Logits of a GGUF file against those of transformers in float32 over the same sequences."""
    ids = np.array(sequences if sequences is not None else fixed_sequences(spec.vocabulary), np.int64)
    if ids.ndim != 2 or ids.size == 0 or ids.min() < 0 or ids.max() >= spec.vocabulary or ids.shape[1] > spec.context:
        raise UnsupportedModel(f"sequences must be token ids below {spec.vocabulary}, all of one length up to {spec.context}")
    with tempfile.TemporaryDirectory(prefix="crossover-") as staged:
        # transformers must not read a foreign config.json itself: see models.hf_config.
        Path(staged, "config.json").write_text(json.dumps(v4_config(read_config(hf_folder))), encoding="utf-8")
        for weights in [*hf_folder.glob("*.safetensors"), *hf_folder.glob("*.safetensors.index.json")]:
            Path(staged, weights.name).symlink_to(weights.resolve())
        reference = reference_logits(Path(staged), ids)
    return distance_of(reference, gguf_logits(file, ids))


def gguf_logits(file: Path, ids: Ids) -> Floats:
    """llama.cpp's logits on the CPU, [sequences, tokens, vocabulary], with a float32 KV cache. Raises BrokenWeights."""
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
            raise BrokenWeights(f"llama.cpp cannot run the converted model: llama_decode gives {status}")
        return np.ctypeslib.as_array(llama.llama_get_logits(context), (len(row), vocabulary)).copy()
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)


def _data(folder: Path, stored: dict[str, Stored], spec: ModelSpec, tensor: GgufTensor) -> Iterator[bytes]:
    """One tensor's bytes in the type that the GGUF file gives it, a few rows at a time."""
    if tensor.hf_name is None:
        assert spec.rope_scaling is not None
        yield rope_factors(spec, spec.rope_scaling).tobytes()
        return
    entry = stored[tensor.hf_name]
    bits = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
    if entry.dtype not in bits:
        raise UnsupportedModel(f"{folder.name} has tensor {tensor.hf_name} of type {entry.dtype}; known: {', '.join(bits)}")
    raw: npt.NDArray[Any] = np.memmap(folder / entry.file, bits[entry.dtype], "r", entry.start, entry.shape)
    if ARCHITECTURES[spec.family] == "llama":
        for name, heads in (("q_proj", spec.heads), ("k_proj", spec.kv_heads)):
            if f".{name}." in tensor.hf_name:
                raw = _interleaved(raw, heads)
    rows = max(1, _CHUNK_ROWS_BYTES // max(1, raw[0:1].nbytes))
    for begin in range(0, len(raw), rows):
        yield _as_type(raw[begin : begin + rows], entry.dtype, tensor.type)


def _interleaved(raw: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of each head from (first half, second half) to pairs: llama.cpp's rotary order for the llama architecture."""
    return raw.reshape(heads, 2, raw.shape[0] // heads // 2, *raw.shape[1:]).swapaxes(1, 2).reshape(raw.shape)


def _as_type(raw: npt.NDArray[Any], have: str, want: str) -> bytes:
    """Bit patterns of one float type as bytes of another. Raises BrokenWeights for a value that the wanted type cannot hold."""
    if have == want:
        return raw.tobytes()
    raw = np.ascontiguousarray(raw)
    values = (raw.astype(np.uint32) << 16).view(np.float32) if have == "BF16" else raw.view(np.float16 if have == "F16" else np.float32)
    if want == "BF16":
        return to_bf16(np.ascontiguousarray(values, np.float32)).tobytes()
    if want == "F16" and values.size and float(np.abs(values).max()) > 65504:
        raise BrokenWeights("a weight is too large for float16; choose another format")
    return values.astype(np.float32 if want == "F32" else np.float16).tobytes()


def _compare_tokenizers(folder: Path, file: Path) -> None:
    """The file's tokenizer must cut text as the folder's does. Raises BrokenWeights with the text that differs."""
    theirs, ours = load_tokenizer(folder), GgufTokenizer(file)
    for text in PROBES:
        for parse_special in (False, True):
            want, got = theirs.encode(text, parse_special=parse_special), ours.encode(text, parse_special=parse_special)
            if want != got:
                raise BrokenWeights(f"the tokenizer written for {folder.name} cuts {text!r} into {got}, the source's into {want}")
    if ours.bos_id != theirs.bos_id:
        raise BrokenWeights(f"the tokenizer written for {folder.name} begins with token {ours.bos_id}, the source's with {theirs.bos_id}")


def _reference_fits(spec: ModelSpec) -> bool:
    return spec.parameters * 4 * 1.2 < psutil.virtual_memory().available
