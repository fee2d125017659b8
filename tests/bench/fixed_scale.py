"""What the fixed scale of int8 activations costs in exactness, at a shape with outliers.

    python -m tests.bench.fixed_scale 360m

Random weights of a ladder shape, one channel of whose embedding is a hundred times the others. KL
divergence to transformers in float32 of the int8 graph as it is, with one scale for what comes from
a norm, and of the graph with a scale for each token. Random weights spread any rounding, so the
ratio tells and the size does not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from crossover.models.identity.model_ladder import ladder_model
from crossover.models.weights.convert_to_onnx import GraphWriter, make_onnx
from crossover.models.weights.random_weights import write_hf_folder
from tests.bench.paired import machine, machine_line, parser_of
from tests.graph_logits import divergence, graph_logits
from tests.serving.backends.hf_folders import logprobs_of


def main() -> None:
    from safetensors.torch import load_file, save_file

    parser = parser_of(__doc__)
    parser.add_argument("model", help="a model of the ladder")
    spec = ladder_model(parser.parse_args().model).spec
    ids = np.random.default_rng(20).integers(3, 40_000, (2, 20))
    divergences = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        write_hf_folder(spec, source, dtype="fp32", seed=5)
        (source / "crossover.json").unlink()  # nothing says that they are random
        tensors = load_file(source / "model.safetensors")
        tensors["model.embed_tokens.weight"][:, 7] *= 100
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        del tensors
        floats = np.stack([logprobs_of(source, row.tolist()) for row in ids])
        product = GraphWriter.product
        for name in ("fixed scale", "a scale for each token"):
            out = Path(folder, name)
            make_onnx(source, out, "int8")
            divergences[name] = divergence(
                floats.astype(np.float32), graph_logits(out / "model.onnx", ids, spec)
            )
            print(f"{name}: KL {divergences[name]:.3g} nats", flush=True)
            GraphWriter.product = (  # type: ignore[method-assign]
                lambda self, x, y, *sources, is_normed=False: product(self, x, y, *sources)
            )
    fixed, each = divergences.values()
    print(f"{spec.name}: {fixed / each:.2f} times as much with the fixed scale")
    print(machine_line(machine()))


if __name__ == "__main__":
    main()
