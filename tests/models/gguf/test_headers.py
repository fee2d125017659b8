"""GGUF and safetensors headers from other people: damaged anywhere, they are refused with one
kind of error, and nothing else happens.
"""

import json
import random
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from crossover.models.errors import BrokenWeights, ModelError, UnsupportedModel
from crossover.models.gguf.reader import GgufHeader, part_names, read_header
from crossover.models.identity.identify_model import identify
from crossover.models.identity.resolve_model import resolve
from crossover.models.text.tokenizer import load_tokenizer
from crossover.models.weights.random_weights import write_gguf, write_hf_folder
from crossover.models.weights.safetensors_reader import check_tensors, read_tensors
from tests.gguf_families import write_family
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


@pytest.mark.parametrize("files", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_a_damaged_header_is_read_or_refused_but_nothing_worse(
    files: int, gguf_bytes: bytes, tmp_path: Path
) -> None:
    generator = random.Random(11)
    refused = 0
    for _ in range(files):
        damaged = bytearray(gguf_bytes)
        for _ in range(generator.choice([1, 1, 4])):
            most = generator.choice([64, 1200, len(damaged) - 95_000])
            place = generator.randrange(most)
            damaged[place] = generator.choice([0, 1, 127, 255, generator.randrange(256)])
        try:
            _header(bytes(damaged), tmp_path / "x.gguf").spec("x")
        except ModelError:
            refused += 1
    assert refused > files / 6


def test_the_header_of_another_architecture_has_what_serving_needs(
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
    with pytest.raises(UnsupportedModel, match="block_count = 20000, but it must be .* 1 to 10000"):
        _header(damaged, file).spec("x")


@pytest.mark.parametrize("key", ["llama.block_count", "general.architecture"])
def test_a_key_that_is_not_there_is_named(key: str, gguf_bytes: bytes, tmp_path: Path) -> None:
    other_key = key.replace("t", "x").encode()
    header = _header(gguf_bytes.replace(key.encode(), other_key), tmp_path / "x.gguf")
    with pytest.raises(UnsupportedModel, match=f"x does not have {key}"):
        header.spec("x")


# What the header of each family says: total and active parameters in thousands, experts used and
# all, elements that a token caches, bytes of a slot's state.
EXPECTED = {
    "llama": (1115, 853, None, 512, 0),
    "llama-split": (1115, 853, None, 512, 0),
    "qwen3moe": (1513, 661, (2, 8), 512, 0),
    "deepseek2": (1619, 914, (2, 8), 384, 0),
    "gemma3": (1412, 1150, None, 768, 0),
    "mamba2": (996, 734, None, 0, 149504),
    "falcon-h1": (1587, 1325, None, 512, 149504),
    "granitehybrid": (1555, 965, (2, 8), 128, 112128),
    "lfm2": (1216, 1216, None, 256, 4096),
    "qwen35moe": (1683, 831, (2, 8), 128, 58368),
    "nemotron_h_moe": (7791, 5268, (2, 8), 2944, 859648),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_header_of_each_family_has_what_placement_needs(name: str, tmp_path: Path) -> None:
    spec = read_header(write_family(name, tmp_path)).spec(name)
    experts = spec.experts and (spec.experts.used, spec.experts.count)
    elements = sum(one.layers * (one.keys + one.values) for one in spec.cache_groups)
    found = (spec.parameters, spec.active_parameters, experts, elements, spec.state_bytes_per_slot)
    print(name, found)
    total, active, *exact = EXPECTED[name]
    assert found[:2] == (
        pytest.approx(1000 * total, rel=1e-3),
        pytest.approx(1000 * active, rel=1e-3),
    )
    assert [*found[2:]] == exact


def test_a_split_model_is_read_by_the_name_of_any_part(tmp_path: Path) -> None:
    first = write_family("llama-split", tmp_path)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == part_names(first.name) and len(parts) == 3
    whole = read_header(write_family("llama", tmp_path)).spec("x")
    for part in parts:
        found = resolve(str(part), kind="gguf")
        assert (found.name, found.path) == ("llama-split", str(first))
        assert found.spec.parameters == whole.parameters
        assert found.file_bytes == sum(one.stat().st_size for one in parts)
    moved = parts[2].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(
        BrokenWeights, match="one of 3 files of a model, but part 3, llama-split-00003-of-00003"
    ):
        read_header(first)
    with pytest.raises(BrokenWeights, match="elsewhere.gguf is one of 3 files"):
        read_header(moved)
    shutil.copy(parts[1], parts[2])
    with pytest.raises(BrokenWeights, match="00003-of-00003.gguf is wrong.* part 2 of 3"):
        read_header(first)


def test_the_first_bytes_decide_what_a_gguf_file_is(tmp_path: Path) -> None:
    blob = write_family("llama", tmp_path).rename(tmp_path / "sha256-0a1b2c")
    assert identify(str(blob)).kind == "gguf" and resolve(str(blob), kind="gguf").spec.layers == 4
    assert load_tokenizer(blob).vocabulary > 1000
    text = tmp_path / "x.gguf"
    text.write_text("no such thing")
    with pytest.raises(BrokenWeights, match="x.gguf' is not a GGUF file"):
        resolve(str(text), kind="gguf")


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
    with pytest.raises(UnsupportedModel, match="can contain code"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("has_type", [True, False])
@pytest.mark.parametrize(
    ("kind", "architecture", "key", "words"),
    [
        ("mmproj", "clip", "clip.projector_type", "is a multimodal projector .* language model"),
        ("adapter", "llama", "adapter.type", "is a LoRA adapter .* llama-export-lora"),
    ],
)
def test_a_file_that_is_only_a_part_of_a_model_is_refused_by_what_it_is(
    tmp_path: Path, has_type: bool, kind: str, architecture: str, key: str, words: str
) -> None:
    file = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    if has_type:
        writer.add_type(kind)
    writer.add_string(key, "lora" if kind == "adapter" else "gemma3")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((8, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=f"^part {words}"):
        identify(str(file))
