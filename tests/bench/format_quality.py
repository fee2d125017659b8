"""What every format of a trained model costs: KL divergence and greedy agreement on text, as the
engines serve it.

    python -m tests.bench.format_quality --model smollm2-135m-instruct onnx:int8 llama_cpp:Q8_0

Reference: the float32 forward pass over the model's weights (of a GGUF file: the floats that it
stands for). Every format is made from them (GGUF formats: by llama.cpp's quantiser), loaded by its
backend, and given the same 2,000 tokens of the shipped prose, one token a step and all sequences in
one batch. The log-probabilities that the engine reports are held against the reference at every
position: rounding of activations, of the KV cache and by batch mates counts, as it does in service.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from models.conversion import open_source, prose
from models.float_forward import forward
from models.resolve import is_gguf, resolve
from serving.backends.backend_interface import EngineConfig
from serving.backends.backend_table import weights_of
from tests.bench.engines_in_process import COMMAND, engine
from tests.bench.paired import machine, machine_line
from tests.bench.peers.jobs import Child
from tests.gguf_files import quantise

DEFAULT = "llama_cpp:BF16 llama_cpp:Q8_0 llama_cpp:Q4_K_M llama_cpp:Q4_0 onnx:int8 onnx:int4"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [engine(one) for one in DEFAULT.split()]
    parser.add_argument(
        "engines", type=engine, nargs="*", metavar="BACKEND:FORMAT", default=default
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=250, help="of each sequence")
    parser.add_argument("--cores", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    print(machine_line(machine("llama-cpp-python", "onnxruntime", "torch", "transformers")))
    name = arguments.model
    path = Path(resolve(name, kind="gguf" if is_gguf(name) else "hf").path)
    source = open_source(path)
    tokens = source.ids(prose(), arguments.sequences, arguments.tokens)
    assert tokens is not None
    ids = tokens.tolist()
    print(f"{name}: {tokens.size} tokens of text; against its floats")
    print(f"{'':24}{'KL, nats':>10}{'greedy tokens kept':>20}{'weights, MB':>13}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        reference = Path(scratch, "reference.npy")
        *_, logits = forward(source.spec, source.rows, tokens)
        np.save(reference, logits)
        for backend, weight_format in arguments.engines:
            kind, _ = weights_of(backend)
            if kind == "gguf" and path.is_file():
                name = str(Path(scratch, f"{weight_format}.gguf"))
                quantise(path, Path(name), weight_format)
            else:
                name = arguments.model
            found = resolve(name, kind=kind, weight_format=weight_format)
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
            print(
                f"{backend + ' ' + weight_format:24}{max(answer['kl_nats'], 0):>10.2g}"
                f"{answer['agreement']:>20.1%}{weight_bytes(Path(found.path)) / 1e6:>13.0f}",
                flush=True,
            )


def weight_bytes(path: Path) -> int:
    """Bytes of the weight files."""
    kinds = (".safetensors", ".onnx", ".data", ".onnx_data")
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.name.endswith(kinds))


if __name__ == "__main__":
    main()
