"""Logits of an ONNX graph, token by token through its KV cache, without any of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from models.spec import ModelSpec


def graph_logits(
    graph: Path, ids: npt.NDArray[np.int64], spec: ModelSpec
) -> npt.NDArray[np.float32]:
    """[sequences, tokens, vocabulary] for ids [sequences, tokens]."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), settings, ["CPUExecutionProvider"])
    names = {item.name for item in session.get_inputs()}
    caches = sorted(name for name in names if name.startswith("past_key_values."))
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in caches)]
    empty = np.zeros((len(ids), spec.kv_heads, 0, spec.head_dim), np.float32)
    past: list[npt.NDArray[Any]] = [empty for _ in caches]
    out = []
    for position in range(ids.shape[1]):
        feeds: dict[str, npt.NDArray[Any]] = {
            "input_ids": ids[:, position : position + 1],
            "attention_mask": np.ones((len(ids), position + 1), np.int64),
        }
        if "position_ids" in names:
            feeds["position_ids"] = np.full((len(ids), 1), position, np.int64)
        feeds.update(zip(caches, past, strict=True))
        logits, *past = session.run(outputs, feeds)
        out.append(logits[:, -1].astype(np.float32))
    return np.stack(out, 1)
