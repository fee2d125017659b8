"""Exports checkpoints that crossover.models.convert_to_onnx does not support, with optimum-onnx.

    export_graph(Path("gpt2"), Path("gpt2-int8"), "int8", say)

optimum exports the float32 graph with a growing `past_key_values` and quantises it: dynamic int8,
products with stored matrices only. It runs in a child process, offline. It needs some 17 bytes
of memory a parameter. One scale serves a whole step of activations, so a row's logits depend on
the other rows of the batch.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from crossover.models.child_process import run_aside
from crossover.models.errors import BrokenWeights, ModelError, UnsupportedModel
from crossover.models.hf_config import check_dense, read_config
from crossover.models.machine_limits import int8_bits
from crossover.models.model_spec import ModelSpec, whole_number
from crossover.models.safetensors_reader import INDEX, read_tensors, weight_files
from crossover.models.weights_manifest import Progress

MODEL = "model.onnx"


def foreign_spec(config: dict[str, Any], name: str) -> ModelSpec:
    """Return the sizes of an architecture that is exported by optimum; its other parts stay
    unknown.

    Raises UnsupportedModel naming what config.json lacks.
    """

    check_dense(config, name)

    def size(*names: str) -> int:
        """By transformers' name, or what older architectures call it."""
        value = next((config[one] for one in names if config.get(one) is not None), None)
        return whole_number(value, name, names[0])

    heads, hidden = size("num_attention_heads", "n_head"), size("hidden_size", "n_embd")
    return ModelSpec(
        name=name,
        family=str(config.get("model_type")),
        layers=size("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=config.get("intermediate_size") or 4 * hidden,
        vocabulary=size("vocab_size"),
        context=size("max_position_embeddings", "n_positions"),
        tied=bool(config.get("tie_word_embeddings", True)),
        rope_theta=10_000.0,
    )


def export_graph(source: Path, folder: Path, weight_format: str, say: Progress) -> None:
    """Write the graph of a Hugging Face folder into `folder`, which has its texts.

    Raises UnsupportedModel (a format that optimum does not make, optimum is not there),
    BrokenWeights.
    """
    family = read_config(source).get("model_type")
    what = f"{source.name} is of architecture {family!r}, which optimum"
    if weight_format not in ("fp32", "int8"):
        raise UnsupportedModel(f"{what} exports only to fp32 or int8, not to {weight_format}")
    if importlib.util.find_spec("optimum") is None:
        install = "pip install 'llm-crossover[optimum]'"
        raise UnsupportedModel(f"{what} must export. Install it: {install}")
    read_tensors(source)  # no pickles
    say("exporting with optimum", None)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        staged = Path(scratch, "source")
        staged.mkdir()
        # config.json of `folder`: without keys that name code
        weights = [source / name for name in (*weight_files(source), INDEX)]
        weights = [file for file in weights if file.is_file()]
        for file in (*folder.glob("*.*"), *weights, *source.glob("*.txt")):
            (staged / file.name).symlink_to(file.resolve())
        try:  # in a child: its memory is freed, its output kept off ours
            run_aside(f"{__name__}:_export", None, staged, Path(scratch), weight_format)
        except ModelError as problem:
            why = f"optimum could not export {source.name}: {problem}"
            raise BrokenWeights(why) from problem
        for made in Path(scratch, weight_format).glob(f"{MODEL}*"):
            made.rename(folder / made.name)


def _export(source: Path, scratch: Path, weight_format: str, progress: object = None) -> None:
    """The graph in scratch/fp32, and where it is wanted in scratch/int8."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from onnxruntime.quantization import quantize_dynamic
    from optimum.exporters.onnx import main_export

    task = "text-generation-with-past"
    settings = {"do_validation": False, "local_files_only": True, "device": "cpu"}
    main_export(str(source), str(scratch / "fp32"), task=task, **settings)
    if weight_format == "int8":
        (scratch / "int8").mkdir()
        quantize_dynamic(
            *(scratch / "fp32" / MODEL, scratch / "int8" / MODEL),
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],
            per_channel=True,
            reduce_range=int8_bits() == 7,
            use_external_data_format=True,
            # Not queries x keys, positions x frequencies: 8 bits cannot hold those.
            extra_options={"MatMulConstBOnly": True},
        )
