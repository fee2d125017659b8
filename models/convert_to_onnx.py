"""Checkpoints, or random weights of a shape, to ONNX graphs, written tensor by tensor.

    make_onnx("SmolLM2-135M", "smollm2-135m-int8", "int8")
    make_random_onnx(rung("8b").spec, "llama-3.1-8b-int8", "int8")

Of Llama, Mistral, Qwen2 and Qwen3 the graph is written here: attention by GroupQueryAttention, with
a KV cache updated in place and logits of each row's last token. No more of the weights is in memory
than one matrix. Other architectures: models.export_with_optimum.

    int8  a scale a weight row and a scale a token; products of whole numbers (but for 64 channels
          of an MLP)
    int4  MatMulNBits: a scale for 32 weights, activations in blocks of 8 bits; the head is int8
    fp32  as they are

Trained models have a few channels a hundred times as large as the others, on which one scale a
token spends its 8 bits. So for int8 trained weights are first turned (models.turned_weights): the
same function in a basis in which all channels are alike. Without VNNI, sums of two 8-bit products
saturate 16 bits: there int8 weights have 7 bits (`int8_bits`; the manifest's generator says so).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper

from models.conversion import copy_texts, finish, open_source, quality_of
from models.errors import BrokenWeights, UnsupportedModel
from models.float_forward import BLOCK, Ids
from models.formats import ONNX_FORMATS
from models.hf_config import FAMILIES, read_config
from models.machine import int8_bits
from models.manifest import Manifest, Progress, atomic_folder, converter, write_manifest
from models.random_weights import GENERATOR, Weights, as_bytes, rope_factors, write_texts
from models.safetensors_reader import EMBEDDING, HEAD, Floats, Rows
from models.spec import ModelSpec
from models.turned_weights import Turned, calibration_text, far_channels

GRAPH, DATA = "model.onnx", "model.onnx.data"
GROUP = 32  # weights of an int4 row that share a scale
THREADS = 2
TYPES = {"f4": 1, "u1": 2, "i1": 3, "i8": 7}  # numpy's names -> onnx's TensorProto.DataType


def make_onnx(
    source: str | Path,
    out_folder: str | Path,
    weight_format: str,
    *,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
) -> Path:
    """Convert a Hugging Face folder; returns `out_folder`, replaced whole.

    `spec`: its shape, where it is known better than the source says. Raises UnsupportedModel,
    BrokenWeights.
    """
    path, target = Path(source), Path(out_folder)
    say = progress or (lambda what, fraction: None)
    if weight_format not in ONNX_FORMATS:
        raise UnsupportedModel(
            f"unknown ONNX format {weight_format!r}; known: {', '.join(ONNX_FORMATS)}"
        )
    if read_config(path).get("model_type") not in FAMILIES:
        from models.export_with_optimum import export_onnx

        return export_onnx(path, target, weight_format, progress=progress)
    found = open_source(path, spec)
    rows = found.rows
    if weight_format == "int8" and not found.is_random:
        rows = Turned(found.spec, rows, found.ids(calibration_text()))
    with atomic_folder(target) as folder:
        copy_texts(path, folder)
        _write_graph(found.spec, rows, folder, weight_format, say)
        quality = quality_of(found, lambda ids: graph_logits(folder / GRAPH, ids, found.spec), say)
        finish(path, folder, weight_format, found.spec, quality)
    return target


def make_random_onnx(
    spec: ModelSpec,
    out_folder: str | Path,
    weight_format: str,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """A graph of seeded random weights; returns `out_folder`, replaced whole if it was there.

    The graph and its types are those of trained weights, and so are time and memory.
    """
    say = progress or (lambda what, fraction: None)
    with atomic_folder(target := Path(out_folder)) as folder:
        write_texts(spec, folder, "fp32")
        _write_graph(spec, Weights(spec, seed).rows, folder, weight_format, say)
        made_by = f"{converter(weight_format)}, {GENERATOR}"
        write_manifest(folder, Manifest("onnx", spec, weight_format, "synthetic", made_by, seed))
    return target


def _write_graph(
    spec: ModelSpec, rows: Rows, folder: Path, weight_format: str, say: Progress
) -> None:
    """Write GRAPH and DATA."""
    with (folder / DATA).open("wb") as out, ThreadPoolExecutor(THREADS) as pool:
        writer = GraphWriter(spec, rows, out, pool, weight_format, say)
        (folder / GRAPH).write_bytes(writer.graph().SerializeToString())


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


class GraphWriter:
    """Writes weights to DATA as it builds the graph's nodes."""

    def __init__(
        self,
        spec: ModelSpec,
        rows: Rows,
        out: BinaryIO,
        pool: ThreadPoolExecutor,
        weight_format: str,
        say: Progress,
    ) -> None:
        self.spec, self.rows, self.file, self.pool, self.say = spec, rows, out, pool, say
        self.format = weight_format
        self.steps = 127 if int8_bits() == 8 else 64
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
        self.shapes[HEAD] = self.shapes[EMBEDDING]
        for name, shape in self.shapes.items():
            if weight_format == "int4" and len(shape) == 2 and shape[1] % GROUP:
                raise UnsupportedModel(
                    f"{spec.name} has {name} with rows of {shape[1]}, no multiple of {GROUP}, "
                    "which int4 needs; int8 has no such limit"
                )
        self.total_bytes = 4 * spec.parameters

    # --- constants

    def begin(self, name: str, dtype: str, dims: tuple[int, ...]) -> str:
        """A constant whose bytes are written to the file next."""
        self.file.write(b"\0" * (-self.file.tell() % 4096))
        tensor = TensorProto(
            name=name, dims=dims, data_type=TYPES[dtype], data_location=TensorProto.EXTERNAL
        )
        length = math.prod(dims) * np.dtype(dtype).itemsize
        for key, value in (("location", DATA), ("offset", self.file.tell()), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.constants.append(tensor)
        return name

    def constant(self, name: str, values: npt.NDArray[Any]) -> str:
        dtype = values.dtype.str[1:]
        if values.nbytes < 1024:
            raw = values.tobytes()
            self.constants.append(helper.make_tensor(name, TYPES[dtype], values.shape, raw, True))
            return name
        self.begin(name, dtype, values.shape)
        self.file.write(as_bytes(values))
        return name

    def vector(self, *sources: str) -> str:
        parts = [self.rows(one, 0, self.shapes[one][0]) for one in sources]
        return self.constant(sources[0], np.concatenate(parts))

    def blocks(
        self, source: str, work: Callable[[Floats], tuple[npt.NDArray[Any], Floats]]
    ) -> Iterator[tuple[npt.NDArray[Any], Floats]]:
        """`work` of each block of a matrix's rows, in order."""
        count, width = self.shapes[source]
        step = max(1, BLOCK // width)

        def one(first: int) -> tuple[npt.NDArray[Any], Floats]:
            values = self.rows(source, first, min(count, first + step))
            if not math.isfinite(float(values.sum())):
                raise BrokenWeights(f"{source} of {self.spec.name} holds NaN or infinity")
            return work(values)

        for first in range(0, count, THREADS * step):
            yield from self.pool.map(one, range(first, min(count, first + THREADS * step), step))

    # --- products

    def product(self, x: str, y: str, *sources: str) -> str:
        """y = x times the transposed matrices side by side."""
        self.say(f"writing {sources[0]}", self.file.tell() / self.total_bytes)
        is_whole = self.format == "int8" or (self.format == "int4" and sources == (HEAD,))
        make = self._int8 if is_whole else self._int4 if self.format == "int4" else self._fp32
        return make(x, y, sources)

    def _int8(self, x: str, y: str, sources: tuple[str, ...], skipped: int = 0) -> str:
        """`skipped`: columns of the matrices that x has not."""
        outs, width = [self.shapes[one][0] for one in sources], self.shapes[sources[0]][1] - skipped
        whole, steps = np.empty((width, sum(outs)), np.int8), np.empty(sum(outs), np.float32)
        at = 0
        for source in sources:
            for packed, each in self.blocks(
                source, lambda rows: self._rounded_rows(rows[:, skipped:])
            ):
                whole[:, at : at + len(each)] = packed.T
                steps[at : at + len(each)] = each
                at += len(each)
        weight = self.constant(sources[0], whole)
        del whole
        # The quantised token is whole numbers from -127 to 127, times largest / 127.
        scale = self.constant(f"{sources[0]}_scale", steps / np.float32(127))
        zero = self.constant(f"{sources[0]}_zero", np.zeros(sum(outs), np.int8))
        rounded, largest = self._rounded_tokens(x)
        z = self.node("MatMulInteger", [rounded, weight, "token_zero", zero], f"{y}/whole")
        z = self.node("Cast", [z], f"{y}/float", to=TensorProto.FLOAT)
        z = self.node("Mul", [z, scale], f"{y}/unscaled")
        return self.node("Mul", [z, largest], y)

    def _rounded_rows(self, values: Floats) -> tuple[npt.NDArray[Any], Floats]:
        """int8 rows and their scales."""
        scale = np.maximum(values.max(-1), -values.min(-1)) / np.float32(self.steps)
        scale[scale < np.finfo(np.float32).tiny] = 1
        values = values / scale[:, None]
        return np.rint(values, out=values).astype(np.int8), scale

    def _rounded_tokens(self, x: str) -> tuple[str, str]:
        """x by its token's largest magnitude, in 8 bits, and that magnitude; made once."""
        rounded, largest = f"{x}/quantized", f"{x}/largest"
        if not any(rounded in node.output for node in self.nodes[-16:]):
            z = self.node("Abs", [x], f"{x}/sizes")
            z = self.node("ReduceMax", [z, "token_axis"], f"{x}/most", keepdims=1)
            self.node("Max", [z, "token_least"], largest)
            z = self.node("Div", [x, largest], f"{x}/unit")
            self.node("QuantizeLinear", [z, "token_step", "token_zero"], rounded)
        return rounded, largest

    def _int4(self, x: str, y: str, sources: tuple[str, ...]) -> str:
        outs, width = sum(self.shapes[one][0] for one in sources), self.shapes[sources[0]][1]
        weight = self.begin(sources[0], "u1", (outs, width // GROUP, GROUP // 2))
        scales = []
        for source in sources:
            for packed, each in self.blocks(source, _nibbles):
                self.file.write(as_bytes(packed))
                scales.append(each.reshape(-1))
        scale = self.constant(f"{sources[0]}_scale", np.concatenate(scales))
        settings = {"K": width, "N": outs, "bits": 4, "block_size": GROUP, "accuracy_level": 4}
        return self.node("MatMulNBits", [x, weight, scale], y, domain="com.microsoft", **settings)

    def _fp32(self, x: str, y: str, sources: tuple[str, ...]) -> str:
        weight = EMBEDDING
        if sources != (HEAD,) or not self.spec.tied:
            outs = sum(self.shapes[one][0] for one in sources)
            weight = self._float_rows(sources, (outs, self.shapes[sources[0]][1]))
        return self.node("FusedMatMul", [x, weight], y, domain="com.microsoft", transB=1)

    def _float_rows(self, sources: tuple[str, ...], dims: tuple[int, ...]) -> str:
        self.begin(sources[0], "f4", dims)
        for source in sources:
            for values, _ in self.blocks(source, lambda rows: (rows, rows)):
                self.file.write(as_bytes(values))
        return sources[0]

    # --- the graph

    def node(self, kind: str, inputs: list[str], *outputs: str, **more: Any) -> str:
        name = next(one for one in outputs if one)
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=f"{name}/{kind}", **more))
        return outputs[0]

    def embed(self) -> str:
        if self.format == "fp32":
            weight = self._float_rows((EMBEDDING,), self.shapes[EMBEDDING])
            return self.node("Gather", [weight, "input_ids"], "embedding")
        weight = self.begin(EMBEDDING, "i1", self.shapes[EMBEDDING])
        scales = []
        for packed, each in self.blocks(EMBEDDING, self._rounded_rows):
            self.file.write(as_bytes(packed))
            scales.append(each)
        scale = self.constant(f"{EMBEDDING}_scale", np.concatenate(scales)[:, None])
        z = self.node("Gather", [weight, "input_ids"], "embedding/rows")
        z = self.node("Cast", [z], "embedding/float", to=TensorProto.FLOAT)
        scale = self.node("Gather", [scale, "input_ids"], "embedding/scale")
        return self.node("Mul", [z, scale], "embedding")

    def norm(self, x: str, y: str, source: str, added: str = "") -> tuple[str, str]:
        """The norm y of x + added, and that sum."""
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
            for at, part in enumerate(("q_norm", "k_norm")):
                z = self.node("Reshape", [inputs[at], "heads_shape"], f"{path}.{part}/heads")
                z, _ = self.norm(z, f"{path}.{part}/normed", f"{path}.{part}.weight")
                inputs[at] = self.node("Reshape", [z, "flat_shape"], f"{path}.{part}")
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
        gate = self.product(x, f"{path}.gate", f"{path}.gate_proj.weight")
        up = self.product(x, f"{path}.up", f"{path}.up_proj.weight")
        z = self.node("Sigmoid", [gate], f"{path}.gate/share")
        z = self.node("Mul", [gate, z], f"{path}.gate/silu")
        z = self.node("Mul", [z, up], f"{path}.both")
        if self.format != "int8":
            return self.product(z, f"{path}.out", f"{path}.down_proj.weight")
        # Its first channels reach furthest (models.turned_weights): they keep their precision.
        source, far = f"{path}.down_proj.weight", far_channels(self.spec)
        self.node("Split", [z, "mlp_sizes"], f"{path}.far", f"{path}.near", axis=-1)
        columns = [rows.T for rows, _ in self.blocks(source, lambda rows: (rows[:, :far], rows))]
        weight = self.constant(f"{source}/far", np.concatenate(columns, 1))
        z = self.node("MatMul", [f"{path}.far", weight], f"{path}.far/out")
        y = self._int8(f"{path}.near", f"{path}.near/out", (source,), far)
        return self.node("Add", [y, z], f"{path}.out")

    def graph(self) -> ModelProto:
        """The whole model; all weights are in the file when it returns."""
        self._settings()
        x, added = self.embed(), ""
        for layer in range(self.spec.layers):
            path = f"model.layers.{layer}"
            y, x = self.norm(x, f"{path}.in", f"{path}.input_layernorm.weight", added)
            added = self.attention(y, layer)
            source = f"{path}.post_attention_layernorm.weight"
            y, x = self.norm(x, f"{path}.middle", source, added)
            added = self.mlp(y, f"{path}.mlp")
        y, _ = self.norm(x, "final", "model.norm.weight", added)
        # Each row's last real token: prompts of unlike lengths can share a pass, padded right.
        z = self.node("Shape", ["input_ids"], "head/tokens", start=1)
        z = self.node("Sub", [z, "one"], "head/end")
        z = self.node("Min", ["kv_last", z], "head/row")
        z = self.node("Unsqueeze", [z, "one"], "head/rows")
        z = self.node("GatherND", [y, z], "head/gathered", batch_dims=1)
        z = self.node("Unsqueeze", [z, "one"], "head/in")
        self.product(z, "logits", HEAD)
        return self._model()

    def _settings(self) -> None:
        """Small constants, rotary caches, and each row's length from the mask."""
        spec = self.spec
        exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / spec.head_dim
        frequencies = 1.0 / spec.rope_theta**exponents
        if spec.rope_scaling is not None:
            frequencies /= rope_factors(spec, spec.rope_scaling)
        angles = np.outer(np.arange(spec.context, dtype=np.float32), frequencies)
        far = far_channels(spec)
        sizes = np.array([spec.heads, spec.kv_heads, spec.kv_heads], np.int64) * spec.head_dim
        for name, values in {
            "cos_cache": np.cos(angles).astype(np.float32),
            "sin_cache": np.sin(angles).astype(np.float32),
            "one": np.array([1], np.int64),
            "first": np.array(1, np.int64),
            "token_axis": np.array([-1], np.int64),
            "token_step": np.array(1 / 127, np.float32),
            "token_zero": np.array(128, np.uint8),
            "token_least": np.array(1e-12, np.float32),
            "qkv_sizes": sizes,
            "mlp_sizes": np.array([far, spec.intermediate - far], np.int64),
            "heads_shape": np.array([0, 0, -1, spec.head_dim], np.int64),
            "flat_shape": np.array([0, 0, -1], np.int64),
        }.items():
            self.constant(name, values)
        z = self.node("ReduceSum", ["attention_mask", "one"], "kv/sum", keepdims=0)
        z = self.node("Sub", [z, "one"], "kv_last")
        self.node("Cast", [z], "kv_lengths", to=TensorProto.INT32)
        z = self.node("Shape", ["attention_mask"], "kv/shape")
        z = self.node("Gather", [z, "first"], "kv/columns", axis=0)
        self.node("Cast", [z], "kv_width", to=TensorProto.INT32)

    def _model(self) -> ModelProto:
        spec, value = self.spec, helper.make_tensor_value_info
        each = [f"{layer}.{kind}" for layer in range(spec.layers) for kind in ("key", "value")]

        def kv(length: str) -> list[Any]:
            return ["batch_size", spec.kv_heads, f"{length}_sequence_length", spec.head_dim]

        inputs = [
            value("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
            value("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
            *(value(f"past_key_values.{one}", TensorProto.FLOAT, kv("past")) for one in each),
        ]
        outputs = [
            value("logits", TensorProto.FLOAT, ["batch_size", 1, spec.vocabulary]),
            *(value(f"present.{one}", TensorProto.FLOAT, kv("total")) for one in each),
        ]
        graph = helper.make_graph(self.nodes, "main_graph", inputs, outputs, self.constants)
        operators = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, ir_version=10, opset_imports=operators)


def _nibbles(values: Floats) -> tuple[npt.NDArray[Any], Floats]:
    """uint8 [rows, groups, GROUP / 2] of two weights + 8 each, and scales [rows, groups].

    The largest weight of a group is -8 times its scale: 16 levels where largest / 7 uses 15.
    """
    groups = values.reshape(len(values), -1, GROUP)
    at = np.abs(groups).argmax(-1)[..., None]
    scale = np.take_along_axis(groups, at, -1)[..., 0] / np.float32(-8)
    divisor = np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1), scale)
    levels = np.clip(np.rint(groups / divisor[..., None]) + 8, 0, 15).astype(np.uint8)
    return levels[..., 0::2] | (levels[..., 1::2] << 4), scale.astype(np.float32)
