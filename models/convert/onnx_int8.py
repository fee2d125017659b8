"""Quantise a float32 ONNX graph to dynamic int8 by optimum's ORTQuantizer.

    python -m models.convert.onnx_int8 folder out avx512

Only products with a constant matrix are quantised: in an unfused graph the quantiser would also
take queries x keys and positions x frequencies, which 8 bits cannot hold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

MODEL = "model.onnx"


def without_weights(graph: Any) -> list[str]:
    """Names of the MatMul nodes of an onnx.GraphProto whose second factor is no stored matrix."""
    constants = {tensor.name for tensor in graph.initializer}
    return [
        node.name
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] not in constants
    ]


def quantise(folder: Path, out: Path, target: str) -> None:
    """Write the quantised graph of `folder`/model.onnx as `out`/model.onnx."""
    import onnx
    from optimum.onnxruntime import ORTQuantizer
    from optimum.onnxruntime.configuration import AutoQuantizationConfig

    graph = onnx.load(str(folder / MODEL), load_external_data=False).graph
    narrow = {"reduce_range": True} if target == "avx512" else {}
    settings = getattr(AutoQuantizationConfig, target)(
        is_static=False, per_channel=True, nodes_to_exclude=without_weights(graph), **narrow
    )
    quantiser = ORTQuantizer.from_pretrained(str(folder), file_name=MODEL)
    quantiser.quantize(
        save_dir=str(out),
        quantization_config=settings,
        file_suffix="",
        use_external_data_format=True,
    )


if __name__ == "__main__":
    quantise(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
