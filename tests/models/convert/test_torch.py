"""Packing for the torch backend: what comes out is the source's model, or nothing comes out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from models.convert import torch as convert_torch
from models.convert.torch import PRECISIONS, make_torch
from models.errors import BrokenWeights, UnsupportedModel
from models.formats import PACKED_FORMATS
from models.manifest import read_manifest, verify
from models.synthetic.write import write_hf_folder
from models.tokenization.tokenizer import load_tokenizer
from tests.serving.backends.hf_folders import hf_folder
from tests.shapes import TINY, TINY_LLAMA, TINY_MISTRAL


@pytest.mark.parametrize("name", TINY)
def test_formats_are_compared_with_the_source_and_the_divergence_kept(
    name: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(hf_folder(name), source)
    (source / "crossover.json").unlink()  # what is known to be random is given no quality
    quality: dict[str, float] = {}
    for precision in PRECISIONS:
        folder = make_torch(source, tmp_path / precision, precision, spec=TINY[name])
        manifest = read_manifest(folder)
        assert manifest is not None and manifest.quality_kl_nats is not None
        assert (manifest.kind, manifest.weight_format, manifest.spec) == (
            "hf",
            precision,
            TINY[name],
        )
        verify(folder, manifest, full=True)
        assert load_tokenizer(folder).vocabulary == load_tokenizer(hf_folder(name)).vocabulary
        quality[precision] = manifest.quality_kl_nats
    assert 0 < quality["int8"] < quality["dynamic-int8"] < quality["int4"] < 0.5
    assert set(PRECISIONS) == set(PACKED_FORMATS)


def test_a_wrong_packing_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = convert_torch.int8_rows

    def wrong(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = right(weight)
        return values, scale.roll(1)

    monkeypatch.setattr(convert_torch, "int8_rows", wrong)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("what was there before")
    with pytest.raises(
        BrokenWeights, match=r"the packed form of .* is another matrix than the source's"
    ):
        make_torch(hf_folder("tiny-llama"), tmp_path / "out", "int8")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["old"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'int3'"):
        make_torch(hf_folder("tiny-llama"), tmp_path / "out", "int3")
    with pytest.raises(BrokenWeights, match="tiny-qwen2-fp32 does not hold tiny-llama"):
        make_torch(hf_folder("tiny-qwen2"), tmp_path / "out", "int8", spec=TINY_LLAMA)
    cut = tmp_path / "cut"
    write_hf_folder(TINY_MISTRAL, cut, "fp32")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(BrokenWeights, match=r"model\.safetensors of cut cannot be read"):
        make_torch(cut, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()
