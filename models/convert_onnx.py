"""Safetensors -> ONNX, checked against the source before anyone may use it.

    make_onnx("SmolLM2-135M", "smollm2-135m-int4", "int4")

Two exporters: `genai` (onnxruntime-genai's graph builder: GroupQueryAttention, fused, appends to its KV cache in place) and `optimum`
(growing past_key_values, as the hub's ONNX repositories hold). Precisions: fp32; int8 and int4 (MatMulNBits, blocks of 32, integer
arithmetic); dynamic-int8 (optimum's ORTQuantizer on the fp32 graph, then one activation scale for each token instead of one for the whole
batch: per_token.py).

Both exporters run in a child process, offline, on a staged copy of the folder: config.json in the words of the transformers that is
installed (see hf_config.py), the weights linked, a stand-in tokenizer. The builder ignores options that it does not know, so they are
checked here.

The finished graph's logits are then compared with those of transformers in float32 on fixed token sequences, position by position through
the KV cache. Too far off (LIMITS) is an error and nothing is left behind: it catches a builder that takes the wrong layer for the head
(it does where intermediate_size equals vocab_size) or reads a RoPE setting wrongly. The KL divergence to the float model is kept in the
manifest (manifest.py) as the format's quality, and all that is known of the conversion in conversion.json. The folder appears whole or
not at all.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from models.errors import BrokenWeights, ModelError, UnsupportedModel
from models.hf_config import read_config, spec_of, v4_config
from models.manifest import Manifest, Progress, atomic_folder, converter, file_facts, read_manifest, write_manifest
from models.spec import ModelSpec

Floats = npt.NDArray[np.float32]

CONVERSION = "conversion.json"
PRECISIONS: dict[str, tuple[str, ...]] = {
    "genai": ("fp32", "int8", "int4", "dynamic-int8"),
    "optimum": ("fp32", "dynamic-int8"),
}
# transformers loads a model under process-wide switches (default dtype, meta device): one thread at a time, and no forward pass beside it.
TRANSFORMERS_LOCK = threading.RLock()
# Greatest distance |graph - source| / |source - its mean| (root mean squares over all logits) that is let through. Unrelated logits are
# at about 1.4. Random weights magnify rounding far more than trained ones, so that the quantised limits only catch a graph that computes
# something else.
LIMITS: dict[str, float] = {"fp32": 1e-4, "int8": 0.35, "dynamic-int8": 0.9, "int4": 1.1}
# Builder options that change weights but not the graph's inputs and outputs, with the values it knows, by precision. Not for int8: any
# algo_config but the default makes int4 of it without a word, and a shared embedding refers to a tensor that is not there (0.15.2).
_INT8_OPTIONS: dict[str, tuple[str, ...]] = {"accuracy_level": ("0", "1", "2", "3", "4"), "block_size": ("16", "32", "64", "128", "256")}
BUILDER_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "int8": _INT8_OPTIONS,
    "int4": {
        **_INT8_OPTIONS,
        "is_symmetric": ("true", "false"),
        "algo_config": ("default", "rtn", "k_quant", "rtn_last", "k_quant_last", "k_quant_mixed"),
        "shared_embeddings": ("true", "false"),
    },
}


class Comparison(msgspec.Struct, frozen=True):
    """How far a graph's logits are from the source's."""

    distance: float  # root mean square of the difference over that of the (centred) source
    kl_nats: float  # KL(source || graph), mean over positions
    agreement: float  # share of positions with the same greedy token
    positions: int


def make_onnx(
    hf_folder: str | Path,
    out_folder: str | Path,
    precision: str,
    *,
    spec: ModelSpec | None = None,
    exporter: str = "genai",
    builder_options: Mapping[str, str] | None = None,
    sequences: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Convert a Hugging Face folder; returns `out_folder`, replaced whole if it was there.

    `spec`: what the folder is believed to hold; another shape is an error. `sequences`: token ids to compare on, all of one length (real
    text of the model's own kind gives a quality figure that means more than the seeded ids used otherwise). Raises UnsupportedModel (what
    cannot be converted), BrokenWeights (the result is wrong, or the source cannot be read).
    """
    say = progress or (lambda what, fraction: None)
    source, target = Path(hf_folder), Path(out_folder)
    extra = check_request(precision, exporter, builder_options or {})
    config = read_config(source)
    found = spec_of(config, source.name)
    if spec is not None and msgspec.structs.replace(spec, name=found.name) != found:
        raise BrokenWeights(f"{source.name} does not hold {spec.name}: config.json says {_differences(found, spec)}")
    with tempfile.TemporaryDirectory(prefix="convert-onnx-", dir=_near(target)) as scratch:
        staged, made = Path(scratch, "source"), Path(scratch, "made")
        _stage(source, staged, config)
        base = "fp32" if precision == "dynamic-int8" else precision
        say(f"exporting {source.name} as {base}", 0.05)
        if exporter == "genai":
            _build(staged, made, base, extra, Path(scratch, "cache"))
        else:
            _export(staged, made)
        if precision == "dynamic-int8":
            say("quantising", 0.5)
            _quantise(made, Path(scratch, "quantised"))
            made = Path(scratch, "quantised")
        say("comparing the logits with the source's", 0.7)
        comparison = compare(staged, made / "model.onnx", found, sequences)
        if not comparison.distance <= LIMITS[precision]:  # also catches NaN
            raise BrokenWeights(
                f"the {precision} graph of {source.name} is wrong: its logits are {comparison.distance:.3g} away from the source's, "
                f"more than {LIMITS[precision]:g} (greedy tokens agree at {comparison.agreement:.0%} of {comparison.positions} positions)"
            )
        say("writing checksums", 0.9)
        with atomic_folder(target) as done:
            _collect(source, made, done, config)
            _write_facts(done, precision, exporter, extra, comparison)
            _write_manifest(done, source, spec or found, precision, exporter, comparison)
    say(f"{target.name} is made", 1.0)
    return target


def check_request(precision: str, exporter: str, options: Mapping[str, str]) -> dict[str, str]:
    """The builder's options, checked by name and value. Raises UnsupportedModel saying what there is."""
    if exporter not in PRECISIONS:
        raise UnsupportedModel(f"unknown exporter {exporter!r}; known: {', '.join(PRECISIONS)}")
    if precision not in PRECISIONS[exporter]:
        raise UnsupportedModel(f"exporter {exporter} makes no precision {precision!r}; it makes {', '.join(PRECISIONS[exporter])}")
    known = BUILDER_OPTIONS.get(precision, {}) if exporter == "genai" else {}
    for key, value in options.items():
        if key not in known:
            raise UnsupportedModel(f"unknown builder option {key!r} for {exporter} {precision}; known: {', '.join(known) or 'none'}")
        if str(value) not in known[key]:
            raise UnsupportedModel(f"builder option {key} is {value!r}; known: {', '.join(known[key])}")
    return {key: str(value) for key, value in options.items()}


def fixed_sequences(vocabulary: int, count: int = 4, tokens: int = 24) -> list[list[int]]:
    """The seeded token ids that graphs are compared on."""
    random = np.random.default_rng(20)
    return [[int(token) for token in row] for row in random.integers(3, vocabulary, (count, tokens))]


def compare(hf_folder: Path, graph: Path, spec: ModelSpec, sequences: Sequence[Sequence[int]] | None = None) -> Comparison:
    """Logits of a graph, token by token through its KV cache, against transformers' in float32 over the same sequences."""
    ids = np.array(sequences if sequences is not None else fixed_sequences(spec.vocabulary), np.int64)
    if ids.ndim != 2 or ids.size == 0 or ids.min() < 0 or ids.max() >= spec.vocabulary or ids.shape[1] > spec.context:
        raise UnsupportedModel(f"sequences must be token ids below {spec.vocabulary}, all of one length up to {spec.context}")
    return distance_of(reference_logits(hf_folder, ids), graph_logits(graph, ids, spec))


def distance_of(reference: Floats, candidate: Floats) -> Comparison:
    """The figures of a Comparison from two arrays of logits [..., vocabulary]."""
    a, b = (values.reshape(-1, values.shape[-1]).astype(np.float64) for values in (reference, candidate))
    centred = a - a.mean(-1, keepdims=True)
    p, q = _log_softmax(a), _log_softmax(b)
    error, scale = np.mean((a - b) ** 2), np.mean(centred**2)
    return Comparison(
        distance=float(np.sqrt(error / scale)) if scale > 0 else (0.0 if error == 0 else float("inf")),
        kl_nats=float(np.mean(np.sum(np.exp(p) * (p - q), -1))),
        agreement=float(np.mean(a.argmax(-1) == b.argmax(-1))),
        positions=a.shape[0],
    )


def reference_logits(hf_folder: Path, ids: npt.NDArray[np.int64]) -> Floats:
    """transformers' logits in float32, [sequences, tokens, vocabulary]. The folder's config must be in 4.x words (v4_config)."""
    import torch
    from transformers import AutoModelForCausalLM

    with TRANSFORMERS_LOCK:
        model = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager")
        model.eval()
        with torch.inference_mode():
            logits = [model(torch.from_numpy(row[None])).logits[0].float().numpy() for row in ids]
    return np.stack(logits)


def graph_logits(graph: Path, ids: npt.NDArray[np.int64], spec: ModelSpec) -> Floats:
    """A graph's logits [sequences, tokens, vocabulary], one token a call: works with and without a head pruned to the last position."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(graph), settings, providers=["CPUExecutionProvider"])
    except Exception as problem:  # onnxruntime has exception classes of its own
        raise BrokenWeights(f"onnxruntime cannot load the graph that was made: {str(problem)[:300]}") from problem
    names = {item.name for item in session.get_inputs()}
    caches = sorted(name for name in names if name.startswith("past_key_values."))
    outputs = ["logits", *(name.replace("past_key_values", "present") for name in caches)]
    past: list[npt.NDArray[Any]] = [np.zeros((len(ids), spec.kv_heads, 0, spec.head_dim), np.float32) for _ in caches]
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


def _log_softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = values - values.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _differences(found: ModelSpec, wanted: ModelSpec) -> str:
    pairs = [(key, getattr(found, key), getattr(wanted, key)) for key in found.__struct_fields__ if key != "name"]
    return ", ".join(f"{key} {a} and not {b}" for key, a, b in pairs if a != b)


def _stage(source: Path, staged: Path, config: dict[str, Any]) -> None:
    """A folder that the installed transformers reads rightly: config translated, weights linked, a stand-in tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    staged.mkdir()
    (staged / "config.json").write_text(json.dumps(v4_config(config)), encoding="utf-8")
    weights = sorted(source.glob("*.safetensors")) + sorted(source.glob("*.safetensors.index.json"))
    if not weights:
        raise BrokenWeights(f"{source.name} holds no *.safetensors file")
    for file in weights:
        (staged / file.name).symlink_to(file.resolve())
    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(staged / "tokenizer.json"))
    (staged / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}', encoding="utf-8")


def _build(staged: Path, made: Path, precision: str, options: Mapping[str, str], cache: Path) -> None:
    _require("onnxruntime_genai", "onnx")
    extra = ["prune_lm_head=true", *(f"{key}={value}" for key, value in options.items())]
    if precision == "int8":
        extra.append("shared_embeddings=false")  # see BUILDER_OPTIONS
    arguments = ["-i", str(staged), "-o", str(made), "-p", precision, "-e", "cpu", "-c", str(cache), "--extra_options", *extra]
    _child(["-m", "onnxruntime_genai.models.builder", *arguments], "onnxruntime-genai's builder")


def _export(staged: Path, made: Path) -> None:
    _require("optimum.exporters.onnx", "optimum")
    code = (
        "import sys; from optimum.exporters.onnx import main_export; "
        "main_export(sys.argv[1], sys.argv[2], task='text-generation-with-past', do_validation=False, local_files_only=True, device='cpu')"
    )
    _child(["-c", code, str(staged), str(made)], "optimum's exporter")


def _quantise(made: Path, out: Path) -> None:
    _require("optimum.onnxruntime", "optimum")
    _child(["-m", "models.quantise_onnx", str(made), str(out), quantiser_target()], "optimum's quantiser")
    _child(["-m", "models.per_token", str(out / "model.onnx")], "the rewriting of activation scales")


def quantiser_target() -> str:
    """The instruction set that dynamic int8 is made for: a name of optimum's AutoQuantizationConfig, by this machine's CPU.

    Signed weights everywhere: the u8 x s8 kernels are a third quicker than u8 x u8. Without VNNI they use VPMADDUBSW, whose 16-bit sums
    saturate, so that "avx512" (which AVX2 takes as well) is made with weights of 7 bits.
    """
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "arm64"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        flags = ""
    return "avx512_vnni" if {"avx512_vnni", "avx_vnni"} & set(flags.split()) else "avx512"


def _require(module: str, extra: str) -> None:
    import importlib.util

    try:
        there = importlib.util.find_spec(module) is not None
    except ImportError:
        there = False
    if not there:
        raise UnsupportedModel(f"the converter needs {module.split('.')[0]}; pip install 'llm-crossover[{extra}]'")


def _child(arguments: list[str], what: str) -> None:
    """Run Python offline in a process of its own, so that its memory is given back and its printing is kept off ours."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **offline, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    if done.returncode == -9:
        raise ModelError(f"{what} was killed, most likely for want of memory; it needs about 10 bytes a parameter")
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise BrokenWeights(f"{what} failed with status {done.returncode}: {lines[-1] if lines else 'it said nothing'}")


def _collect(source: Path, made: Path, done: Path, config: dict[str, Any]) -> None:
    """Graph, config and the source's own tokenizer into `done`; the stand-in tokenizer stays behind."""
    for file in sorted(made.iterdir()):
        if file.name.startswith("model.onnx") or file.name == "genai_config.json":
            shutil.move(str(file), done / file.name)
    (done / "config.json").write_text(json.dumps(v4_config(config), indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, done / name)


def _write_facts(done: Path, precision: str, exporter: str, options: Mapping[str, str], comparison: Comparison) -> None:
    packages = ("onnxruntime", "onnxruntime-genai") if exporter == "genai" else ("onnxruntime", "optimum", "optimum-onnx")
    facts: dict[str, Any] = {
        "precision": precision,
        "exporter": exporter,
        "builder_options": dict(options),
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


def _write_manifest(done: Path, source: Path, spec: ModelSpec, precision: str, exporter: str, comparison: Comparison) -> None:
    before = read_manifest(source)
    manifest = Manifest(
        kind="onnx",
        spec=spec,
        weight_format=precision,
        source=before.source if before is not None else source.name,
        files={file.name: file_facts(file) for file in sorted(done.iterdir())},
        generator=converter("onnx", exporter),
        seed=before.seed if before is not None else None,
        quality_kl_nats=comparison.kl_nats,
    )
    write_manifest(done, manifest)


def _near(target: Path) -> Path:
    """The folder for scratch files: on the target's own disk, which has room for the result, while /tmp may be memory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.parent
