"""What an ONNX folder contains: the graph's file, its kind, and the shape of its KV cache.

The backend runs two kinds of graph:

- grouped (fixed_kv_cache.py): attention is the operator GroupQueryAttention, which appends to a KV
  buffer in place. crossover.models.weights.convert_to_onnx writes these graphs.
- growing (growing_kv_cache.py): the graph takes past_key_values and returns the longer present.*.
  optimum writes these graphs, and most repositories of the hub have them.

All facts are read from the session's inputs and outputs and from the config.json beside the graph.
Neither torch nor the onnx package is imported, which saves about 250 MB.
"""

from __future__ import annotations

import json
import re
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from crossover.models.errors import BrokenWeights, UnknownModel, UnsupportedModel
from crossover.serving.backends.backend_probe import BackendProbe
from crossover.serving.errors import Cause
from crossover.serving.sampling.step_inputs import Row

Logits = npt.NDArray[np.float32]
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)$")


class RowLogits(NamedTuple):
    """The logits after one call of a graph."""

    logits: Logits  # [n, vocabulary]
    rows: list[Row]  # the n rows of the call that want a token, in the order of their logits


class GraphFacts(msgspec.Struct, frozen=True):
    """The properties of a graph that running it depends on. Its KV cache is float32."""

    grouped: bool  # see the module's docstring
    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    has_position_ids: bool  # the graph takes the positions of tokens as an input
    context_tokens: int | None  # the model's maximum; None: config.json does not have it

    @property
    def kv_names(self) -> list[str]:
        """Return the names of the parts of the KV cache: "0.key", "0.value", "1.key", ..."""
        return kv_names(self.layers)


def kv_names(layers: int) -> list[str]:
    """Return "0.key", "0.value", "1.key", ... for this number of layers."""
    return [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


def probe() -> BackendProbe:
    """Return what the installed onnxruntime can do. Runs in a child process."""
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
    """Return the .onnx file: `path` itself, or the model.onnx in it if it is a folder. Raises
    UnknownModel."""
    path = Path(path)
    file = path / "model.onnx" if path.is_dir() else path
    if not file.is_file():
        raise UnknownModel(f"{path} is neither an ONNX file nor a folder with a model.onnx")
    return file


def graph_bytes(file: Path) -> int:
    """Return the bytes of the graph's file with its external data, whose files are named
    "model.onnx.data", "model.onnx_data_1" and so on."""
    external = [path for path in file.parent.glob(f"{file.name}?data*") if path.is_file()]
    return sum(path.stat().st_size for path in (file, *external))


def read_facts(session: Any, file: Path) -> GraphFacts:
    """Return the facts of a loaded onnxruntime.InferenceSession. Raises UnsupportedModel if the
    backend cannot run the graph, and BrokenWeights if config.json cannot be read."""
    inputs = {item.name: item for item in session.get_inputs()}
    outputs = {item.name: item for item in session.get_outputs()}
    layers = len({match[1] for name in inputs if (match := _PAST.match(name))})
    cache_names = kv_names(max(1, layers))  # a graph without a cache lacks that of layer 0
    needed_inputs = ["input_ids", "attention_mask"]
    needed_inputs += [f"past_key_values.{name}" for name in cache_names]
    needed_outputs = ["logits"] + [f"present.{name}" for name in cache_names]
    missing = [name for name in needed_inputs if name not in inputs]
    missing += [name for name in needed_outputs if name not in outputs]
    unknown = sorted(set(inputs) - {*needed_inputs, "position_ids"})
    if missing or unknown:
        why = f"lacks {', '.join(missing[:3])}" if missing else f"wants {', '.join(unknown[:3])}"
        raise UnsupportedModel(
            f"{file.name} is not a supported causal language model with a KV cache: it {why}"
        )
    past, logits = inputs["past_key_values.0.key"], outputs["logits"]
    if {past.type, logits.type} != {"tensor(float)"}:
        raise UnsupportedModel(
            f"{file.name} has a KV cache of {past.type} and logits of {logits.type}; float32 is "
            "served"
        )
    # The session does not list its operators, but their names stand in the file.
    with file.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as view:
        grouped = view.find(b"GroupQueryAttention") >= 0
    # Graphs of other writers have GroupQueryAttention too, but logits of every token, or positions.
    if grouped and (logits.shape[1] != 1 or "position_ids" in inputs):
        raise UnsupportedModel(
            f"{file.name} has GroupQueryAttention but was not written by Crossover. Serve the "
            "model's safetensors, which are converted."
        )
    sizes = past.shape[1], past.shape[3], logits.shape[2]
    if not all(isinstance(size, int) for size in sizes):  # a name or None: not fixed in the graph
        raise UnsupportedModel(
            f"{file.name} does not say its key-value heads, head size and vocabulary, but {sizes}"
        )
    kv_heads, head_dim, vocabulary = sizes
    config = _config_beside(file)
    return GraphFacts(
        grouped=grouped,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        has_position_ids="position_ids" in inputs,
        context_tokens=config.get("max_position_embeddings") or config.get("n_positions"),
    )


def _config_beside(file: Path) -> dict[str, Any]:
    """Return the config.json in the graph's folder or in the folder above; {} if there is none.
    Raises BrokenWeights."""
    for path in (file.parent / "config.json", file.parent.parent / "config.json"):
        if path.is_file():
            try:
                return dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as problem:
                raise BrokenWeights(f"{path.name} is not a JSON object: {problem}") from problem
    return {}
