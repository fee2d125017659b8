"""Converted weights against their source: the same numbers where the format is exact, refused where
they are not.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from models import conversion
from models.convert_to_gguf import gguf_logits, make_gguf
from models.errors import BrokenWeights, UnsupportedModel
from models.manifest import read_manifest
from models.random_weights import write_gguf, write_hf_folder
from models.spec import ModelSpec
from tests.models.test_tokenizer import sentencepiece
from tests.serving.backends.hf_folders import hf_folder, logprobs_of
from tests.shapes import TINY, TINY_LLAMA, TINY_LLAMA3

# Long enough for Llama 3's scaled frequencies to matter.
LONG = np.random.default_rng(3).integers(3, 640, (1, 300))


@pytest.mark.parametrize("spec", TINY.values(), ids=lambda spec: spec.name)
def test_float32_is_converted_exactly(spec: ModelSpec, tmp_path: Path) -> None:
    make_gguf(hf_folder(spec.name), tmp_path / "out.gguf", "F32", spec=spec)
    wanted = logprobs_of(hf_folder(spec.name), LONG[0].tolist()).astype(np.float32)
    found = conversion.compared(wanted, gguf_logits(tmp_path / "out.gguf", LONG)[0])
    assert found.kl_nats < 1e-6 and found.agreement == 1


def as_if_trained(spec: ModelSpec, folder: Path, dtype: str = "bf16") -> Path:
    """A folder that does not say that its weights are random: these are given no quality."""
    write_hf_folder(spec, folder, dtype)
    (folder / "crossover.json").unlink()
    return folder


def test_formats_are_as_good_as_their_bits(tmp_path: Path) -> None:
    as_if_trained(TINY_LLAMA3, tmp_path / "source")
    quality = {}
    for weight_format in ("BF16", "Q8_0", "Q4_K_M", "Q4_0"):
        file = tmp_path / f"{weight_format}.gguf"
        make_gguf(tmp_path / "source", file, weight_format, spec=TINY_LLAMA3)
        manifest = read_manifest(file)
        assert manifest is not None and manifest.quality_kl_nats is not None
        quality[weight_format] = manifest.quality_kl_nats
    assert 0 < quality["BF16"] < quality["Q8_0"] < quality["Q4_K_M"] < quality["Q4_0"] < 0.4


def test_another_shape_than_promised_is_refused(tmp_path: Path) -> None:
    write_hf_folder(TINY_LLAMA3, tmp_path / "source")
    with pytest.raises(BrokenWeights, match="does not hold tiny-llama"):
        make_gguf(tmp_path / "source", tmp_path / "out.gguf", spec=TINY_LLAMA)
    with pytest.raises(UnsupportedModel, match="Q3"):
        make_gguf(tmp_path / "source", tmp_path / "out.gguf", "Q3")


def test_a_model_too_large_to_compare_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "MOST_COMPARED", 1)
    as_if_trained(TINY_LLAMA, tmp_path / "source")
    said: list[str] = []
    scratch: set[str] = set()

    def progress(what: str, fraction: float | None) -> None:
        said.append(what)
        scratch.update(path.name for path in tmp_path.iterdir())

    make_gguf(tmp_path / "source", tmp_path / "out.gguf", "Q8_0", progress=progress)
    manifest = read_manifest(tmp_path / "out.gguf")
    assert manifest is not None and manifest.quality_kl_nats is None
    # What a killed conversion leaves is found by its name when it is tried again.
    left = {name for name in scratch if name.startswith(".")}
    assert left and all(name.startswith(".out.gguf.") for name in left), left
    assert all(name.endswith(".part") for name in left), left
    assert any("logits not compared" in what for what in said)


def test_a_gguf_file_is_made_of_another_format(tmp_path: Path) -> None:
    write_gguf(TINY_LLAMA3, tmp_path / "in.gguf", "F16")
    (tmp_path / "in.gguf.crossover.json").unlink()
    make_gguf(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q8_0")
    manifest = read_manifest(tmp_path / "out.gguf")
    assert manifest is not None and manifest.quality_kl_nats is not None
    assert 0 < manifest.quality_kl_nats < 0.02


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    write_hf_folder(TINY_LLAMA, tmp_path / "source")
    sentencepiece(tmp_path / "source")
    with pytest.raises(UnsupportedModel, match="'BPE' that is not byte-level; .* own GGUF file"):
        make_gguf(tmp_path / "source", tmp_path / "out.gguf", "Q8_0")


def test_the_pre_tokenizer_says_what_a_vocabulary_is_not_byte_fallback(tmp_path: Path) -> None:
    """transformers sets byte_fallback on the byte-level tokenizer that it takes out of a GGUF."""
    write_hf_folder(TINY_LLAMA, tmp_path / "source")
    file = tmp_path / "source" / "tokenizer.json"
    table = json.loads(file.read_text(encoding="utf-8"))
    table["model"]["byte_fallback"] = True
    file.write_text(json.dumps(table), encoding="utf-8")
    make_gguf(tmp_path / "source", tmp_path / "x.gguf", "Q8_0")


def test_a_tokenizer_without_a_name_in_llama_cpp_is_refused(tmp_path: Path) -> None:
    write_hf_folder(TINY_LLAMA, tmp_path / "source")
    file = tmp_path / "source" / "tokenizer.json"
    file.write_text(
        file.read_text(encoding="utf-8").replace('"use_regex": true', '"use_regex": false', 1),
        encoding="utf-8",
    )
    with pytest.raises(UnsupportedModel, match="no known name in llama.cpp"):
        make_gguf(tmp_path / "source", tmp_path / "out.gguf")


def test_a_tokenizer_cut_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models import convert_tokenizer

    monkeypatch.setattr(
        convert_tokenizer, "_pre_tokenizer", lambda folder, description: "llama-bpe"
    )
    write_hf_folder(TINY_LLAMA, tmp_path / "source")
    with pytest.raises(BrokenWeights, match="the source's into"):
        make_gguf(tmp_path / "source", tmp_path / "out.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]
