"""Converts checkpoints, or random weights of a shape, to ONNX graphs, tensor by tensor.

    make_onnx(Path("SmolLM2-135M"), Path("smollm2-135m-int8"), "int8")
    make_random_onnx(ladder_model("8b").spec, Path("llama-3.1-8b-int8"), "int8")

This module writes the graph of the families in shape/model_families.py: attention with
GroupQueryAttention, a KV cache that is updated in place, and logits of each row's last token. At
most one matrix is in memory at a time. For other architectures, see
crossover.models.weights.export_with_optimum.

    int8  One scale per weight row. Activations are quantized to 8 bits, and matrices are multiplied
          as integers. The inputs of gate and up share one fixed scale; elsewhere, each token has a
          scale of its own.
    int4  MatMulNBits: one scale per 32 weights, activations in blocks of 8 bits. The head is int8.
    fp32  Not quantized.

In trained models, a few channels are a hundred times as large as the others, and would use up the
8 bits of a token's scale. Therefore trained weights are rotated before they are quantized to int8
(rotated_weights.py): the model computes the same function in a basis in which all
channels have similar sizes. On CPUs without VNNI, the sum of two 8-bit products saturates 16 bits,
so int8 weights are limited to 7 bits there (`int8_bits`; the manifest's generator records it).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

from crossover.models.errors import BrokenWeights, UnsupportedModel
from crossover.models.machine_limits import int8_bits
from crossover.models.shape.hf_config import TEXTS, read_config, spec_of_config, v4_config
from crossover.models.shape.model_families import FAMILIES
from crossover.models.shape.model_spec import ModelSpec
from crossover.models.weights.export_with_optimum import export_graph, foreign_spec
from crossover.models.weights.random_weights import RandomWeights, as_bytes, write_texts
from crossover.models.weights.rotated_weights import BLOCK, RotatedRows, rotary_angles
from crossover.models.weights.safetensors_reader import (
    EMBEDDING,
    HEAD,
    Floats,
    Rows,
    check_tensors,
    stored_rows,
)
from crossover.models.weights.weights_manifest import (
    GENERATOR,
    Manifest,
    Progress,
    atomic_folder,
    onnx_generator,
    read_manifest,
    write_manifest,
)

GRAPH, DATA = "model.onnx", "model.onnx.data"
GROUP = 32  # weights of an int4 row that share a scale
# The range of the fixed scale for a norm's output, in standard deviations. In the rotated basis its
# channels are nearly Gaussian. The KL divergence on SmolLM2-135M-Instruct is 0.0098 nats with
# the fixed scale before gate and up, 0.0107 with it before query, key and value too, and 0.0094
# with a scale for each token (`python -m tests.bench.format_quality onnx:int8`).
NORMED_SPAN = np.float32(3.5)
THREADS = 2
# Quantized rows of a matrix: the stored numbers, and the scales.
Quantized = tuple[npt.NDArray[Any], Floats]


def make_onnx(
    source: Path,
    target: Path,
    weight_format: str,
    *,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
) -> Path:
    """Convert the Hugging Face folder `source` to the ONNX folder `target`, which is replaced as a
    whole. Return `target`.

    `spec` is the model's shape, if the caller knows more than the folder's config.json.

    Raises UnsupportedModel, BrokenWeights.
    """
    report = progress or (lambda what, fraction: None)
    config, source_manifest = read_config(source), read_manifest(source)
    seed = None if source_manifest is None else source_manifest.seed
    is_foreign = config.get("model_type") not in FAMILIES  # exported by optimum
    if spec is None:
        spec = (
            foreign_spec(config, source.name) if is_foreign else spec_of_config(config, source.name)
        )
    with atomic_folder(target) as folder:
        for name in TEXTS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        (folder / "config.json").write_bytes(msgspec.json.encode(v4_config(config)))
        if is_foreign:
            export_graph(source, folder, weight_format, report)
        else:
            check_tensors(source, spec)
            rows = stored_rows(source, spec)
            if weight_format == "int8" and seed is None:
                rows = RotatedRows(spec, rows, source)
            _write_graph(spec, rows, folder, weight_format, report)
        generator = onnx_generator(weight_format)
        write_manifest(folder, Manifest("onnx", spec, weight_format, source.name, generator, seed))
    return target


def make_random_onnx(
    spec: ModelSpec, target: Path, weight_format: str, *, progress: Progress | None = None
) -> Path:
    """Write the ONNX folder `target` with seeded random weights and the same graph as trained
    weights would have. An existing folder is replaced as a whole. Return `target`."""
    report = progress or (lambda what, fraction: None)
    with atomic_folder(target) as folder:
        write_texts(spec, folder, "fp32")
        _write_graph(spec, RandomWeights(spec, 0).rows, folder, weight_format, report)
        generator = f"{onnx_generator(weight_format)}, {GENERATOR}"
        write_manifest(folder, Manifest("onnx", spec, weight_format, "synthetic", generator, 0))
    return target


def _write_graph(
    spec: ModelSpec, rows: Rows, folder: Path, weight_format: str, progress: Progress
) -> None:
    """Write the files GRAPH and DATA in the folder."""
    with (folder / DATA).open("wb") as out, ThreadPoolExecutor(THREADS) as pool:
        writer = GraphWriter(spec, rows, out, pool, weight_format, progress)
        (folder / GRAPH).write_bytes(writer.graph().SerializeToString())


@dataclass
class GraphWriter:
    """Builds the nodes of the graph and writes the weights to DATA meanwhile.

    Methods that add nodes take and return the names of their inputs and outputs in the graph.
    """

    spec: ModelSpec
    rows: Rows
    file: BinaryIO
    pool: ThreadPoolExecutor
    format: str
    progress: Progress

    def __post_init__(self) -> None:
        self.max_int8 = np.float32(127 if int8_bits() == 8 else 64)  # the largest int8 weight
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.shapes = {tensor.name: tensor.shape for tensor in self.spec.tensors()}
        self.shapes[HEAD] = self.shapes[EMBEDDING]

    # --- constants

    def constant(self, name: str, values: npt.NDArray[Any]) -> str:
        """Add a constant; values of 1 KiB and more go to the file. Return its name."""
        if values.nbytes >= 1024:
            return self.streamed(name, values.dtype.str, values.shape, [values])
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def streamed(
        self, name: str, dtype: str, dims: Sequence[int], parts: Iterable[npt.NDArray[Any]]
    ) -> str:
        """Add a constant of this shape, whose parts are written to the file one after the other.
        Return its name."""
        self.file.write(b"\0" * (-self.file.tell() % 4096))
        offset = self.file.tell()
        for part in parts:
            self.file.write(as_bytes(part))
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        tensor = TensorProto(
            name=name, dims=dims, data_type=kind, data_location=TensorProto.EXTERNAL
        )
        length = self.file.tell() - offset
        for key, value in (("location", DATA), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.constants.append(tensor)
        return name

    def vector(self, *sources: str) -> str:
        """Add a constant with these vectors one after the other. Return its name."""
        parts = [self.rows(source, 0, self.shapes[source][0]) for source in sources]
        return self.constant(sources[0], np.concatenate(parts))

    def quantized_blocks(
        self, sources: tuple[str, ...], quantize: Callable[[Floats], Quantized]
    ) -> Iterator[Quantized]:
        """Yield the quantized rows of these matrices block by block, in order.

        Raises BrokenWeights if a matrix has NaN or infinity.
        """
        block_rows = max(1, BLOCK // self.shapes[sources[0]][1])
        blocks = [
            (source, first)
            for source in sources
            for first in range(0, self.shapes[source][0], block_rows)
        ]

        def quantized(block: tuple[str, int]) -> Quantized:
            source, first = block
            values = self.rows(source, first, min(self.shapes[source][0], first + block_rows))
            if not math.isfinite(float(values.sum())):
                raise BrokenWeights(f"The tensor {source} of {self.spec.name} has NaN or infinity")
            return quantize(values)

        for index in range(0, len(blocks), THREADS):
            yield from self.pool.map(quantized, blocks[index : index + THREADS])

    def matrices(
        self,
        sources: tuple[str, ...],
        kind: str,
        dims: list[int],
        quantize: Callable[[Floats], Quantized],
    ) -> tuple[str, Floats]:
        """Add a constant of type `kind` and shape `dims` with the quantized rows of these matrices
        one below the other. Return its name and the scales."""
        scales = []

        def parts() -> Iterator[npt.NDArray[Any]]:
            for packed, scale in self.quantized_blocks(sources, quantize):
                scales.append(scale.reshape(-1))
                yield packed

        return self.streamed(sources[0], kind, dims, parts()), np.concatenate(scales)

    # --- products

    def product(self, x: str, y: str, *sources: str, is_normed: bool = False) -> str:
        """Add y = x @ W.T, where W are these matrices one below the other. Return y.

        `is_normed`: x is the output of a norm whose weights are folded into the matrices.
        """
        if self.format == "fp32":
            return self.float_product(x, y, sources)
        if self.format == "int4" and sources != (HEAD,):
            return self.int4_product(x, y, sources)
        return self.int8_product(x, y, sources, is_normed and self.format == "int8")

    def product_shape(self, sources: tuple[str, ...]) -> tuple[int, int]:
        """Return the rows of all these matrices together, and the width of a row."""
        rows = sum(self.shapes[source][0] for source in sources)
        return rows, self.shapes[sources[0]][1]

    def float_product(self, x: str, y: str, sources: tuple[str, ...]) -> str:
        """Add the product with float32 weights. Return y."""
        weight = EMBEDDING  # a tied head is the embedding, which is written already
        if sources != (HEAD,) or not self.spec.tied:
            weight, _ = self.matrices(sources, "f4", [*self.product_shape(sources)], _unquantized)
        return self.node("FusedMatMul", [x, weight], y, domain="com.microsoft", transB=1)

    def int4_product(self, x: str, y: str, sources: tuple[str, ...]) -> str:
        """Add the product with int4 weights. Return y. Raises UnsupportedModel."""
        rows, width = self.product_shape(sources)
        if width % GROUP:
            raise UnsupportedModel(
                f"{self.spec.name} cannot be converted to int4: the rows of {sources[0]} have "
                f"{width} elements, which is not a multiple of {GROUP}. Use int8."
            )
        dims = [rows, width // GROUP, GROUP // 2]
        weight, scales = self.matrices(sources, "u1", dims, _int4_groups)
        inputs = [x, weight, self.constant(f"{sources[0]}_scale", scales)]
        settings = {"K": width, "N": rows, "bits": 4, "block_size": GROUP, "accuracy_level": 4}
        return self.node("MatMulNBits", inputs, y, domain="com.microsoft", **settings)

    def int8_product(self, x: str, y: str, sources: tuple[str, ...], has_fixed_scale: bool) -> str:
        """Add the product with int8 weights. Return y.

        `has_fixed_scale`: x is quantized with the fixed scale of a norm's output, and not with a
        scale for each token.
        """
        rows, width = self.product_shape(sources)
        transposed, weight_scales = np.empty((width, rows), np.int8), np.empty(rows, np.float32)
        first = 0
        for packed, scales in self.quantized_blocks(sources, self.int8_rows):
            end = first + len(scales)
            transposed[:, first:end] = packed.T
            weight_scales[first:end] = scales
            first = end
        weight = self.constant(sources[0], transposed)
        del transposed  # at most one matrix is in memory
        # A quantized activation is an integer from -127 to 127, in units of 1/127 of the range: the
        # fixed one, or the largest absolute value of the token.
        if has_fixed_scale:
            quantized = self.quantized_norm(x)
            scales = weight_scales * NORMED_SPAN / np.float32(127)
            scale = self.constant(f"{sources[0]}_scale", scales)
            return self.integer_product(quantized, weight, scale, y)
        quantized, largest = self.quantized_by_token(x)
        scale = self.constant(f"{sources[0]}_scale", weight_scales / np.float32(127))
        unscaled = self.integer_product(quantized, weight, scale, f"{y}/unscaled")
        return self.node("Mul", [unscaled, largest], y)

    def integer_product(self, quantized: str, weight: str, scale: str, y: str) -> str:
        """Add y = the product of quantized activations and weights, times the scale. Return y."""
        inputs = [quantized, weight, "scale_one", scale, "token_zero"]
        return self.node("MatMulIntegerToFloat", inputs, y, domain="com.microsoft")

    def quantized_norm(self, x: str) -> str:
        """Quantize the output x of a norm to 8 bits, with the fixed scale of all tokens. Return the
        quantized activations."""
        quantized = f"{x}/quantized"
        if not self.has_node_for(quantized):
            self.node("QuantizeLinear", [x, "normed_step", "token_zero"], quantized)
        return quantized

    def quantized_by_token(self, x: str) -> tuple[str, str]:
        """Quantize activations x to 8 bits, with a scale for each token. Return the quantized
        activations and the largest absolute value of each token."""
        quantized, largest = f"{x}/quantized", f"{x}/largest"
        if not self.has_node_for(quantized):
            sizes = self.node("Abs", [x], f"{x}/sizes")
            maximum = self.node("ReduceMax", [sizes, "token_axis"], f"{x}/most", keepdims=1)
            self.node("Max", [maximum, "token_least"], largest)
            unit = self.node("Div", [x, largest], f"{x}/unit")
            self.node("QuantizeLinear", [unit, "token_step", "token_zero"], quantized)
        return quantized, largest

    def has_node_for(self, output: str) -> bool:
        """Return whether one of the last nodes computes this output already, since several products
        share an input."""
        return any(output in node.output for node in self.nodes[-16:])

    def int8_rows(self, values: Floats) -> Quantized:
        """Return rows [rows, width] as int8, and one scale for each row."""
        scale = np.maximum(values.max(-1), -values.min(-1)) / self.max_int8
        scale[scale < np.finfo(np.float32).tiny] = 1
        values = values / scale[:, None]
        return np.rint(values, out=values).astype(np.int8), scale

    # --- the graph

    def node(self, kind: str, inputs: list[str], *outputs: str, **more: Any) -> str:
        """Add a node of this operator. Return its first output."""
        name = next(output for output in outputs if output)
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=f"{name}/{kind}", **more))
        return outputs[0]

    def embed(self) -> str:
        """Add the embedding of `input_ids`."""
        shape = list(self.shapes[EMBEDDING])
        if self.format == "fp32":
            weight, _ = self.matrices((EMBEDDING,), "f4", shape, _unquantized)
            return self.node("Gather", [weight, "input_ids"], "embedding")
        weight, scales = self.matrices((EMBEDDING,), "i1", shape, self.int8_rows)
        scale = self.constant(f"{EMBEDDING}_scale", scales[:, None])
        rows = self.node("Gather", [weight, "input_ids"], "embedding/rows")
        floats = self.node("Cast", [rows], "embedding/float", to=TensorProto.FLOAT)
        row_scales = self.node("Gather", [scale, "input_ids"], "embedding/scale")
        return self.node("Mul", [floats, row_scales], "embedding")

    def norm(self, x: str, y: str, source: str, added: str = "") -> tuple[str, str]:
        """Add the norm y of x + added, or of x. Return y and the sum, which is the next residual
        stream."""
        settings = {"epsilon": self.spec.norm_epsilon}
        weight = self.vector(source)
        if not added:
            kind = "SimplifiedLayerNormalization"
            return self.node(kind, [x, weight], y, **settings, axis=-1, stash_type=1), x
        kind, total = "SkipSimplifiedLayerNormalization", f"{y}/sum"
        outputs = (y, "", "", total) if source != "model.norm.weight" else (y,)
        self.node(kind, [x, added, weight], *outputs, domain="com.microsoft", **settings)
        return y, total

    def attention(self, x: str, layer: int) -> str:
        """Add the attention of one layer, with its KV cache."""
        spec, path = self.spec, f"model.layers.{layer}.self_attn"
        parts = ("q_proj", "k_proj", "v_proj")
        packed = self.product(x, f"{path}.qkv", *(f"{path}.{part}.weight" for part in parts))
        if spec.qkv_bias:
            bias = self.vector(*(f"{path}.{part}.bias" for part in parts))
            packed = self.node("Add", [packed, bias], f"{path}.qkv/biased")
        inputs = [packed, "", ""]
        if spec.qk_norm:
            inputs = [f"{path}.{part}" for part in parts]
            self.node("Split", [packed, "qkv_sizes"], *inputs, axis=-1)
            for index, part in enumerate(("q_norm", "k_norm")):
                z = self.node("Reshape", [inputs[index], "heads_shape"], f"{path}.{part}/heads")
                z, _ = self.norm(z, f"{path}.{part}/normed", f"{path}.{part}.weight")
                inputs[index] = self.node("Reshape", [z, "flat_shape"], f"{path}.{part}")
        inputs += [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        inputs += ["kv_lengths", "kv_width", "cos_cache", "sin_cache", "", "", ""]
        settings = {
            "num_heads": spec.heads,
            "kv_num_heads": spec.kv_heads,
            "scale": spec.head_dim**-0.5,
            "do_rotary": 1,
            "rotary_interleaved": 0,
        }
        kv = (f"present.{layer}.key", f"present.{layer}.value")
        z = f"{path}.heads"
        self.node("GroupQueryAttention", inputs, z, *kv, domain="com.microsoft", **settings)
        return self.product(z, f"{path}.out", f"{path}.o_proj.weight")

    def mlp(self, x: str, path: str) -> str:
        """Add down(silu(gate(x)) * up(x)), the MLP whose weights are under this path."""
        gate = self.product(x, f"{path}.gate", f"{path}.gate_proj.weight", is_normed=True)
        up = self.product(x, f"{path}.up", f"{path}.up_proj.weight", is_normed=True)
        z = self.node("Sigmoid", [gate], f"{path}.gate/share")
        z = self.node("Mul", [gate, z], f"{path}.gate/silu")
        z = self.node("Mul", [z, up], f"{path}.both")
        return self.product(z, f"{path}.out", f"{path}.down_proj.weight")

    def graph(self) -> ModelProto:
        """Return the whole model. All weights have been written to the file by then."""
        self._settings()
        x, added = self.embed(), ""
        for layer in range(self.spec.layers):
            path = f"model.layers.{layer}"
            done_share = layer / self.spec.layers
            self.progress(f"writing layer {layer + 1} of {self.spec.layers}", done_share)
            y, x = self.norm(x, f"{path}.in", f"{path}.input_layernorm.weight", added)
            added = self.attention(y, layer)
            source = f"{path}.post_attention_layernorm.weight"
            y, x = self.norm(x, f"{path}.middle", source, added)
            added = self.mlp(y, f"{path}.mlp")
        y, _ = self.norm(x, "final", "model.norm.weight", added)
        # Logits of each row's last token before the padding on the right, so that prompts of
        # different lengths can share a pass.
        z = self.node("Shape", ["input_ids"], "head/tokens", start=1)
        z = self.node("Sub", [z, "one"], "head/end")
        z = self.node("Min", ["kv_last", z], "head/row")
        z = self.node("Unsqueeze", [z, "one"], "head/rows")
        z = self.node("GatherND", [y, z], "head/gathered", batch_dims=1)
        z = self.node("Unsqueeze", [z, "one"], "head/in")
        self.product(z, "logits", HEAD)
        return self._model()

    def _settings(self) -> None:
        """Add the small constants, the rotary embeddings, and each row's length from the mask."""
        spec = self.spec
        cos, sin = rotary_angles(spec, spec.context)
        sizes = np.array([spec.heads, spec.kv_heads, spec.kv_heads], np.int64) * spec.head_dim
        constants: dict[str, npt.NDArray[Any]] = {
            "cos_cache": cos,
            "sin_cache": sin,
            "one": np.array([1], np.int64),
            "first": np.array(1, np.int64),
            "token_axis": np.array([-1], np.int64),
            "token_step": np.array(1 / 127, np.float32),
            "normed_step": np.array(NORMED_SPAN / 127, np.float32),
            "scale_one": np.array(1, np.float32),
            "token_zero": np.array(128, np.uint8),
            "token_least": np.array(1e-12, np.float32),
            "qkv_sizes": sizes,
            "heads_shape": np.array([0, 0, -1, spec.head_dim], np.int64),
            "flat_shape": np.array([0, 0, -1], np.int64),
        }
        for name, values in constants.items():
            self.constant(name, values)
        z = self.node("ReduceSum", ["attention_mask", "one"], "kv/sum", keepdims=0)
        z = self.node("Sub", [z, "one"], "kv_last")
        self.node("Cast", [z], "kv_lengths", to=TensorProto.INT32)
        z = self.node("Shape", ["attention_mask"], "kv/shape")
        z = self.node("Gather", [z, "first"], "kv/columns", axis=0)
        self.node("Cast", [z], "kv_width", to=TensorProto.INT32)

    def _model(self) -> ModelProto:
        """Return the model of all nodes and constants, with its inputs and outputs."""
        spec, value = self.spec, helper.make_tensor_value_info
        caches = [f"{layer}.{kind}" for layer in range(spec.layers) for kind in ("key", "value")]

        def kv_shape(length: str) -> list[Any]:
            return ["batch_size", spec.kv_heads, f"{length}_sequence_length", spec.head_dim]

        inputs = [
            value("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
            value("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
            *(
                value(f"past_key_values.{cache}", TensorProto.FLOAT, kv_shape("past"))
                for cache in caches
            ),
        ]
        outputs = [
            value("logits", TensorProto.FLOAT, ["batch_size", 1, spec.vocabulary]),
            *(value(f"present.{cache}", TensorProto.FLOAT, kv_shape("total")) for cache in caches),
        ]
        graph = helper.make_graph(self.nodes, "main_graph", inputs, outputs, self.constants)
        operators = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, ir_version=10, opset_imports=operators)


def _unquantized(values: Floats) -> Quantized:
    """Return rows as they are, with scales that nobody uses."""
    return values, values[:, 0]


def _int4_groups(values: Floats) -> Quantized:
    """Return rows [rows, width] as uint8 [rows, groups, GROUP / 2] and scales [rows, groups]. Each
    byte has two weights, from 0 to 15, which stand for -8 to 7 times the scale.

    The largest weight of a group becomes -8. This uses all 16 levels, while the scale
    largest / 7 would use 15.
    """
    groups = values.reshape(len(values), -1, GROUP)
    largest = np.abs(groups).argmax(-1)[..., None]
    scale = np.take_along_axis(groups, largest, -1)[..., 0] / np.float32(-8)
    divisor = np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1), scale)
    levels = np.clip(np.rint(groups / divisor[..., None]) + 8, 0, 15).astype(np.uint8)
    return levels[..., 0::2] | (levels[..., 1::2] << 4), scale.astype(np.float32)
