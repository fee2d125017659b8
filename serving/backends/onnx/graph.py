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
import numpy.typing as npt

from models.errors import BrokenWeights, UnknownModel, UnsupportedModel
from serving.backends.backend_table import BackendProbe
from serving.errors import Cause
from serving.sampling.step_rows import Row

# onnxruntime's name of the KV cache's type -> ours, and numpy's.
KV_TYPES: dict[str, tuple[str, Any]] = {
    "tensor(float)": ("fp32", np.float32),
    "tensor(float16)": ("fp16", np.float16),
    "tensor(int8)": ("int8", np.int8),
}
Logits = npt.NDArray[np.float32]
Part = tuple[Logits, list[Row]]  # logits [n, vocabulary] of rows that want a token, and these rows
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)$")


class GraphFacts(msgspec.Struct, frozen=True):
    """The parts of a graph that serving it depends on."""

    grouped: bool
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str  # "fp32", "fp16", "int8"
    kv_type: Any  # numpy's
    logits_type: Any
    vocabulary: int
    last_logits_only: bool  # the head was pruned to one position of each row
    ragged_prompts: bool  # ... each row's own last token, not the last column's
    position_ids: bool
    context_tokens: int | None  # of the model; None: nothing beside the graph says

    @property
    def kv_bytes_per_token(self) -> int:
        element_bytes = int(np.dtype(self.kv_type).itemsize)
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    @property
    def kv_names(self) -> list[str]:
        """ "0.key", "0.value", "1.key", ..."""
        return [f"{layer}.{kind}" for layer in range(self.layers) for kind in ("key", "value")]


def probe() -> BackendProbe:
    """What the installed onnxruntime can do. Runs in a process of its own."""
    import onnxruntime

    return BackendProbe(
        "onnx",
        works=True,
        version=onnxruntime.__version__,
        gpu_note="this backend serves on the CPU only",
        gpu_cause=Cause.backend_missing,
        details={"providers": ", ".join(onnxruntime.get_available_providers())},
    )


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
    found = sorted([*path.glob("*.onnx"), *path.glob("onnx/*.onnx")])
    usual = [path / "model.onnx", path / "onnx" / "model.onnx"]
    for file in (*(one for one in usual if one in found), *found[: len(found) == 1]):
        return file
    names = ", ".join(str(file.relative_to(path)) for file in found) or "none"
    raise UnknownModel(
        f"{path.name} holds no model.onnx; choose one with the option file=NAME "
        f"(ONNX files there: {names})"
    )


def weight_bytes(file: Path) -> int:
    """Bytes of the graph with its external data."""
    data = [other for other in file.parent.glob(file.name + "?data*") if other.is_file()]
    return sum(part.stat().st_size for part in (file, *data))


def mentions(file: Path, operator: str) -> bool:
    """Whether an operator is named in the file. Raises BrokenWeights for an empty one."""
    with file.open("rb") as stream:
        if file.stat().st_size == 0:
            raise BrokenWeights(f"{file.name} is empty")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return view.find(operator.encode()) >= 0


def resident_bytes(file: Path) -> int:
    """Private memory that loading will take, predicted from the files.

    onnxruntime maps the file and packs the matrices into memory of its own: int8 into as much, and
    up to 40 MB for the rest (8B: 7.6 GB measured of a file of 8.1 GB), int4 blocks of 32 into 1.3
    times as much. The embedding is only looked up and stays mapped; a tied float32 head is a copy.
    """
    size = weight_bytes(file)
    if not mentions(file, "GroupQueryAttention"):
        return int(1.4 * size)  # a foreign graph: an upper figure
    config = _config_beside(file)
    embedding = int(config.get("vocab_size") or 0) * int(config.get("hidden_size") or 0)
    if mentions(file, "MatMulNBits"):
        return embedding + int(1.3 * max(0, size - 2 * embedding))  # the head is int8
    if mentions(file, "MatMulInteger"):
        matrices = max(0, size - embedding)
        return matrices + int(min(40e6, 0.15 * matrices))
    return size if config.get("tie_word_embeddings") else max(0, size - 4 * embedding)


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
    config = _config_beside(file)
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    hidden = config.get("hidden_size") or config.get("n_embd") or 0

    def size(name: str, in_graph: Any, *beside: Any) -> int:
        for value in (in_graph, *beside):
            if isinstance(value, int) and value > 0:
                return value
        raise UnsupportedModel(
            f"nothing beside {file.name} says its {name}; config.json must be there"
        )

    kv_dtype, kv_type = KV_TYPES[past.type]
    return GraphFacts(
        grouped=mentions(file, "GroupQueryAttention"),
        layers=layers,
        kv_heads=size("key-value heads", past.shape[1], config.get("num_key_value_heads"), heads),
        head_dim=size("head size", past.shape[3], config.get("head_dim"), hidden // heads),
        kv_dtype=kv_dtype,
        kv_type=kv_type,
        logits_type=KV_TYPES[logits.type][1],
        vocabulary=size("vocabulary", logits.shape[2], config.get("vocab_size")),
        last_logits_only=logits.shape[1] == 1,
        ragged_prompts=logits.shape[1] == 1 and mentions(file, "GatherND"),
        position_ids="position_ids" in inputs,
        context_tokens=config.get("max_position_embeddings") or config.get("n_positions"),
    )


def _layers(file: Path, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> int:
    """How many layers have a KV cache. Raises UnsupportedModel for a graph that is not served."""
    pasts = [match for match in map(_PAST.match, inputs) if match]
    layers = len({match[1] for match in pasts})
    names = [f"{layer}.{kind}" for layer in range(max(1, layers)) for kind in ("key", "value")]
    needed = ["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)]
    missing = [name for name in needed if name not in inputs]
    ends = ["logits", *(f"present.{name}" for name in names)]
    missing += [name for name in ends if name not in outputs]
    unknown = sorted(set(inputs) - {*needed, "position_ids"})
    if missing or unknown:
        wrong = f"lacks {', '.join(missing[:3])}" if missing else f"wants {', '.join(unknown[:3])}"
        raise UnsupportedModel(
            f"{file.name} is no causal language model with a KV cache that is served here: it "
            f"{wrong}"
        )
    return layers


def _config_beside(file: Path) -> dict[str, Any]:
    """config.json in the graph's folder or the one above; {} where there is none."""
    for path in (file.parent / "config.json", file.parent.parent / "config.json"):
        if path.is_file():
            try:
                return dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as problem:
                raise BrokenWeights(f"{path.name} is no object of JSON: {problem}") from problem
    return {}
