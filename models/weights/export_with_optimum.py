"""Exports checkpoints that convert_to_onnx.py does not support, with optimum-onnx.

    export_graph(Path("gpt2"), Path("gpt2-int8"), "int8", say)

optimum exports a float32 graph whose `past_key_values` grow with each step. For int8, the products
with weights are then quantized dynamically. Since all activations of a step share one scale, the
logits of a row depend on the other rows of the batch. The export runs in a child process without
network access, and needs some 17 bytes of memory per parameter.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from crossover.models.child_process import run_in_child
from crossover.models.errors import BrokenWeights, ModelError, UnsupportedModel
from crossover.models.machine_limits import int8_bits
from crossover.models.shape.hf_config import check_dense, read_config
from crossover.models.shape.model_spec import ModelSpec, whole_number
from crossover.models.weights.safetensors_reader import INDEX, read_tensors, weight_files
from crossover.models.weights.weights_manifest import Progress

MODEL = "model.onnx"


def foreign_spec(config: dict[str, Any], name: str) -> ModelSpec:
    """Return the sizes of an architecture that optimum exports. The other fields of the shape are
    not known.

    Raises UnsupportedModel, which names the key that config.json lacks.
    """

    check_dense(config, name)

    def size(key: str, older_key: str = "") -> int:
        """Return the value of a key, or else of the one that older architectures have."""
        value = config.get(key)
        return whole_number(config.get(older_key) if value is None else value, name, key)

    def optional_size(key: str, default: int) -> int:
        return whole_number(config.get(key) or default, name, key)

    heads, hidden = size("num_attention_heads", "n_head"), size("hidden_size", "n_embd")
    return ModelSpec(
        name=name,
        family=str(config.get("model_type")),
        layers=size("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=optional_size("num_key_value_heads", heads),
        head_dim=optional_size("head_dim", hidden // heads),
        intermediate=optional_size("intermediate_size", 4 * hidden),
        vocabulary=size("vocab_size"),
        context=size("max_position_embeddings", "n_positions"),
        tied=bool(config.get("tie_word_embeddings", True)),
        rope_theta=10_000.0,
    )


def export_graph(source: Path, folder: Path, weight_format: str, progress: Progress) -> None:
    """Write the graph of the Hugging Face folder `source` into `folder`, which has its texts
    already.

    Raises UnsupportedModel if optimum is not installed or does not make this format,
    BrokenWeights.
    """
    family = read_config(source).get("model_type")
    architecture = f"{source.name} is of architecture {family!r}"
    if weight_format not in ("fp32", "int8"):
        raise UnsupportedModel(
            f"{architecture}, which optimum exports only to fp32 or int8, not to {weight_format}"
        )
    if importlib.util.find_spec("optimum") is None:
        raise UnsupportedModel(
            f"{architecture}, which optimum must export. Install it: "
            "pip install 'llm-crossover[optimum]'"
        )
    read_tensors(source)  # raises an error unless the weights are safetensors, which run no code
    progress("exporting with optimum", None)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # A folder with the weights of `source` and the config.json of `folder`, in which keys that
        # name code are left out.
        staged = Path(scratch, "source")
        staged.mkdir()
        weights = [source / name for name in (*weight_files(source), INDEX)]
        weights = [file for file in weights if file.is_file()]
        for file in (*folder.glob("*.*"), *weights, *source.glob("*.txt")):
            (staged / file.name).symlink_to(file.resolve())
        try:
            run_in_child(f"{__name__}:_export", None, staged, Path(scratch), weight_format)
        except UnsupportedModel:
            raise
        except ModelError as problem:
            why = f"optimum could not export {source.name}: {problem}"
            raise BrokenWeights(why) from problem
        for graph_file in Path(scratch, weight_format).glob(f"{MODEL}*"):
            graph_file.rename(folder / graph_file.name)


def _export(source: Path, scratch: Path, weight_format: str, progress: object = None) -> None:
    """Write the graph to scratch/fp32 and, for int8, the quantized one to scratch/int8."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from onnxruntime.quantization import quantize_dynamic
    from optimum.exporters.onnx import main_export
    from transformers import CONFIG_MAPPING

    family = read_config(source).get("model_type")
    instead = "Use the model's GGUF file (on the hub: org/name:file.gguf), if llama.cpp knows it."
    if family not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"The installed transformers does not know model_type {family!r}, so that nothing here "
            f"can read this folder. {instead}"
        )
    task = "text-generation-with-past"
    settings = {"do_validation": False, "local_files_only": True, "device": "cpu"}
    try:
        main_export(str(source), str(scratch / "fp32"), task=task, **settings)
    except ValueError as problem:
        if "unsupported architecture" not in str(problem):
            raise
        raise UnsupportedModel(
            f"optimum cannot export model_type {family!r} to ONNX. {instead}"
        ) from problem
    if weight_format == "int8":
        (scratch / "int8").mkdir()
        quantize_dynamic(
            scratch / "fp32" / MODEL,
            scratch / "int8" / MODEL,
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],
            per_channel=True,
            reduce_range=int8_bits() == 7,
            use_external_data_format=True,
            # Only products with weights. Others, such as queries x keys and positions x
            # frequencies, lose too much precision in 8 bits.
            extra_options={"MatMulConstBOnly": True},
        )
