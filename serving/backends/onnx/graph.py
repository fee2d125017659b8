"""What an ONNX folder holds: the file, the kind of graph, the KV cache's shape, its memory.

Two kinds of graph are served:
  grouped  attention by GroupQueryAttention, which appends to a KV buffer in place (written by
           models.convert_to_onnx): fused.py
  growing  past_key_values in, longer present.* out (optimum, most of the hub): growing.py

All of it is read from the session's inputs and outputs, the config beside the graph, and file
sizes. Neither torch nor the onnx package is imported: that saves about 250 MB.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from models.errors import BrokenWeights, UnknownModel, UnsupportedModel

KV_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
}
KV_NAMES: dict[str, str] = {
    "tensor(float)": "fp32",
    "tensor(float16)": "fp16",
    "tensor(int8)": "int8",
}
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)$")


class GraphFacts(msgspec.Struct, frozen=True):
    """The parts of a graph that serving it depends on."""

    file: str
    grouped: bool
    layers: int
    kv_heads: int
    head_dim: int
    kv_type: str  # onnxruntime's name, a key of KV_TYPES
    logits_type: str
    vocabulary: int
    last_logits_only: bool  # the head was pruned to one position of each row
    ragged_prompts: bool  # ... each row's own last token, not the last column's
    position_ids: bool
    context_tokens: int | None  # of the model; None: nothing beside the graph says

    @property
    def kv_bytes_per_token(self) -> int:
        element_bytes = int(np.dtype(KV_TYPES[self.kv_type]).itemsize)
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def graph_file(path: str | Path, chosen: str | None = None) -> Path:
    """The .onnx file: `path` itself, `chosen` in it, (onnx/)model.onnx, or the only one."""
    path = Path(path)
    if path.is_file():
        if chosen is None:
            return path
        path = path.parent.parent if path.parent.name == "onnx" else path.parent
    if not path.is_dir():
        raise UnknownModel(f"{path} is neither an ONNX file nor a folder")
    if chosen is not None:
        inside = Path(os.path.normpath(path / chosen))  # the hub's cache is made of links
        if not inside.is_file() or path not in inside.parents:
            raise UnknownModel(f"option file={chosen!r}: no such file in {path.name}")
        return inside
    for usual in (path / "model.onnx", path / "onnx" / "model.onnx"):
        if usual.is_file():
            return usual
    found = sorted(path.glob("*.onnx")) + sorted(path.glob("onnx/*.onnx"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(file.relative_to(path)) for file in found) or "none"
    raise UnknownModel(
        f"{path.name} holds no model.onnx; choose one with the option file=NAME "
        f"(ONNX files there: {names})"
    )


def weight_files(file: Path) -> list[Path]:
    """The graph and its external data files."""
    data = [other for other in sorted(file.parent.glob(file.name + "?data*")) if other.is_file()]
    return [file, *data]


def weight_bytes(file: Path) -> int:
    """Bytes of the graph with its external data."""
    return sum(part.stat().st_size for part in weight_files(file))


def is_grouped(file: Path) -> bool:
    """Whether the operator GroupQueryAttention is named in the file."""
    return _mentions(file, b"GroupQueryAttention")


def is_batch_dependent(file: Path) -> bool:
    """Whether activations are rounded with one scale for a batch (optimum's dynamic int8)."""
    return _mentions(file, b"DynamicQuantizeLinear")


def resident_bytes(file: Path) -> int:
    """Private memory that loading will take, predicted from the files.

    onnxruntime maps the file and packs the matrices into memory of its own: int8 into as much, and
    up to 40 MB for the rest (8B: 7.6 GB measured of a file of 8.1 GB), int4 blocks of 32 into 1.3
    times as much. The embedding is only looked up and stays mapped; a tied float32 head is a copy.
    """
    size = weight_bytes(file)
    if not is_grouped(file):
        return int(1.4 * size)  # a foreign graph: an upper figure
    config = _config_beside(file)
    embedding = int(config.get("vocab_size") or 0) * int(config.get("hidden_size") or 0)
    if _mentions(file, b"MatMulNBits"):
        return embedding + int(1.3 * max(0, size - 2 * embedding))  # the head is int8
    if _mentions(file, b"MatMulInteger"):
        matrices = max(0, size - embedding)
        return matrices + int(min(40e6, 0.15 * matrices))
    return size if config.get("tie_word_embeddings") else max(0, size - 4 * embedding)


def _mentions(file: Path, word: bytes) -> bool:
    with file.open("rb") as stream:
        if file.stat().st_size == 0:
            raise BrokenWeights(f"{file.name} is empty")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return view.find(word) >= 0


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} where there is no file. Raises BrokenWeights."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as problem:
        raise BrokenWeights(f"{path.name} is not valid JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise BrokenWeights(f"{path.name} holds a {type(value).__name__}, not an object")
    return value


def read_facts(session: Any, file: Path) -> GraphFacts:
    """The facts of a loaded onnxruntime.InferenceSession. Raises UnsupportedModel."""
    inputs = {item.name: item for item in session.get_inputs()}
    outputs = {item.name: item for item in session.get_outputs()}
    layers = _layers(file, inputs, outputs)
    past, logits = inputs["past_key_values.0.key"], outputs["logits"]
    if past.type not in KV_TYPES or logits.type not in ("tensor(float)", "tensor(float16)"):
        raise UnsupportedModel(
            f"{file.name} has a KV cache of {past.type} and logits of {logits.type}; float32, "
            "float16 and an int8 KV are served"
        )
    config = _shape_config(file)

    def size(name: str, in_graph: Any, key: str) -> int:
        value = in_graph if isinstance(in_graph, int) else config.get(key)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModel(
                f"nothing beside {file.name} says its {name}; config.json or genai_config.json "
                "must be there"
            )
        return value

    return GraphFacts(
        file=file.name,
        grouped=is_grouped(file),
        layers=layers,
        kv_heads=size("key-value heads", past.shape[1], "kv_heads"),
        head_dim=size("head size", past.shape[3], "head_dim"),
        kv_type=past.type,
        logits_type=logits.type,
        vocabulary=size("vocabulary", logits.shape[2], "vocabulary"),
        last_logits_only=logits.shape[1] == 1,
        ragged_prompts=logits.shape[1] == 1 and _mentions(file, b"GatherND"),
        position_ids="position_ids" in inputs,
        context_tokens=config.get("context"),
    )


def _layers(file: Path, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> int:
    """How many layers have a KV cache. Raises UnsupportedModel for inputs that are not ours."""
    pasts = [match for match in map(_PAST.match, inputs) if match]
    layers = len({match[1] for match in pasts})
    if not layers or "input_ids" not in inputs or "logits" not in outputs:
        raise UnsupportedModel(
            f"{file.name} is no causal language model with a KV cache: it has inputs "
            f"{', '.join(list(inputs)[:6])}"
        )
    known = {"input_ids", "attention_mask", "position_ids", *(match[0] for match in pasts)}
    unknown = sorted(set(inputs) - known)
    if unknown:
        raise UnsupportedModel(
            f"{file.name} wants inputs that this backend does not give: {', '.join(unknown)}"
        )
    presents = [f"present.{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    missing = [name for name in presents if name not in outputs]
    if missing or "attention_mask" not in inputs:
        what = ", ".join(missing[:3]) or "the input attention_mask"
        raise UnsupportedModel(f"{file.name} lacks {what}")
    return layers


def _config_beside(file: Path) -> dict[str, Any]:
    """config.json in the graph's folder or the one above; {} where there is none."""
    return read_json(file.parent / "config.json") or read_json(file.parent.parent / "config.json")


def _shape_config(file: Path) -> dict[str, Any]:
    """kv_heads, head_dim, vocabulary, context from genai_config.json or config.json beside it."""
    for folder in (file.parent, file.parent.parent):
        model = read_json(folder / "genai_config.json").get("model")
        if isinstance(model, dict) and isinstance(model.get("decoder"), dict):
            decoder = model["decoder"]
            return {
                "kv_heads": decoder.get("num_key_value_heads"),
                "head_dim": decoder.get("head_size"),
                "vocabulary": model.get("vocab_size"),
                "context": model.get("context_length"),
            }
    config = _config_beside(file)
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    return {
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocabulary": config.get("vocab_size"),
        "context": config.get("max_position_embeddings") or config.get("n_positions"),
    }
