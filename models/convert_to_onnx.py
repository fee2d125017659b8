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

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper

from models.conversion import (
    Comparison,
    compared_ids,
    copy_texts,
    distance_of,
    finish,
    reference_fits,
    reference_logits,
    source_spec,
)
from models.errors import BrokenWeights, UnsupportedModel
from models.formats import ONNX_FORMATS
from models.hf_config import FAMILIES, read_config
from models.machine import int8_bits
from models.manifest import (
    FileFacts,
    HashedFile,
    Manifest,
    Progress,
    atomic_folder,
    converter,
    file_facts,
    read_manifest,
    write_manifest,
)
from models.random_quant_blocks import as_bytes
from models.random_weights import GENERATOR, LOGIT_SPREAD, hf_config, rope_factors
from models.safetensors_reader import EMBEDDING, HEAD, Floats, Rows, check_tensors, stored_rows
from models.spec import ModelSpec
from models.tokenizer import load_tokenizer, shipped_files
from models.turned_weights import BLOCK, Turned, calibration_text, far_channels

GRAPH, DATA = "model.onnx", "model.onnx.data"
GROUP = 32  # weights of an int4 row that share a scale
THREADS = 2
TYPES = {"f4": 1, "u1": 2, "i1": 3, "i8": 7}  # numpy's names -> onnx's TensorProto.DataType


def make_onnx(
    hf_folder: str | Path,
    out_folder: str | Path,
    weight_format: str,
    *,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
) -> Path:
    """Convert a Hugging Face folder; returns `out_folder`, replaced whole if it was there.

    `spec`: the shape that the folder must have. Raises UnsupportedModel, BrokenWeights.
    """
    source, target = Path(hf_folder), Path(out_folder)
    say = progress or (lambda what, fraction: None)
    if weight_format not in ONNX_FORMATS:
        raise UnsupportedModel(
            f"unknown ONNX format {weight_format!r}; known: {', '.join(ONNX_FORMATS)}"
        )
    if read_config(source).get("model_type") not in FAMILIES:
        from models.export_with_optimum import export_onnx

        return export_onnx(source, target, weight_format, progress=progress)
    found = source_spec(source, spec)
    check_tensors(source, found)
    rows = stored_rows(source, found)
    before = read_manifest(source)
    is_random = before is not None and before.seed is not None
    if weight_format == "int8" and not is_random:
        ids = None
        if (source / "tokenizer.json").is_file():
            text = load_tokenizer(source).encode(calibration_text())[: found.context]
            ids = np.array([text], np.int64) if max(text) < found.vocabulary else None
        rows = Turned(found, rows, ids)
    with atomic_folder(target) as folder:
        copy_texts(source, folder)
        known = {DATA: _write_graph(found, rows, folder, weight_format, say)}
        quality = None if is_random else _quality(source, folder, found, say)
        finish(source, folder, "onnx", weight_format, found, quality, known)
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
        texts = {"config.json": hf_config(spec, "fp32")}
        for name, content in (texts | shipped_files(spec.vocabulary, spec.context)).items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        data = _write_graph(spec, random_rows(spec, seed), folder, weight_format, say)
        files = {one.name: file_facts(one) for one in sorted(folder.iterdir()) if one.name != DATA}
        files[DATA] = data
        made_by = f"{converter('onnx', weight_format)}, {GENERATOR}"
        manifest = Manifest("onnx", spec, weight_format, "synthetic", files, made_by, seed)
        write_manifest(folder, manifest)
    return target


def _write_graph(
    spec: ModelSpec, rows: Rows, folder: Path, weight_format: str, say: Progress
) -> FileFacts:
    """Write GRAPH and DATA; the facts of DATA."""
    writer = GraphWriter(spec, rows, folder, weight_format, say)
    try:
        (folder / GRAPH).write_bytes(writer.graph().SerializeToString())
    finally:
        writer.pool.shutdown()
        data = writer.file.close()
    return data


def _quality(source: Path, folder: Path, spec: ModelSpec, say: Progress) -> Comparison | None:
    """What the format costs on text; None without the means to tell."""
    has_means = all(map(find_spec, ("torch", "transformers", "onnxruntime")))
    if not (has_means and (source / "tokenizer.json").is_file() and reference_fits(spec)):
        say("logits not compared: no float reference here", None)
        return None
    say("comparing the logits with the source's", None)
    try:
        ids = compared_ids(source, spec)
    except UnsupportedModel:  # the tokenizer makes ids that the model does not have
        return None
    return distance_of(reference_logits(source, spec, ids), graph_logits(folder / GRAPH, ids, spec))


def graph_logits(graph: Path, ids: npt.NDArray[np.int64], spec: ModelSpec) -> Floats:
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


def random_rows(spec: ModelSpec, seed: int = 0) -> Rows:
    """Seeded normal weights: slices of one pool of a prime length, each tensor from its own offset.

    Matrices keep the size of activations, an MLP doubles it, and logits have a standard deviation
    of LOGIT_SPREAD.
    """
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
    length = 1048573
    pool = np.random.default_rng(seed).standard_normal(length, dtype=np.float32)
    pool = np.resize(pool, length + 2 * BLOCK)
    starts = {name: 7919 * number for number, name in enumerate(shapes)}
    gains = {"lm_head": LOGIT_SPREAD, "embed_tokens": LOGIT_SPREAD, "down_proj": 2.0}

    def rows(name: str, first: int, last: int) -> Floats:
        name = EMBEDDING if spec.tied and name == HEAD else name
        each = math.prod(shapes[name][1:])
        at = (starts[name] + first * each) % length
        values = pool[at : at + (last - first) * each].reshape(-1, *shapes[name][1:])
        if len(shapes[name]) == 1:
            return values / np.float32(20) + np.float32("norm" in name)
        gain = gains.get(name.split(".")[-2], 1.0)
        return values * np.float32(gain / math.sqrt(each))

    return rows


class GraphWriter:
    """Writes weights to DATA as it builds the graph's nodes."""

    def __init__(
        self, spec: ModelSpec, rows: Rows, folder: Path, weight_format: str, say: Progress
    ) -> None:
        self.spec, self.rows, self.say = spec, rows, say
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
        self.total_bytes = 2 * spec.weight_bytes(weight_format)
        self.file = HashedFile(folder / DATA)
        self.pool = ThreadPoolExecutor(THREADS)

    # --- constants

    def begin(self, name: str, dtype: str, dims: tuple[int, ...]) -> str:
        """A constant whose bytes are written to the file next."""
        self.file.write(b"\0" * (-self.file.bytes % 4096))
        tensor = TensorProto(
            name=name, dims=dims, data_type=TYPES[dtype], data_location=TensorProto.EXTERNAL
        )
        length = math.prod(dims) * np.dtype(dtype).itemsize
        for key, value in (("location", DATA), ("offset", self.file.bytes), ("length", length)):
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
        self.say(f"writing {sources[0]}", self.file.bytes / self.total_bytes)
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
