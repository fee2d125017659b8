"""GGUF and safetensors headers from strangers: damaged anywhere, they are refused with one kind of
error, and nothing else happens.
"""

import json
import random
import struct
from pathlib import Path

import pytest

from models.errors import BrokenWeights, ModelError, UnsupportedModel
from models.gguf_reader import GgufHeader, read_header
from models.random_weights import write_gguf, write_hf_folder
from models.safetensors_reader import check_tensors, read_tensors
from tests.shapes import TINY_LLAMA, TINY_QWEN2


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "x.gguf"
    write_gguf(TINY_LLAMA, file)
    return file.read_bytes()


def _header(content: bytes, file: Path) -> GgufHeader:
    file.write_bytes(content)
    return read_header(file)


def test_a_file_cut_anywhere_is_refused(gguf_bytes: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    data = sum(entry.n_bytes for entry in _header(gguf_bytes, file).tensors.values())
    header_ends = len(gguf_bytes) - data
    for size in [*range(64), *range(64, header_ends, 997), header_ends, len(gguf_bytes) - 40]:
        with pytest.raises(BrokenWeights, match=r"x\.gguf"):
            _header(gguf_bytes[:size], file)
    key, array = b"general.x", struct.pack("<IQ", 9, 1)  # arrays of arrays without end
    head = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key
    with pytest.raises(BrokenWeights, match="recursion"):
        _header(head + array[:4] + array * 5000 + bytes(64), file)


def test_a_damaged_header_is_read_or_refused_but_nothing_worse(
    gguf_bytes: bytes, tmp_path: Path
) -> None:
    generator = random.Random(11)
    refused = 0
    for _ in range(300):
        damaged = bytearray(gguf_bytes)
        for _ in range(generator.choice([1, 1, 4])):
            most = generator.choice([64, 1200, len(damaged) - 95_000])
            place = generator.randrange(most)
            damaged[place] = generator.choice([0, 1, 127, 255, generator.randrange(256)])
        try:
            _header(bytes(damaged), tmp_path / "x.gguf").spec("x")
        except ModelError:
            refused += 1
    assert refused > 50


def test_of_another_architecture_the_header_says_what_serving_needs(
    gguf_bytes: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "x.gguf"
    known = _header(gguf_bytes, file).spec("x")
    found = _header(gguf_bytes.replace(b"llama", b"lxama"), file).spec("x")
    assert found.family == "lxama" and found.parameters == known.parameters
    assert found.kv_bytes_per_token() == known.kv_bytes_per_token()
    assert found.matrix_parameters == pytest.approx(known.matrix_parameters, rel=0.02)
    place = gguf_bytes.index(b"llama.block_count") + len(b"llama.block_count") + 4  # behind a type
    damaged = gguf_bytes[:place] + (20_000).to_bytes(4, "little") + gguf_bytes[place + 4 :]
    with pytest.raises(UnsupportedModel, match="block_count = 20000; it must be .* 1 to 10000"):
        _header(damaged, file).spec("x")


def test_safetensors_that_are_not_what_they_should_be_are_refused(tmp_path: Path) -> None:
    write_hf_folder(TINY_QWEN2, tmp_path, "bf16")
    assert check_tensors(tmp_path, TINY_QWEN2) == "bf16"
    stored = read_tensors(tmp_path)["model.layers.1.self_attn.q_proj.bias"]
    assert (stored.dtype, stored.shape) == ("BF16", (64,))
    with pytest.raises(BrokenWeights, match=r"shape \(704, 64\).*\(640, 64\)"):
        check_tensors(tmp_path, TINY_LLAMA)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    for content in (
        whole[:-1],
        whole + b"x",
        whole[:100],
        b"",
        (1 << 40).to_bytes(8, "little") + whole[8:],
        len(header).to_bytes(8, "little") + header + bytes(4),
    ):
        file.write_bytes(content)
        with pytest.raises(BrokenWeights, match="model.safetensors"):
            read_tensors(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="can run code"):
        read_tensors(tmp_path)
