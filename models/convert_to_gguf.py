"""Safetensors to GGUF, or a GGUF file to another format.

    make_gguf("SmolLM2-135M", "smollm2-135m-Q4_0.gguf", "Q4_0")

Weights go unchanged into a GGUF file of the source's own precision (the query and key rows of Llama
and Mistral reordered: llama.cpp rotates neighbours, transformers rotates halves); llama.cpp's
quantiser makes the wanted format from it. The tokenizer must cut text as the source's does, else
nothing is left behind. What the format costs on text is kept in the manifest.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from models.conversion import Source, finish, open_source, quality_of
from models.convert_tokenizer import compare_tokenizers, gguf_vocabulary
from models.errors import BrokenWeights
from models.float_forward import BLOCK, Ids
from models.formats import GGUF_FORMATS, GgufTensor, check_made
from models.gguf_reader import paired_rows
from models.gguf_vocabulary import GgufTokenizer, llama_library
from models.gguf_writer import ARCHITECTURES, write_file
from models.manifest import Progress, atomic_file, manifest_path
from models.random_quant_blocks import as_bytes, stored_as
from models.random_weights import rope_factors
from models.safetensors_reader import Floats
from models.spec import ModelSpec
from models.tokenizer import load_tokenizer, try_tokenizer

OWN_FORMAT = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def make_gguf(
    source: str | Path,
    out_file: str | Path,
    weight_format: str = "Q4_0",
    *,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
) -> None:
    """Convert a Hugging Face folder or a GGUF file to a GGUF file, replaced if it was there.

    `spec`: the shape that the source must have. Raises UnsupportedModel, BrokenWeights.
    """
    say = progress or (lambda what, fraction: None)
    check_made(weight_format)
    found, target = open_source(Path(source), spec), Path(out_file)
    manifest_path(target).unlink(missing_ok=True)
    with atomic_file(target) as temporary:
        if found.path.is_file():
            say(f"quantising to {weight_format}", None)
            quantise(found.path, temporary, weight_format)
        else:
            _write(found, weight_format, temporary, say)
            say("comparing the tokenizers", None)
            # By a child first: llama.cpp ends a process on a vocabulary that it does not expect.
            try_tokenizer(temporary)
            ours = GgufTokenizer(temporary)
            compare_tokenizers(load_tokenizer(found.path), ours, found.path.name)
        quality = quality_of(found, lambda ids: gguf_logits(temporary, ids), say)
    finish(found.path, target, "gguf", weight_format, found.spec, quality)


def _write(source: Source, weight_format: str, out: Path, say: Progress) -> None:
    """The GGUF file in the source's own precision, then in the wanted format."""
    own_format = OWN_FORMAT[source.weight_format]
    vocabulary = gguf_vocabulary(source.path, source.spec.vocabulary)
    # `making` finds what a killed conversion leaves by this name.
    whole = out if weight_format == own_format else out.with_suffix(".own.part")
    try:
        write_file(
            source.spec,
            own_format,
            vocabulary,
            whole,
            lambda tensor: _data(source, tensor),
            say,
            "copying weights",
        )
        if whole != out:
            say(f"quantising to {weight_format}", None)
            quantise(whole, out, weight_format)
    finally:
        if whole != out:
            whole.unlink(missing_ok=True)


def quantise(source: Path, target: Path, weight_format: str) -> None:
    """Requantise a GGUF file with llama.cpp. Raises BrokenWeights where llama.cpp refuses."""
    llama = llama_library()
    params = llama.llama_model_quantize_default_params()
    params.ftype = GGUF_FORMATS[weight_format][1]
    params.nthread = len(os.sched_getaffinity(0))
    params.allow_requantize = True
    files = (str(source).encode(), str(target).encode())
    status = llama.llama_model_quantize(*files, ctypes.byref(params))
    if status != 0:
        raise BrokenWeights(
            f"llama.cpp cannot quantise {source.name} to {weight_format}: status {status}"
        )


def _data(source: Source, tensor: GgufTensor) -> Iterator[bytes | memoryview]:
    """One tensor's bytes in the type that the GGUF file gives it, a few rows at a time."""
    spec, name = source.spec, tensor.hf_name
    if name is None:
        assert spec.rope_scaling is not None
        yield as_bytes(rope_factors(spec, spec.rope_scaling))
        return
    count = tensor.shape[0]
    step = max(1, BLOCK * count // tensor.elements)
    is_rotated = ARCHITECTURES[spec.family] == "llama"
    if is_rotated and name.endswith(("q_proj.weight", "k_proj.weight")):
        step = max(1, step // spec.head_dim) * spec.head_dim  # whole heads
        order = np.argsort(paired_rows(np.arange(spec.head_dim), spec.head_dim))
    else:
        order = None
    for begin in range(0, count, step):
        values = source.rows(name, begin, min(count, begin + step))
        if order is not None:
            heads = values.reshape(-1, spec.head_dim, values.shape[-1])
            values = heads[:, order]
        yield as_bytes(stored_as(tensor.type, values))


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
