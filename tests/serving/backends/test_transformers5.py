"""Both major versions of transformers: a folder that one of them wrote is read rightly where the
other is installed.

The suite runs under 4.57; what runs under 5.x does so in an environment of its own
(transformers5.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from models.convert.compare import distance_of, reference_logits, stage
from models.convert.gguf import compare, make_gguf
from models.convert_to_onnx import make_onnx
from models.errors import UnsupportedModel
from models.readers.config import read_spec
from models.tokenization.tokenizer import load_tokenizer
from tests.onnx_logits import graph_logits
from tests.serving.backends.transformers5 import NotMade, engine_tokens, environment, run, save
from tests.shapes import TINY

pytestmark = pytest.mark.timeout(
    400
)  # where the environment is not there yet, making it counts too


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with newer/ and older/ inside, and what the other side said of them."""
    try:
        environment()
    except NotMade as problem:
        pytest.skip(str(problem))
    folder = tmp_path_factory.mktemp("both")
    older = [folder / "older" / name for name in TINY]
    for path in older:
        save(path.name, path)
    return folder, run(folder / "newer", older)


def test_the_two_versions_write_different_folders(both: tuple[Path, dict[str, Any]]) -> None:
    folder, said = both
    assert said["version"].startswith("5.") and transformers.__version__.startswith("4.")
    newer, older = (
        json.loads((folder / side / "tiny-llama3" / "config.json").read_text())
        for side in ("newer", "older")
    )
    assert (
        newer["rope_parameters"]["rope_theta"] == 500_000.0
        and "rope_theta" not in newer
        and "dtype" in newer
    )
    assert older["rope_theta"] == 500_000.0 and "rope_parameters" not in older


@pytest.mark.parametrize("name", TINY)
def test_a_folder_of_5_is_read_rightly_under_4(
    both: tuple[Path, dict[str, Any]], name: str
) -> None:
    folder, said = both
    newer = folder / "newer" / name
    spec = read_spec(newer, name)
    assert spec == TINY[name] and spec == read_spec(folder / "older" / name, name)
    assert engine_tokens(newer) == said["written"][name]
    text = "Where is 日本? <|im_end|>"
    assert load_tokenizer(newer).encode(text) == load_tokenizer(folder / "older" / name).encode(
        text
    )
    assert load_tokenizer(newer).eos_ids == {2}


@pytest.mark.parametrize("name", TINY)
def test_a_folder_of_4_is_read_rightly_under_5(
    both: tuple[Path, dict[str, Any]], name: str
) -> None:
    said = both[1]["read"][name]
    assert said["engine"] == said["transformers"]
    assert both[1]["converted"][name]["gguf"] == pytest.approx(0, abs=1e-6)
    assert 0 < both[1]["converted"][name]["torch"] < 0.01


def test_a_folder_of_5_is_converted_rightly_under_4(
    both: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    newer = both[0] / "newer" / "tiny-llama3"
    make_gguf(newer, both[0] / "out.gguf", "F32")
    long = [[(n * 31) % 700 + 3 for n in range(600)]]
    assert compare(newer, both[0] / "out.gguf", TINY["tiny-llama3"], long).distance < 1e-4
    ids = np.array([long[0][:200]])
    stage(newer, tmp_path / "staged")
    reference = reference_logits(tmp_path / "staged", ids)
    graph = make_onnx(newer, tmp_path / "onnx", "fp32") / "model.onnx"
    logits = graph_logits(graph, ids, TINY["tiny-llama3"])
    assert distance_of(reference, logits).kl_nats == pytest.approx(0, abs=1e-6)


def test_what_only_5_can_write_is_refused_by_name(
    both: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    config = json.loads((both[0] / "newer" / "tiny-llama" / "config.json").read_text())
    for change, words in (
        (
            {"rope_parameters": config["rope_parameters"] | {"rope_type": "yarn", "factor": 4.0}},
            "rope_type 'yarn'",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            "full_attention",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
            "sliding_attention",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedModel, match=words):
            read_spec(tmp_path)
