"""Safetensors to ONNX, checked against the source.

    make_onnx("SmolLM2-135M", "smollm2-135m-int4", "int4")

Two exporters: `genai` (onnxruntime-genai's builder: GroupQueryAttention, a KV cache updated in
place) and `optimum` (growing past_key_values, as the hub's ONNX repositories hold). Precisions:
fp32; int8 and int4 (MatMulNBits, blocks of 32); dynamic-int8 (optimum's ORTQuantizer on the fp32
graph, then one activation scale a token: onnx_per_token.py).

Both exporters run in a child process, offline, on a staged copy of the folder. The logits of the
graph are compared with transformers' in float32, token by token through the KV cache: a distance
above LIMITS is an error and leaves nothing behind. It catches a builder that takes the wrong layer
for the head (where intermediate_size equals vocab_size) or misreads a RoPE setting.
conversion.json keeps what is known of the conversion.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.convert.compare import (
    Comparison,
    Floats,
    Ids,
    compared_ids,
    distance_of,
    reference_logits,
    stage,
)
from models.convert.source_and_manifest import (
    Result,
    copy_texts,
    source_spec,
    write_folder_manifest,
)
from models.errors import BrokenWeights, ModelError, UnsupportedModel
from models.isolated import run_python
from models.machine import cpu_flags
from models.manifest import Progress, atomic_folder
from models.spec import ModelSpec

CONVERSION = "conversion.json"
PRECISIONS: dict[str, tuple[str, ...]] = {
    "genai": ("fp32", "int8", "int4", "dynamic-int8"),
    "optimum": ("fp32", "dynamic-int8"),
}
# Greatest distance (compare.Comparison) on text. The quantised limits only catch a graph that
# computes something else (1.4): int4 of weights that were in 4 bits before is 0.95 away.
LIMITS: dict[str, float] = {"fp32": 1e-4, "int8": 0.35, "dynamic-int8": 0.9, "int4": 1.25}


def make_onnx(
    hf_folder: str | Path,
    out_folder: str | Path,
    precision: str,
    *,
    spec: ModelSpec | None = None,
    exporter: str = "genai",
    sequences: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Convert a Hugging Face folder; returns `out_folder`, replaced whole if it was there.

    `spec`: the shape that the folder must have. `sequences`: token ids to compare on, all of one
    length; None: of text. Raises UnsupportedModel (cannot be converted), BrokenWeights (the result
    is wrong, or the source cannot be read).
    """
    say = progress or (lambda what, fraction: None)
    source, target = Path(hf_folder), Path(out_folder)
    check_request(precision, exporter)
    found = source_spec(source, spec)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Scratch files lie on the target's disk, which has room for the result.
    # `making` finds what a killed conversion leaves by this name.
    left = f".{target.name.lstrip('.')}."
    with tempfile.TemporaryDirectory(".part", left, dir=target.parent) as scratch:
        staged = Path(scratch, "source")
        stage(source, staged)
        ids = compared_ids(source, found, sequences)
        _add_stand_in_tokenizer(staged)
        made = _export(staged, precision, exporter, say)
        say("comparing the logits with the source's", 0.7)
        reference = reference_logits(staged, ids)
        comparison = distance_of(reference, graph_logits(made / "model.onnx", ids, found))
        comparison.check(LIMITS[precision], f"the {precision} graph of {source.name}")
        say("writing checksums", 0.9)
        with atomic_folder(target) as done:
            for file in sorted(made.iterdir()):
                if file.name.startswith("model.onnx") or file.name == "genai_config.json":
                    shutil.move(str(file), done / file.name)
            copy_texts(source, done)
            _write_facts(done, precision, exporter, comparison)
            result = Result("onnx", precision, found, comparison, exporter)
            write_folder_manifest(source, done, result)
    say(f"{target.name} is made", 1.0)
    return target


def check_request(precision: str, exporter: str) -> None:
    """Raises UnsupportedModel for an exporter or a precision that is not there."""
    if exporter not in PRECISIONS:
        raise UnsupportedModel(f"unknown exporter {exporter!r}; known: {', '.join(PRECISIONS)}")
    if precision not in PRECISIONS[exporter]:
        raise UnsupportedModel(
            f"exporter {exporter} makes no precision {precision!r}; "
            f"it makes {', '.join(PRECISIONS[exporter])}"
        )


def graph_logits(graph: Path, ids: Ids, spec: ModelSpec) -> Floats:
    """A graph's logits [sequences, tokens, vocabulary], one token a call."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(
            str(graph), settings, providers=["CPUExecutionProvider"]
        )
    except Exception as problem:  # onnxruntime has exception classes of its own
        raise BrokenWeights(
            f"onnxruntime cannot load the graph that was made: {str(problem)[:300]}"
        ) from problem
    names = {item.name for item in session.get_inputs()}
    caches = sorted(name for name in names if name.startswith("past_key_values."))
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in caches)]
    past: list[npt.NDArray[Any]] = [
        np.zeros((len(ids), spec.kv_heads, 0, spec.head_dim), np.float32) for _ in caches
    ]
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


def _add_stand_in_tokenizer(staged: Path) -> None:
    """Write any tokenizer that the installed transformers loads: exporters want one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(staged / "tokenizer.json"))
    (staged / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}', encoding="utf-8"
    )


def _export(staged: Path, precision: str, exporter: str, say: Progress) -> Path:
    """The folder beside `staged` that holds the graph."""
    scratch = staged.parent
    made = scratch / "made"
    base = "fp32" if precision == "dynamic-int8" else precision
    say(f"exporting as {base}", 0.05)
    if exporter == "genai":
        _run_builder(staged, made, base)
    else:
        _run_optimum(staged, made)
    if precision != "dynamic-int8":
        return made
    say("quantising", 0.5)
    _require("optimum.onnxruntime", "optimum")
    out = scratch / "quantised"
    quantiser = ["-m", "models.convert.onnx_int8", str(made), str(out), quantiser_target()]
    _child(quantiser, "optimum's quantiser")
    rewriter = ["-m", "models.convert.onnx_per_token", str(out / "model.onnx")]
    _child(rewriter, "the rewriting of activation scales")
    return out


def _run_builder(staged: Path, made: Path, precision: str) -> None:
    _require("onnxruntime_genai", "onnx")
    extra = ["prune_lm_head=true"]
    if precision == "int8":  # a shared embedding refers to a tensor that is not there (0.15.2)
        extra.append("shared_embeddings=false")
    folders = ["-i", str(staged), "-o", str(made), "-c", str(staged.parent / "cache")]
    kind = ["-p", precision, "-e", "cpu", "--extra_options", *extra]
    command = ["-m", "onnxruntime_genai.models.builder", *folders, *kind]
    _child(command, "onnxruntime-genai's builder")


def _run_optimum(staged: Path, made: Path) -> None:
    _require("optimum.exporters.onnx", "optimum")
    code = (
        "import sys; from optimum.exporters.onnx import main_export; "
        "main_export(sys.argv[1], sys.argv[2], task='text-generation-with-past', "
        "do_validation=False, local_files_only=True, device='cpu')"
    )
    _child(["-c", code, str(staged), str(made)], "optimum's exporter")


def quantiser_target() -> str:
    """The name in optimum's AutoQuantizationConfig of the instruction set of this CPU.

    Weights are signed: u8 x s8 kernels are a third quicker than u8 x u8. Without VNNI they use
    VPMADDUBSW, whose 16-bit sums saturate, so "avx512" (for AVX2 too) has weights of 7 bits.
    """
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "arm64"
    return "avx512_vnni" if {"avx512_vnni", "avx_vnni"} & cpu_flags() else "avx512"


def _require(module: str, extra: str) -> None:
    try:
        there = importlib.util.find_spec(module) is not None
    except ImportError:
        there = False
    if not there:
        raise UnsupportedModel(
            f"the converter needs {module.split('.')[0]}; pip install 'llm-crossover[{extra}]'"
        )


def _child(arguments: list[str], what: str) -> None:
    """Run Python offline in a child: its memory is freed, its output kept off ours."""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ran = run_python(*arguments, environment=offline)
    if ran.status == -9:
        raise ModelError(
            f"{what} was killed, most likely because memory ran out; it needs about 10 bytes a "
            "parameter"
        )
    if ran.status:
        raise BrokenWeights(f"{what} failed with status {ran.status}: {ran.reason}")


def _write_facts(done: Path, precision: str, exporter: str, comparison: Comparison) -> None:
    packages = ["onnxruntime", "onnxruntime-genai"]
    if exporter == "optimum":
        packages = ["onnxruntime", "optimum", "optimum-onnx"]
    facts: dict[str, Any] = {
        "precision": precision,
        "exporter": exporter,
        "kl_nats": comparison.kl_nats,
        "distance": comparison.distance,
        "distance_limit": LIMITS[precision],
        "greedy_agreement": comparison.agreement,
        "positions": comparison.positions,
        "made_with": {package: importlib.metadata.version(package) for package in packages},
    }
    if precision == "dynamic-int8":
        facts["quantiser_target"] = quantiser_target()
        facts["activation_scales"] = "per token"
    (done / CONVERSION).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
