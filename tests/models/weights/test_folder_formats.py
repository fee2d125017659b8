"""Forms in which folders of models are published: each is served right, or refused in one sentence
that names what would do. The table of docs/models.md has the same rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from crossover.models.errors import ModelError
from crossover.models.identity.identify_model import identify
from crossover.models.identity.resolve_model import resolve
from crossover.models.shape.hf_config import read_config
from crossover.models.weights.random_weights import write_hf_folder
from crossover.models.weights.safetensors_reader import INDEX
from tests.graph_logits import divergence, graph_logits
from tests.serving.backends.hf_folders import logprobs_of
from tests.shapes import TINY, TINY_LLAMA

FILE = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IDS = np.arange(3, 27).reshape(2, 12)
Change = Callable[[Path], None]


def config(**changes: Any) -> Change:
    """Changes keys of config.json."""

    def change(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))

    return change


def quantized(method: str, **settings: Any) -> Change:
    return config(quantization_config={"quant_method": method, **settings})


def tensors(change: Callable[[dict[str, Any]], None]) -> Change:
    """Changes the tensors of model.safetensors."""

    def changed(folder: Path) -> None:
        found = load_file(folder / FILE)
        change(found)
        save_file(found, folder / FILE, metadata={"format": "pt"})

    return changed


def sharded(folder: Path) -> None:
    found = load_file(folder / FILE)
    (folder / FILE).unlink()
    weight_map = {}
    for number, names in enumerate((sorted(found)[::2], sorted(found)[1::2]), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file({key: found[key] for key in names}, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def only_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def pickled(folder: Path) -> None:
    (folder / FILE).rename(folder / "pytorch_model.bin")


def head_beside_a_tied_embedding(found: dict[str, Any]) -> None:
    found[HEAD] = found[EMBEDDING].copy()


QUANTIZED = "the folder of the same model in 16 bits.*or its GGUF file"
REFUSED: dict[str, tuple[Change, str]] = {
    "fp8": (
        quantized("fp8", weight_block_size=[128, 128]),
        rf"m has quantized weights \(fp8, by config.json\).*{QUANTIZED}",
    ),
    "gptq": (quantized("gptq", bits=4), rf"\(gptq, .*{QUANTIZED}"),
    "awq": (quantized("awq", bits=4), rf"\(awq, .*{QUANTIZED}"),
    "bitsandbytes": (
        quantized("bitsandbytes", load_in_4bit=True),
        rf"\(bitsandbytes, .*{QUANTIZED}",
    ),
    "compressed-tensors": (
        quantized("compressed-tensors"),
        rf"\(compressed-tensors, .*{QUANTIZED}",
    ),
    "a method without a name": (
        config(quantization_config={"bits": 4}),
        rf"\(quantization_config, .*{QUANTIZED}",
    ),
    "fp8 of another architecture": (
        config(model_type="gpt2", n_embd=64, n_layer=2, n_head=4, quantization_config={"bits": 8}),
        rf"\(quantization_config, .*{QUANTIZED}",
    ),
    "sentencepiece only": (
        only_sentencepiece,
        r"no tokenizer.json, only tokenizer.model. Make it with transformers.* the model's GGUF",
    ),
    "pickled": (pickled, r"no \*.safetensors. Other weights \(.bin, .pt\) can contain code"),
}
SERVED: dict[str, Change] = {
    "one file": lambda folder: None,
    "sharded": sharded,
    "a head beside a tied embedding": tensors(head_beside_a_tied_embedding),
    "a byte order mark before config.json": lambda folder: (folder / "config.json").write_bytes(
        b"\xef\xbb\xbf" + (folder / "config.json").read_bytes()
    ),
    "quantization_config null": config(quantization_config=None),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "m"
    write_hf_folder(TINY_LLAMA, folder, dtype="fp32", seed=5)
    return folder


def folder_with(plain: Path, change: Change, root: Path) -> Path:
    folder = root / "m"
    shutil.copytree(plain, folder)
    (folder / "crossover.json").unlink()  # nobody else's folder has it
    change(folder)
    return folder


@pytest.mark.parametrize("kind", ["hf", "onnx"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_is_not_read_is_refused_with_what_would_do(
    plain: Path, tmp_path: Path, name: str, kind: str
) -> None:
    change, message = REFUSED[name]
    folder = folder_with(plain, change, tmp_path)
    with pytest.raises(ModelError, match=message) as refused:
        resolve(str(folder), kind=kind, cache=tmp_path / "cache")
    assert len(str(refused.value)) < 400 + len(str(folder))
    assert not (tmp_path / "cache" / "converted").exists(), "no conversion has begun"


@pytest.mark.parametrize("name", SERVED)
def test_a_form_that_is_read_gives_the_logits_of_the_plain_folder(
    plain: Path, tmp_path: Path, name: str
) -> None:
    folder = folder_with(plain, SERVED[name], tmp_path)
    assert identify(str(folder)).spec is not None
    graph = resolve(str(folder), kind="onnx", weight_format="fp32", cache=tmp_path / "cache").path
    reference = np.stack([logprobs_of(plain, [int(one) for one in row]) for row in IDS])
    found = graph_logits(Path(graph) / "model.onnx", IDS, TINY_LLAMA)
    assert divergence(reference, found) <= 1e-9


def test_a_head_of_its_own_is_used(tmp_path: Path) -> None:
    (spec,) = [spec for spec in TINY.values() if not spec.tied][:1]
    source = tmp_path / "m"
    write_hf_folder(spec, source, dtype="fp32", seed=5)
    graph = resolve(str(source), kind="onnx", weight_format="fp32", cache=tmp_path / "cache").path
    reference = np.stack([logprobs_of(source, [int(one) for one in row]) for row in IDS])
    assert divergence(reference, graph_logits(Path(graph) / "model.onnx", IDS, spec)) <= 1e-9


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("hf", r"'brandnew', but torch supports only .*GGUF"),
        pytest.param(  # a child imports transformers and optimum
            "onnx",
            "transformers does not know model_type 'brandnew'.* Use the model's GGUF file",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_architecture_that_nothing_here_knows_is_refused_with_what_would_do(
    kind: str, message: str, plain: Path, tmp_path: Path
) -> None:
    change = config(model_type="brandnew", architectures=["BrandNewForCausalLM"])
    folder = folder_with(plain, change, tmp_path)
    with pytest.raises(ModelError, match=message):
        resolve(str(folder), kind=kind, cache=tmp_path / "cache")
