"""A pointer of git-lfs or a web page in place of weights is named as such."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossover.models.errors import BrokenWeights
from crossover.models.gguf.reader import read_header
from crossover.models.weights.safetensors_reader import read_tensors

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
CONTENTS = {
    "pointer of git-lfs": POINTER,
    "web page": b"\n<!DOCTYPE html><html><title>Sign in</title></html>",
    "not a": b"any other bytes",
}


@pytest.mark.parametrize("words", CONTENTS)
def test_of_a_gguf_file(words: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(CONTENTS[words])
    with pytest.raises(BrokenWeights, match=words):
        read_header(file)


@pytest.mark.parametrize("words", CONTENTS)
def test_of_a_part_of_safetensors(words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(CONTENTS[words])
    with pytest.raises(BrokenWeights, match=words):
        read_tensors(tmp_path)
