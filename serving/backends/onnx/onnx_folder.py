"""What an ONNX folder holds: the file, the kind of graph, the KV cache's shape.

Two kinds of graph are served:
  grouped  attention by GroupQueryAttention, which appends to a KV buffer in place (written by
           crossover.models.convert_to_onnx): fixed_kv_cache.py
  growing  past_key_values in, longer present.* out (optimum, most of the hub): growing_kv_cache.py

All of it is read from the session's inputs and outputs and the config beside the graph. Neither
torch nor the onnx package is imported: that saves about 250 MB.
"""

from __future__ import annotations

import json
import re
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.errors import BrokenWeights, UnknownModel, UnsupportedModel
from crossover.serving.backends.backend_probe import BackendProbe
from crossover.serving.errors import Cause
from crossover.serving.sampling.step_inputs import Row

Logits = npt.NDArray[np.float32]
Part = tuple[Logits, list[Row]]  # logits [n, vocabulary] of rows that want a token, and these rows
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)$")


class GraphFacts(msgspec.Struct, frozen=True):
    """The parts of a graph that serving it depends on. Its KV cache is float32."""

    grouped: bool
    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    position_ids: bool
    context_tokens: int | None  # of the model; None: nothing beside the graph says

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * 4

    @property
    def kv_names(self) -> list[str]:
        """ "0.key", "0.value", "1.key", ..."""
        return [f"{layer}.{kind}" for layer in range(self.layers) for kind in ("key", "value")]


def probe() -> BackendProbe:
    """Return what the installed onnxruntime can do. Runs in a process of its own."""
    import onnxruntime

    return BackendProbe(
        "onnx",
        works=True,
        version=onnxruntime.__version__,
        gpu_note="this backend serves on the CPU only",
        gpu_cause=Cause.backend_missing,
        details={"providers": ", ".join(onnxruntime.get_available_providers())},
    )


def graph_file(path: str | Path) -> Path:
    """Return the .onnx file: `path` itself, or model.onnx of the folder."""
    path = Path(path)
    file = path / "model.onnx" if path.is_dir() else path
    if not file.is_file():
        raise UnknownModel(f"{path} is neither an ONNX file nor a folder with a model.onnx")
    return file


def weight_bytes(file: Path) -> int:
    """Return bytes of the graph with its external data."""
    data = [other for other in file.parent.glob(file.name + "?data*") if other.is_file()]
    return sum(part.stat().st_size for part in (file, *data))


def read_facts(session: Any, file: Path) -> GraphFacts:
    """Return the facts of a loaded onnxruntime.InferenceSession. Raises UnsupportedModel."""
    inputs = {item.name: item for item in session.get_inputs()}
    outputs = {item.name: item for item in session.get_outputs()}
    layers = len({match[1] for match in map(_PAST.match, inputs) if match})
    names = [f"{layer}.{kind}" for layer in range(max(1, layers)) for kind in ("key", "value")]
    needed = ["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)]
    ends = ["logits", *(f"present.{name}" for name in names)]
    missing = [one for one in needed if one not in inputs] + [x for x in ends if x not in outputs]
    unknown = sorted(set(inputs) - {*needed, "position_ids"})
    if missing or unknown:
        wrong = f"lacks {', '.join(missing[:3])}" if missing else f"wants {', '.join(unknown[:3])}"
        raise UnsupportedModel(
            f"{file.name} is not a supported causal language model with a KV cache: it {wrong}"
        )
    past, logits = inputs["past_key_values.0.key"], outputs["logits"]
    if {past.type, logits.type} != {"tensor(float)"}:
        raise UnsupportedModel(
            f"{file.name} has a KV cache of {past.type} and logits of {logits.type}; float32 is "
            "served"
        )
    with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as view:
        grouped = view.find(b"GroupQueryAttention") >= 0
    if grouped and (logits.shape[1] != 1 or "position_ids" in inputs):
        raise UnsupportedModel(
            f"{file.name} has GroupQueryAttention but was not written by Crossover. Serve the "
            "model's safetensors, which are converted."
        )
    sizes = past.shape[1], past.shape[3], logits.shape[2]
    if not all(isinstance(one, int) for one in sizes):
        raise UnsupportedModel(
            f"{file.name} does not say its key-value heads, head size and vocabulary, but {sizes}"
        )
    config = _config_beside(file)
    return GraphFacts(
        grouped=grouped,
        layers=layers,
        kv_heads=sizes[0],
        head_dim=sizes[1],
        vocabulary=sizes[2],
        position_ids="position_ids" in inputs,
        context_tokens=config.get("max_position_embeddings") or config.get("n_positions"),
    )


def _config_beside(file: Path) -> dict[str, Any]:
    """config.json in the graph's folder or the one above; {} where there is none."""
    for path in (file.parent / "config.json", file.parent.parent / "config.json"):
        if path.is_file():
            try:
                return dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as problem:
                raise BrokenWeights(f"{path.name} is not a JSON object: {problem}") from problem
    return {}
