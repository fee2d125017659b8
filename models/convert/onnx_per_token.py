"""Give a dynamic int8 graph one activation scale a token instead of one a batch.

    python -m models.convert.onnx_per_token folder/model.onnx

DynamicQuantizeLinear finds one scale for a whole tensor: logits then depend on the other rows of
the batch. Here each token is divided by its own largest magnitude, rounded to 8 bits, multiplied in
integers and scaled back: bit for bit the same in any batch. Costs 5 to 8 % of the prefill, nothing
in decoding (SmolLM2-135M, AVX2).

    DynamicQuantizeLinear(x)
        -> m = max(|x|) of the token, q = QuantizeLinear(x / m, 1/127, 128)
    MatMulInteger(q, W, z), Cast, Mul(s * w)
        -> MatMulInteger(q, W, 128), Cast, Mul(w / 127), Mul(m)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import BrokenWeights

STEPS = 127  # whole numbers from -127 to 127 times a token's largest magnitude
_STEP, _ZERO, _LEAST, _AXIS = "token_step", "token_zero", "token_least", "token_axis"


def per_token(graph: Any) -> int:
    """Rewrite an onnx.GraphProto in place; return how many activations changed.

    Raises BrokenWeights for a use of a dynamic scale that no quantiser writes.
    """
    from onnx import numpy_helper

    constants = {tensor.name: tensor for tensor in graph.initializer}
    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    dynamic = [node for node in graph.node if node.op_type == "DynamicQuantizeLinear"]
    if not dynamic:
        return 0
    replaced: dict[int, list[Any]] = {}
    for node in dynamic:
        source, (rounded, scale, zero) = node.input[0], node.output
        largest = f"{rounded}_largest"
        replaced[id(node)] = _quantising(source, rounded, largest)
        for user in users.get(zero, []):
            user.input[:] = [_ZERO if name == zero else name for name in user.input]
        for product in users.get(scale, []):
            weights = [name for name in product.input if name != scale]
            if product.op_type != "Mul" or len(weights) != 1 or weights[0] not in constants:
                raise BrokenWeights(
                    f"the dynamic scale {scale!r} is used by {product.op_type} {product.name!r}, "
                    "which no quantiser writes"
                )
            smaller = f"{weights[0]}_per_step"
            if smaller not in constants:
                constants[smaller] = numpy_helper.from_array(
                    (numpy_helper.to_array(constants[weights[0]]) / np.float32(STEPS)).astype(
                        np.float32
                    ),
                    smaller,
                )
                graph.initializer.append(constants[smaller])
            replaced[id(product)] = []
            for last in users.get(product.output[0], []):
                replaced[id(last)] = _scaling(last, product.output[0], smaller, largest)
    nodes = [new for node in graph.node for new in replaced.get(id(node), [node])]
    del graph.node[:]
    graph.node.extend(nodes)
    for name, value in (
        (_STEP, np.array(1 / STEPS, np.float32)),
        (_ZERO, np.array(128, np.uint8)),
        (_LEAST, np.array(1e-12, np.float32)),
        (_AXIS, np.array([-1], np.int64)),
    ):
        graph.initializer.append(numpy_helper.from_array(value, name))
    return len(dynamic)


def rewrite(file: Path) -> int:
    """The same for a file, with its weights beside it. Raises BrokenWeights."""
    import onnx

    model = onnx.load(str(file))
    changed = per_token(model.graph)
    if not changed:
        raise BrokenWeights(f"{file.name} has no dynamic quantisation")
    weights = file.with_name(file.name + ".data")
    weights.unlink(missing_ok=True)
    onnx.save(model, str(file), save_as_external_data=True, location=weights.name)
    return changed


def _quantising(source: str, rounded: str, largest: str) -> list[Any]:
    from onnx import helper

    return [
        helper.make_node("Abs", [source], [f"{largest}_sizes"], name=f"{largest}/Abs"),
        helper.make_node(
            "ReduceMax",
            [f"{largest}_sizes", _AXIS],
            [f"{largest}_any"],
            name=f"{largest}/ReduceMax",
            keepdims=1,
        ),
        helper.make_node("Max", [f"{largest}_any", _LEAST], [largest], name=f"{largest}/Max"),
        helper.make_node("Div", [source, largest], [f"{largest}_unit"], name=f"{largest}/Div"),
        helper.make_node(
            "QuantizeLinear",
            [f"{largest}_unit", _STEP, _ZERO],
            [rounded],
            name=f"{largest}/QuantizeLinear",
        ),
    ]


def _scaling(last: Any, product: str, weight_scale: str, largest: str) -> list[Any]:
    """Mul(sums, product) as two products: with the weights' scales, then with the token's."""
    from onnx import helper

    sums = next(name for name in last.input if name != product)
    return [
        helper.make_node(
            "Mul", [sums, weight_scale], [f"{last.output[0]}_unscaled"], name=f"{last.name}/weights"
        ),
        helper.make_node(
            "Mul",
            [f"{last.output[0]}_unscaled", largest],
            list(last.output),
            name=f"{last.name}/token",
        ),
    ]


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
