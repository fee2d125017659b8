"""GGUF files for tests: of a folder's own weights, quantised by llama.cpp, and their logits."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import LlamaFileType

from models.float_forward import Ids
from models.formats import GgufTensor
from models.gguf_reader import paired_rows
from models.gguf_vocabulary import llama_library
from models.gguf_writer import ARCHITECTURES, write_file
from models.random_weights import as_bytes, rope_factors, stored_as
from models.safetensors_reader import Floats, stored_rows
from models.spec import ModelSpec


def gguf_of(folder: Path, spec: ModelSpec, file: Path, kind: str) -> None:
    """A folder with the shipped tokenizer as a GGUF file of type F32, F16 or BF16."""
    rows = stored_rows(folder, spec)

    def data(tensor: GgufTensor) -> Iterator[memoryview]:
        if tensor.hf_name is None:
            assert spec.rope_scaling is not None
            yield as_bytes(rope_factors(spec, spec.rope_scaling))
            return
        values = rows(tensor.hf_name, 0, tensor.shape[0])
        is_rotated = tensor.hf_name.endswith(("q_proj.weight", "k_proj.weight"))
        if is_rotated and ARCHITECTURES[spec.family] == "llama":
            values = values[np.argsort(paired_rows(np.arange(len(values)), spec.head_dim))]
        yield as_bytes(stored_as(tensor.type, values))

    write_file(spec, kind, file, data)


def quantise(source: Path, target: Path, weight_format: str) -> None:
    """Requantise a GGUF file with llama.cpp."""
    llama = llama_library()
    params = llama.llama_model_quantize_default_params()
    names = {one.name.removeprefix("MOSTLY_"): one.value for one in LlamaFileType}
    params.ftype = names["ALL_F32" if weight_format == "F32" else weight_format]
    params.nthread = len(os.sched_getaffinity(0))
    params.allow_requantize = True
    files = (str(source).encode(), str(target).encode())
    status = llama.llama_model_quantize(*files, ctypes.byref(params))
    assert status == 0


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
    model = Llama(str(file), **settings)
    found = []
    for row in ids:
        model.reset()
        model.eval(row.tolist())
        found.append(model.scores[: len(row)].copy())
    model.close()
    return np.stack(found)
