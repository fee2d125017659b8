"""The logits of an ONNX graph, how far they are from others, and text to compare them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.safetensors_reader import Floats

CORPUS = Path(__file__).parent / "models" / "corpus.txt"
Ids = npt.NDArray[np.int64]


def graph_logits(graph: Path, ids: Ids, spec: ModelSpec) -> Floats:
    """An ONNX graph's logits [sequences, tokens, vocabulary], token by token through its cache."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), settings, ["CPUExecutionProvider"])
    names = {item.name for item in session.get_inputs()}
    caches = sorted(name for name in names if name.startswith("past_key_values."))
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in caches)]
    past: list[Any] = [np.zeros((len(ids), spec.kv_heads, 0, spec.head_dim), np.float32)]
    past *= len(caches)
    found = []
    for position in range(ids.shape[1]):
        feeds: dict[str, Any] = {"input_ids": ids[:, position : position + 1]}
        feeds["attention_mask"] = np.ones((len(ids), position + 1), np.int64)
        if "position_ids" in names:  # of what optimum exports
            feeds["position_ids"] = np.full((len(ids), 1), position, np.int64)
        logits, *past = session.run(outputs, feeds | dict(zip(caches, past, strict=True)))
        found.append(logits[:, -1].astype(np.float32))
    return np.stack(found, 1)


def divergence(reference: Floats, candidate: Floats) -> float:
    """KL(reference || candidate) in nats, mean over positions, of logits [..., vocabulary]."""
    a, b = (one.astype(np.float64) for one in (reference, candidate))
    p, q = (one - np.logaddexp.reduce(one, -1, keepdims=True) for one in (a, b))
    return float(np.mean(np.sum(np.exp(p) * (p - q), -1)))


def prose() -> str:
    """English text of this project."""
    text = CORPUS.read_text(encoding="utf-8")
    return text.partition("limitations under the License.\n\n")[2]
