"""How far every format of a model is from its float original: KL divergence and greedy agreement,
as the engines serve it.

    python -m tests.bench.quality --model smollm2-135m onnx:fp32 onnx:int8 onnx:int4
    onnx:int8 llama_cpp:Q8_0 torch:int4

Reference: transformers in float32 over the unquantised folder. Every format is made from that same
folder (the GGUF files too, which are not the ladder's own random ones), loaded by its backend, and
given the same seeded token ids, one token a step and all sequences in one batch; the
log-probabilities that the engine reports are held against the reference at every position. So
rounding of activations, of the KV cache and by batch mates counts, as it does in service.
`manifest` is what the conversion measured on its own few positions. Random weights magnify
rounding, so that these figures order formats but say nothing of a trained model; give a folder of
one with --model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from models.convert.compare import fixed_sequences, reference_logits
from models.readers.config import read_config, v4_config
from models.resolve import ResolvedModel, resolve
from serving.backends.base import EngineConfig
from tests.bench.engines_in_process import COMMAND, engine
from tests.bench.paired import machine, machine_line
from tests.bench.peers.jobs import Child

# of log-probabilities taken from float32 logits; what is below it may even come out negative
ROUNDING_NATS = 1e-7
DEFAULT = (
    "onnx:fp32 onnx:int8 onnx:int4 llama_cpp:Q8_0 llama_cpp:Q4_K_M "
    "llama_cpp:Q4_0 "
    "torch:bf16 torch:int8 torch:dynamic-int8 torch:int4"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "engines",
        type=engine,
        nargs="*",
        metavar="BACKEND:FORMAT",
        default=[engine(one) for one in DEFAULT.split()],
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="a rung, or a folder of safetensors"
    )
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence")
    parser.add_argument("--cores", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="keeps all figures")
    arguments = parser.parse_args()
    facts = machine("llama-cpp-python", "onnxruntime", "torch", "transformers")
    print(machine_line(facts))
    source = resolve(arguments.model, kind="hf", weight_format="bf16")
    ids = fixed_sequences(source.spec.vocabulary, arguments.sequences, arguments.tokens)
    positions = arguments.sequences * arguments.tokens
    print(
        f"{source.name}, {positions} positions in {arguments.sequences} sequences; against "
        "transformers in float32"
    )
    print(
        f"{'':28}{'KL, nats':>12}{'greedy agree':>14}{'manifest KL':>13}{'weights, MB':>13}",
        flush=True,
    )
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        reference = Path(scratch, "reference.npy")
        np.save(reference, float_logits(Path(source.path), np.array(ids, np.int64)))
        for backend, weight_format in arguments.engines:
            found = of_the_same_weights(arguments.model, source, backend, weight_format)
            config = EngineConfig(
                backend=backend,
                model_path=found.path,
                model_name=found.name,
                weight_format=found.weight_format,
                tokenizer_path=found.tokenizer_path,
                slots=arguments.sequences,
                context_tokens=-(-arguments.tokens // 64) * 64,
                threads=len(arguments.cores),
            )
            with Child(COMMAND, msgspec.to_builtins(config), arguments.cores) as child:
                answer = child.ask({"do": "quality", "ids": ids, "reference": str(reference)})
            size = weight_bytes(Path(found.path))
            out[f"{backend} {weight_format}"] = {
                **answer,
                "manifest_kl_nats": found.quality_kl_nats,
                "weight_bytes": size,
            }
            said = "-" if found.quality_kl_nats is None else f"{found.quality_kl_nats:.2g}"
            kl = (
                f"{answer['kl_nats']:.2g}"
                if answer["kl_nats"] > ROUNDING_NATS
                else f"<{ROUNDING_NATS:g}"
            )
            print(
                f"{backend + ' ' + weight_format:28}{kl:>12}"
                f"{answer['agreement']:>14.1%}{said:>13}{size / 1e6:>13.0f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": facts, "model": source.name, "formats": out}, indent=1) + "\n",
            encoding="utf-8",
        )


def float_logits(
    folder: Path, ids: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """transformers' logits over a folder that either major version of it wrote."""
    with tempfile.TemporaryDirectory() as staged:
        Path(staged, "config.json").write_text(
            json.dumps(v4_config(read_config(folder))), encoding="utf-8"
        )
        for weights in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
            Path(staged, weights.name).symlink_to(weights.resolve())
        return reference_logits(Path(staged), ids)


def of_the_same_weights(
    model: str, source: ResolvedModel, backend: str, weight_format: str
) -> ResolvedModel:
    """A format of `source`.

    The ladder's GGUF files have random weights of their own, so GGUF is converted from the folder.
    """
    return resolve(
        source.path if backend == "llama_cpp" else model,
        backend=backend,
        weight_format=weight_format,
    )


def weight_bytes(path: Path) -> int:
    """Bytes of the weight files."""
    kinds = (".safetensors", ".onnx", ".data", ".onnx_data")
    return (
        path.stat().st_size
        if path.is_file()
        else sum(file.stat().st_size for file in path.iterdir() if file.name.endswith(kinds))
    )


if __name__ == "__main__":
    main()
