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

from models.conversion import (
    Comparison,
    Ids,
    compared_ids,
    distance_of,
    finish,
    reference_fits,
    reference_logits,
    source_spec,
)
from models.convert_from_gguf import dequantised
from models.convert_tokenizer import compare_tokenizers, gguf_vocabulary
from models.errors import BrokenWeights
from models.formats import GGUF_FORMATS, GgufTensor, check_made, gguf_name
from models.gguf_reader import read_header
from models.gguf_vocabulary import GgufTokenizer, llama_library, read_by_child
from models.gguf_writer import ARCHITECTURES, write_file
from models.manifest import Manifest, Progress, atomic_file, manifest_path
from models.random_quant_blocks import as_bytes, stored_as
from models.random_weights import rope_factors
from models.safetensors_reader import Floats, Rows, check_tensors, stored_rows
from models.spec import ModelSpec
from models.tokenizer import load_tokenizer

OWN_FORMAT = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
# Greatest distance (Comparison) of llama.cpp's logits from transformers' with the same weights:
# llama.cpp rounds activations to the weights' precision, to 8 bits for quantised ones.
LIMITS = {"F32": 1e-3, "F16": 1e-2, "BF16": 5e-2}
QUANTISED_LIMIT = 0.35
# Greatest root mean square of a tensor's rounding, over that of the tensor; the worst that blocks
# of one large weight among small ones can have. Another tensor, or rows in another order: 1.4.
ROUNDING = {"F32": 0.0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.03, "Q6_K": 0.2}
ROUNDING |= dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), 0.25) | dict.fromkeys(("Q4_0", "Q4_K"), 0.4)
_CHUNK_BYTES = 64 << 20


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
        # By a child first: llama.cpp ends a process on a vocabulary that it does not expect.
        read_by_child(temporary, f"the tokenizer of {source.name}")
        compare_tokenizers(load_tokenizer(source), GgufTokenizer(temporary), source.name)
        say("comparing the weights with the source's", None)
        is_compared = reference_fits(found)
        weights = _checked_weights(source, temporary, found, keep=is_compared)
        quality = None
        if is_compared:
            say("comparing the logits with the source's", None)
            quality = _quality(source, temporary, found, weights, sequences)
        else:
            say("logits not compared: the float32 reference does not fit into free memory", None)
    return finish(source, target, "gguf", weight_format, found, quality)


def _write(source: Path, spec: ModelSpec, weight_format: str, out: Path, say: Progress) -> None:
    """The GGUF file in the source's own precision, then in the wanted format."""
    own_format = OWN_FORMAT[check_tensors(source, spec)]
    vocabulary = gguf_vocabulary(source, spec.vocabulary)
    rows = stored_rows(source, spec)
    # `making` finds what a killed conversion leaves by this name.
    left = f".{out.name.lstrip('.')}."
    with tempfile.TemporaryDirectory(".part", left, dir=out.parent) as scratch:
        whole = Path(scratch, "own.gguf")
        write_file(
            spec,
            own_format,
            vocabulary,
            whole,
            lambda tensor: _data(rows, spec, tensor),
            say,
            "copying weights",
        )
        if weight_format == own_format:
            os.replace(whole, out)
            return
        say(f"quantising to {weight_format}", None)
        quantise(whole, out, weight_format)


def quantise(source: Path, target: Path, weight_format: str) -> None:
    """Requantise a GGUF file with llama.cpp. Raises BrokenWeights where llama.cpp refuses."""
    llama = llama_library()
    params = llama.llama_model_quantize_default_params()
    params.ftype = GGUF_FORMATS[weight_format][1]
    params.nthread = len(os.sched_getaffinity(0))
    files = (str(source).encode(), str(target).encode())
    status = llama.llama_model_quantize(*files, ctypes.byref(params))
    if status != 0:
        raise BrokenWeights(
            f"llama.cpp cannot quantise {source.name} to {weight_format}: status {status}"
        )


def _data(rows: Rows, spec: ModelSpec, tensor: GgufTensor) -> Iterator[bytes | memoryview]:
    """One tensor's bytes in the type that the GGUF file gives it, a few rows at a time."""
    if tensor.hf_name is None:
        assert spec.rope_scaling is not None
        yield rope_factors(spec, spec.rope_scaling).tobytes()
        return
    count, heads = tensor.shape[0], _rotated_heads(spec, tensor.hf_name)
    step = count if heads else max(1, _CHUNK_BYTES * count // (4 * tensor.elements))
    for begin in range(0, count, step):
        values = rows(tensor.hf_name, begin, min(count, begin + step))
        if heads:
            values = _interleaved(values, heads)
        yield as_bytes(stored_as(tensor.type, values))


def _rotated_heads(spec: ModelSpec, name: str) -> int:
    """Heads of a tensor whose rows llama.cpp wants in pairs; 0: it wants them as they are."""
    if ARCHITECTURES[spec.family] != "llama":
        return 0
    return spec.heads if ".q_proj." in name else spec.kv_heads if ".k_proj." in name else 0


def _interleaved(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of each head from (first half, second half) to pairs: llama.cpp's rotary order."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _checked_weights(source: Path, file: Path, spec: ModelSpec, keep: bool) -> dict[str, Floats]:
    """The file's tensors as transformers names and orders them; {} unless they are kept.

    Raises BrokenWeights with the first that is not the source's.
    """
    header, rows = read_header(file), stored_rows(source, spec)
    kept: dict[str, Floats] = {}
    for tensor in spec.tensors():
        kind = header.tensors[gguf_name(tensor.name)].type
        begin, error, size = 0, 0.0, 0.0
        pieces = []
        for values in dequantised(header, spec, tensor):
            wanted = rows(tensor.name, begin, begin + len(values))
            begin += len(values)
            error += float(np.sum((values - wanted) ** 2))
            size += float(np.sum(wanted**2))
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


def _quality(
    source: Path,
    file: Path,
    spec: ModelSpec,
    weights: dict[str, Floats],
    sequences: Sequence[Sequence[int]] | None,
) -> Comparison:
    """llama.cpp's logits on `file` against transformers' on the source's float weights.

    Raises BrokenWeights where they are not those of `weights`, the file's own.
    """
    ids = compared_ids(source, spec, sequences)
    logits = gguf_logits(file, ids)
    weight_format = read_header(file).weight_format
    distance_of(reference_logits(source, spec, ids, weights), logits).check(
        LIMITS.get(weight_format, QUANTISED_LIMIT), f"the {weight_format} file of {source.name}"
    )
    return distance_of(reference_logits(source, spec, ids), logits)


def gguf_logits(file: Path, ids: Ids) -> Floats:
    """llama.cpp's logits [sequences, tokens, vocabulary], with a float32 KV cache."""
    llama_library()
    from llama_cpp import Llama

    count = max(64, ids.shape[1])
    settings: dict[str, Any] = {"n_ctx": count, "n_batch": count, "n_ubatch": count}
    settings["n_threads"] = settings["n_threads_batch"] = len(os.sched_getaffinity(0))
    settings["type_k"] = settings["type_v"] = 0  # GGML_TYPE_F32
    # Without flash attention, which rounds to float16.
    settings |= {"flash_attn": False, "logits_all": True, "verbose": False}
    try:
        model = Llama(str(file), **settings)
    except ValueError as problem:
        raise BrokenWeights(f"llama.cpp cannot load {file.name}: {problem}") from problem
    found = []
    for row in ids:
        model.reset()
        model.eval(row.tolist())
        found.append(model.scores[: len(row)].copy())
    model.close()
    return np.stack(found)
