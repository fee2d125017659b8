"""What every format of a trained model costs: KL divergence and greedy agreement on text, as the
engines serve it.

    python -m tests.bench.format_quality --model smollm2-135m-instruct onnx:int8 llama_cpp:Q8_0

The reference is transformers in float32 on the model's weights (for SmolLM2's GGUF file: the floats
that it stands for). Every format is made from these weights (GGUF formats by llama.cpp's
quantizer), loaded by its backend, and given the same 2,000 tokens of the corpus's prose, one token
a step and all sequences in one batch. The log-probabilities that the engine reports are compared
with the reference at every position. So the rounding of activations and of the KV cache, and the
effect of the other sequences in the batch, count as they do in service.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from crossover.models.identity.identify_model import identify
from crossover.models.identity.resolve_model import resolve
from crossover.models.text.tokenizer import load_tokenizer
from crossover.serving.backends.backend_table import weights_of
from tests.bench.engine_child import EngineChild, config_of, engine
from tests.bench.paired import machine, machine_line, parser_of
from tests.gguf_files import folder_of, quantise
from tests.graph_logits import prose
from tests.serving.backends.hf_folders import logprobs_of

DEFAULT = "llama_cpp:BF16 llama_cpp:Q8_0 llama_cpp:Q4_K_M llama_cpp:Q4_0 onnx:int8 onnx:int4"


def main() -> None:
    parser = parser_of(__doc__)
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
    path = folder = Path(resolve(name, kind="gguf" if identify(name).kind == "gguf" else "hf").path)
    with tempfile.TemporaryDirectory() as scratch:
        if path.is_file():
            folder = folder_of(path, Path(scratch, name))
        count = arguments.sequences * arguments.tokens
        tokens = np.array(load_tokenizer(folder).encode(prose())[:count])
        ids = tokens.reshape(arguments.sequences, -1).tolist()
        print(f"{name}: {tokens.size} tokens of text; against its floats")
        print(f"{'':24}{'KL, nats':>10}{'greedy tokens kept':>20}{'weights, MB':>13}", flush=True)
        reference = Path(scratch, "reference.npy")
        np.save(reference, np.stack([logprobs_of(folder, row) for row in ids]).astype(np.float32))
        for backend, weight_format in arguments.engines:
            if weights_of(backend)[0] == "gguf" and path.is_file():
                name = str(Path(scratch, f"{weight_format}.gguf"))
                quantise(path, Path(name), weight_format)
            else:
                name = str(folder)
            config = config_of(
                *(name, backend, weight_format),
                slots=arguments.sequences,
                context_tokens=-(-arguments.tokens // 64) * 64,
                threads=len(arguments.cores),
            )
            with EngineChild(config, arguments.cores) as child:
                answer = child.ask("quality", ids=ids, reference=str(reference))
            print(
                f"{backend + ' ' + weight_format:24}{max(answer['kl_nats'], 0):>10.3g}"
                f"{answer['agreement']:>20.1%}{weight_bytes(Path(config.model_path)) / 1e6:>13.0f}",
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
