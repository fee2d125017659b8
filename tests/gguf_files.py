"""GGUF files for tests: of a folder's own weights and back, quantised, and their logits."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, LlamaFileType, dequantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from crossover.models.gguf.reader import read_header
from crossover.models.shape.model_families import FAMILIES
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.text.gguf_vocabulary import llama_library
from crossover.models.weights.gguf_writer import write_file
from crossover.models.weights.random_weights import as_bytes, rope_factors, stored_as, write_texts
from crossover.models.weights.safetensors_reader import Floats, stored_rows
from crossover.models.weights.weight_formats import GgufTensorLayout, gguf_tensors
from tests.graph_logits import Ids

CONTROL = 3  # of gguf.TokenType


def gguf_of(folder: Path, spec: ModelSpec, file: Path, kind: str) -> None:
    """A folder with the shipped tokenizer as a GGUF file of type F32, F16 or BF16."""
    rows = stored_rows(folder, spec)

    def data(tensor: GgufTensorLayout) -> Iterator[memoryview]:
        if tensor.hf_name is None:
            assert spec.rope_scaling is not None
            yield as_bytes(rope_factors(spec, spec.rope_scaling))
            return
        values = rows(tensor.hf_name, 0, tensor.shape[0])
        is_rotated = tensor.hf_name.endswith(("q_proj.weight", "k_proj.weight"))
        if is_rotated and FAMILIES[spec.family].gguf == "llama":
            values = values[np.argsort(paired_rows(np.arange(len(values)), spec.head_dim))]
        yield as_bytes(stored_as(tensor.type, values))

    write_file(spec, kind, file, data)


def paired_rows(at: npt.NDArray[np.int64], head_dim: int) -> npt.NDArray[np.int64]:
    """Where llama.cpp has these rows of a query or key matrix: it rotates neighbours of a head,
    transformers the head's first half with its second."""
    head, inside = np.divmod(at, head_dim)
    second, place = np.divmod(inside, head_dim // 2)
    there: npt.NDArray[np.int64] = head * head_dim + 2 * place + second
    return there


def folder_of(file: Path, folder: Path) -> Path:
    """A SmolLM2's GGUF file as a folder of safetensors: its tokenizer, and the floats that its
    blocks stand for."""
    folder.mkdir()
    spec, content = read_header(file).spec(file.stem), GGUFReader(file)
    write_texts(spec, folder, "fp32")
    fields = {name.rpartition(".")[2]: one for name, one in content.fields.items()}
    merges = [tuple(pair.split(" ")) for pair in fields["merges"].contents()]
    tokens = fields["tokens"].contents()
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    splits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = Sequence(splits), ByteLevelDecoder()
    types = fields["token_type"].contents()
    tokenizer.add_special_tokens([tokens[at] for at in range(len(tokens)) if types[at] == CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(fields["chat_template"].contents())
    stored, floats = {one.name: one for one in content.tensors}, {}
    for tensor in gguf_tensors(spec, "F32"):
        values = dequantize(stored[tensor.name].data, stored[tensor.name].tensor_type)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            values = values[paired_rows(np.arange(len(values)), spec.head_dim)]
        floats[tensor.hf_name or tensor.name] = np.ascontiguousarray(values)
    save_file(floats, folder / "model.safetensors", {"format": "pt"})
    return folder


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
