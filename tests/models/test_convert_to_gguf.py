"""Converted weights against their source: the same numbers where the format is exact, refused where
they are not.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from models import conversion
from models import convert_to_gguf as convert
from models.convert_to_gguf import make_gguf
from models.errors import BrokenWeights, UnsupportedModel
from models.manifest import read_manifest
from models.random_weights import write_hf_folder
from models.spec import ModelSpec
from models.tokenizer import load_tokenizer
from tests.models.test_tokenizer import sentencepiece
from tests.shapes import TINY, TINY_LLAMA, TINY_LLAMA3

# Long enough for Llama 3's scaled frequencies to matter.
LONG = np.random.default_rng(3).integers(3, 640, (1, 300)).tolist()


@pytest.mark.parametrize("spec", TINY.values(), ids=lambda spec: spec.name)
def test_float32_is_converted_exactly(spec: ModelSpec, tmp_path: Path) -> None:
    manifest = make_gguf(
        as_if_trained(spec, tmp_path / "source", "fp32"),
        *(tmp_path / "out.gguf", "F32"),
        spec=spec,
        sequences=LONG,
    )
    assert manifest.quality_kl_nats == pytest.approx(0, abs=1e-9)
    assert manifest.greedy_agreement == 1


def as_if_trained(spec: ModelSpec, folder: Path, dtype: str = "bf16") -> Path:
    """A folder that does not say that its weights are random: these are given no quality."""
    write_hf_folder(spec, folder, dtype)
    (folder / "crossover.json").unlink()
    return folder


def test_formats_are_as_good_as_their_bits(tmp_path: Path) -> None:
    as_if_trained(TINY_LLAMA3, tmp_path / "source")
    quality = {}
    for weight_format in ("BF16", "Q8_0", "Q4_K_M", "Q4_0"):
        manifest = make_gguf(
            tmp_path / "source", tmp_path / f"{weight_format}.gguf", weight_format, spec=TINY_LLAMA3
        )
        assert manifest == read_manifest(tmp_path / f"{weight_format}.gguf")
        assert manifest.quality_kl_nats is not None
        quality[weight_format] = manifest.quality_kl_nats
    assert 0 < quality["BF16"] < quality["Q8_0"] < quality["Q4_K_M"] < quality["Q4_0"] < 0.01


@pytest.mark.parametrize("mistake", ["unrotated", "other theta", "other scaling"])
def test_a_wrong_conversion_is_refused_and_leaves_nothing(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_folder(TINY_LLAMA3, tmp_path / "source", "fp32", initializer_range=0.1)
    if mistake == "unrotated":
        monkeypatch.setattr(convert, "_interleaved", lambda raw, heads: raw)
    elif mistake == "other theta":
        wrong = msgspec.structs.replace(TINY_LLAMA3, rope_theta=10_000.0)
        monkeypatch.setattr(conversion, "spec_of", lambda config, name: wrong)
    else:
        monkeypatch.setattr(
            convert, "rope_factors", lambda spec, scaling: np.ones(spec.head_dim // 2, np.float32)
        )
    said = (
        "q_proj.weight of source is another one" if mistake == "unrotated" else "logits are .* away"
    )
    with pytest.raises(BrokenWeights, match=said):
        make_gguf(tmp_path / "source", tmp_path / "out.gguf", "F32", sequences=LONG)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_another_shape_than_promised_is_refused(tmp_path: Path) -> None:
    write_hf_folder(TINY_LLAMA3, tmp_path / "source")
    with pytest.raises(BrokenWeights, match="does not hold tiny-llama"):
        make_gguf(tmp_path / "source", tmp_path / "out.gguf", spec=TINY_LLAMA)
    with pytest.raises(UnsupportedModel, match="Q3"):
        make_gguf(tmp_path / "source", tmp_path / "out.gguf", "Q3")


def test_a_reference_too_big_for_the_memory_is_said_and_not_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "reference_fits", lambda spec: False)
    write_hf_folder(TINY_LLAMA, tmp_path / "source")
    said: list[str] = []
    scratch: set[str] = set()

    def progress(what: str, fraction: float | None) -> None:
        said.append(what)
        scratch.update(path.name for path in tmp_path.iterdir())

    manifest = make_gguf(tmp_path / "source", tmp_path / "out.gguf", "Q8_0", progress=progress)
    assert manifest.quality_kl_nats is None
    # What a killed conversion leaves is found by its name when it is tried again.
    left = {name for name in scratch if name.startswith(".")}
    assert left and all(name.startswith(".out.gguf.") for name in left), left
    assert all(name.endswith(".part") for name in left), left
    assert any("logits not compared" in what for what in said)


def test_a_sentencepiece_tokenizer_is_converted(tmp_path: Path) -> None:
    tokenizer_folder = tmp_path / "tokenizer"
    tokenizer_folder.mkdir()
    size = load_tokenizer(sentencepiece(tokenizer_folder)).vocabulary
    write_hf_folder(msgspec.structs.replace(TINY_LLAMA, vocabulary=size + 24), tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer_folder / name).replace(tmp_path / "source" / name)
    (tmp_path / "source" / "generation_config.json").unlink()
    make_gguf(tmp_path / "source", tmp_path / "out.gguf", "Q8_0")
    ours, theirs = load_tokenizer(tmp_path / "out.gguf"), load_tokenizer(tmp_path / "source")
    assert ours.bos_id == theirs.bos_id == 1
    assert ours.token_bytes()[: theirs.vocabulary] == theirs.token_bytes()


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
