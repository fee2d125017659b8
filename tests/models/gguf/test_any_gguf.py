"""GGUF files as people have them: of any type, of other architectures, damaged."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from crossover.models.errors import ModelError, UnsupportedModel
from crossover.models.gguf.reader import read_header
from crossover.models.identity.resolve_model import resolve
from crossover.models.text.tokenizer import try_tokenizer
from crossover.models.weights.random_weights import write_gguf
from crossover.models.weights.weight_formats import weight_bytes
from crossover.models.weights.weights_manifest import manifest_path
from tests.gguf_files import gguf_logits, quantise
from tests.shapes import TINY_LLAMA

WIDE = msgspec.structs.replace(TINY_LLAMA, hidden=256, intermediate=512, heads=4, head_dim=64)
IDS = np.arange(16)[None] + 300
TYPES = "Q4_1 Q5_K_M Q6_K IQ4_XS MXFP4_MOE TQ2_0".split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("whole") / "whole.gguf"
    write_gguf(WIDE, file, "F32")
    return file


@pytest.mark.parametrize("kind", TYPES)
def test_any_type_that_llama_cpp_writes_is_taken(kind: str, whole: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    quantise(whole, file, kind)
    found = resolve(str(file), kind="gguf")
    assert (found.weight_format, found.spec.parameters) == (kind, WIDE.parameters)
    assert resolve(str(file), kind="gguf", weight_format=kind.lower()) == found
    with pytest.raises(UnsupportedModel, match=f"x.gguf is of format {kind}, not Q8_0"):
        resolve(str(file), kind="gguf", weight_format="Q8_0")
    size = sum(one.n_bytes for one in read_header(file).tensors.values())
    assert size < os.path.getsize(file) < whole.stat().st_size / 2
    if kind != "MXFP4_MOE":  # which are experts, and there are none
        assert weight_bytes(found.spec, kind) == pytest.approx(size, rel=0.5)
    assert np.isfinite(gguf_logits(file, IDS)).all()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF", b"GGML", "is not a GGUF file"),
        (b"llama", b"lxama", "foreign.gguf: unknown model architecture: 'lxama'"),
        (b"gpt2", b"gpt9", "foreign.gguf: .*gpt9"),
        (b"token_embd.weight", b"token_embx.weight", "no embedding matrix token_embd.weight"),
    ],
)
def test_a_damaged_file_is_one_sentence_and_leaves_nothing(
    old: bytes, new: bytes, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign.gguf"
    write_gguf(TINY_LLAMA, foreign, "Q8_0")
    manifest_path(foreign).unlink()
    foreign.write_bytes(foreign.read_bytes().replace(old, new))
    with pytest.raises(ModelError, match=message) as problem:
        try_tokenizer(Path(resolve(str(foreign), kind="gguf", cache=tmp_path / "cache").path))
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "cache").exists()
    assert capfd.readouterr().err == ""
