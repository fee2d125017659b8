"""GGUF and safetensors headers from other people: damaged anywhere, they are refused with one
kind of error, and nothing else happens.
"""

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
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
from tests.tools.own_process import cost_of


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "x.gguf"
    write_gguf(TINY_LLAMA, file)
    return file.read_bytes()


def _header(content: bytes, file: Path) -> GgufHeader:
    file.write_bytes(content)
    return read_header(file)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _head(tensors: int, keys: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, keys)


def _keys(values: dict[str, bytes]) -> bytes:
    """Return a file that has these keys, each with its type and value, and no tensor."""
    return _head(0, len(values)) + b"".join(_text(key) + value for key, value in values.items())


BYTE = b"\0\0\0\0x"  # a type, and a value
STRING_ARRAY = struct.pack("<IIQ", 9, 8, 1024) + _text("x") * 1024
NO_MODEL = "does not have general.architecture"
FLOODS: dict[str, tuple[Callable[[], bytes], str]] = {
    "keys": (lambda: _keys({str(i): BYTE for i in range(900_000)}), "900000 keys"),
    "few keys": (lambda: _keys({str(i): BYTE for i in range(20_000)}), "20000 keys"),
    "tensors": (
        lambda: (
            _head(450_000, 0)
            + b"".join(_text(str(i)) + struct.pack("<IQIQ", 1, 1, 0, 0) for i in range(450_000))
        ),
        "450000 tensors",
    ),
    "most tensors": (
        lambda: (
            _head(100_000, 0)
            + b"".join(_text(str(i)) + struct.pack("<IQIQ", 1, 1, 0, 0) for i in range(100_000))
            + bytes(64)
        ),
        NO_MODEL,
    ),
    "arrays of strings": (lambda: _keys({str(i): STRING_ARRAY for i in range(1820)}), NO_MODEL),
    "empty strings": (
        lambda: _keys({"x": struct.pack("<IIQ", 9, 8, 125_000_000)}) + bytes(1 << 20),
        "more than 4000000 strings",
    ),
    "a long name": (lambda: _keys({"x" * 300: b""}), "300 bytes of a name"),
    "a long text": (
        lambda: _keys({"x": struct.pack("<I", 8) + _text("x" * (64 << 20))}),
        NO_MODEL,
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_in_a_header_is_refused_at_a_bounded_cost(name: str, tmp_path: Path) -> None:
    content, words = FLOODS[name]
    file = tmp_path / "x.gguf"
    file.write_bytes(content())
    cost = cost_of(
        "from pathlib import Path\n"
        "from crossover.models.errors import ModelError\n"
        "from crossover.models.gguf.reader import read_header",
        "try:\n    read_header(Path(sys.argv[1])).spec('x')\n"
        "except ModelError as problem:\n    print(problem)",
        str(file),
    )
    assert re.search(words, cost.output), cost
    assert cost.cpu_seconds < 5 and cost.grown_mib < 100, cost  # 1 s on an idle core


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.rope.freq_base", struct.pack("<I", 8) + _text("x"), "rope.freq_base = 'x'"),
        ("llama.rope.freq_base", struct.pack("<IIQf", 9, 6, 1, 1.0), "rope.freq_base = .1.0."),
        ("llama.rope.freq_base", struct.pack("<If", 6, float("nan")), "rope.freq_base = nan"),
        ("split.count", struct.pack("<I", 8) + _text("x"), "split.count = 'x'"),
        ("llama.ssm.inner_size", struct.pack("<I", 8) + _text("x"), None),
        ("general.alignment", struct.pack("<II", 4, 0), "general.alignment = 0"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(
    key: str, value: bytes, words: str | None, gguf_bytes: bytes, tmp_path: Path
) -> None:
    tensors, keys = struct.unpack_from("<QQ", gguf_bytes, 8)
    content = gguf_bytes.replace(b"llama.rope.freq_base", b"llama.rope.freq_bass")
    content = _head(tensors, keys + 1) + _text(key) + value + content[24:] + bytes(64)
    if words is None:
        assert _header(content, tmp_path / "x.gguf").spec("x").layers == 2
        return
    with pytest.raises(ModelError, match=words):
        _header(content, tmp_path / "x.gguf").spec("x")


@pytest.mark.parametrize("tensor", ["blk.x.attn_q.weight", f"blk.{'9' * 200}.a"])
def test_a_tensor_without_a_number_is_of_no_layer(
    tensor: str, gguf_bytes: bytes, tmp_path: Path
) -> None:
    known = _header(gguf_bytes, tmp_path / "x.gguf")
    name = _text(next(name for name in known.tensors if name.startswith("blk.0.")))
    content = gguf_bytes.replace(name, _text(tensor)) + bytes(256)
    assert _header(content, tmp_path / "x.gguf").spec("x").layers == 2


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    """Opening one would wait for its writer."""
    pipe = tmp_path / "x.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="x.gguf"):
        identify(str(pipe))


def test_a_file_cut_anywhere_is_refused(gguf_bytes: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    data = sum(entry.n_bytes for entry in _header(gguf_bytes, file).tensors.values())
    header_ends = len(gguf_bytes) - data
    for size in [*range(64), *range(64, header_ends, 997), header_ends, len(gguf_bytes) - 40]:
        with pytest.raises(BrokenWeights, match=r"x\.gguf"):
            _header(gguf_bytes[:size], file)
    key, array = b"general.x", struct.pack("<IQ", 9, 1)  # arrays of arrays without end
    head = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key
    with pytest.raises(BrokenWeights, match="an array has values of the type 9"):
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
