"""The shipped tokenizer, as the `tokenizers` library and as llama.cpp read it, and foreign
tokenizers.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfFile
from tokenizers import decoders, models, normalizers, processors

from crossover.models.child_process import run_python
from crossover.models.errors import BadChat, BrokenWeights, UnknownModel
from crossover.models.text.tokenizer import (
    SHIPPED,
    Tokenizer,
    load_tokenizer,
    shipped,
    write_shipped,
)
from crossover.models.weights.random_weights import write_gguf
from tests.graph_logits import CORPUS
from tests.shapes import TINY_LLAMA

VOCABULARY = 4000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """The same tokenizer from a folder and from a GGUF file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_shipped(folder, VOCABULARY, 2048)
    write_gguf(msgspec.structs.replace(TINY_LLAMA, vocabulary=VOCABULARY), folder / "x.gguf")
    return load_tokenizer(folder), load_tokenizer(folder / "x.gguf")


def write_files(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    table = tokenizer.token_bytes()
    return b"".join(table[index] for index in ids).decode()


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet=" \n\t\r'dst019aZé中\u00a0\u2028", max_size=40))
def test_any_text_is_cut_alike_and_comes_back(text: str, pair: tuple[Tokenizer, Tokenizer]) -> None:
    folder, file = pair
    ids = folder.encode(text)
    assert ids == file.encode(text)
    assert decode(folder, ids) == text


def test_both_readers_know_the_same_facts(pair: tuple[Tokenizer, Tokenizer]) -> None:
    folder, file = pair
    for name in ("vocabulary", "eos_ids", "bos_id", "special_ids", "chat_template"):
        assert getattr(folder, name) == getattr(file, name), name
    assert (folder.vocabulary, folder.eos_ids, folder.bos_id) == (VOCABULARY, {0, 2}, None)
    assert folder.special_ids == {0, 1, 2}
    assert folder.token_bytes() == file.token_bytes()
    assert folder.token_bytes()[:3] == [b"", b"", b""]
    messages = [{"role": "user", "content": "Grüße"}]
    assert (
        folder.render_chat(messages)
        == file.render_chat(messages)
        == "<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\n"
    )


def test_control_tokens_in_text_are_text_by_default(
    pair: tuple[Tokenizer, Tokenizer],
) -> None:
    for tokenizer in pair:
        assert decode(tokenizer, tokenizer.encode("a\ud800b")) == "a?b"  # half a surrogate pair
        assert tokenizer.encode("<|im_end|>", parse_special=True) == [2]
        plain = tokenizer.encode("<|im_end|>")
        assert not tokenizer.special_ids & set(plain)
        assert decode(tokenizer, plain) == "<|im_end|>"
        assert [tokenizer.token_text(one) for one in tokenizer.encode("of the")] == ["of", "Ġthe"]
        assert (tokenizer.token_text(0), tokenizer.token_text(10**6)) == ("<|endoftext|>", "")


@pytest.mark.parametrize(
    "vocabulary", [512, 640, 3000, 49152, pytest.param(152064, marks=pytest.mark.slow)]
)
def test_every_vocabulary_is_filled(vocabulary: int, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_files(tmp_path, {"tokenizer.json": shipped(vocabulary)}))
    table = tokenizer.token_bytes()
    assert tokenizer.vocabulary == len(table) == vocabulary
    assert len(set(table[3:])) == vocabulary - 3
    text = CORPUS.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    assert decode(tokenizer, ids) == text
    padding = [one for one in range(3401, vocabulary) if table[one].startswith(b" w0")][:200]
    ids = tokenizer.encode(" ".join(table[one].decode() for one in padding))
    assert not set(ids) & set(padding)


def test_a_long_word_does_not_end_the_process(tmp_path: Path) -> None:
    """llama.cpp cuts the text of this family by std::regex, which recurses."""
    write_gguf(msgspec.structs.replace(TINY_LLAMA, vocabulary=VOCABULARY), tmp_path / "x.gguf")
    data = (tmp_path / "x.gguf").read_bytes()
    at = data.index(b"tokenizer.ggml.pre") + len("tokenizer.ggml.pre") + 4
    assert data[at + 8 :].startswith(b"gpt-2")
    (tmp_path / "x.gguf").write_bytes(data[:at] + b"\6" + bytes(7) + b"tekken" + data[at + 13 :])
    code = f"""
from threading import Thread
from crossover.models.text.tokenizer import load_tokenizer
one = load_tokenizer({str(tmp_path / "x.gguf")!r})
beside = Thread(target=lambda: print(*(len(one.encode(x * 60_000)) for x in "a 中")))
beside.start(); beside.join()"""
    ran = run_python("-c", code, timeout_seconds=60)
    assert ran.status == 0, ran.reason
    letters, blanks, characters = map(int, ran.output.split())
    assert letters == 60_000 and 0 < blanks < 60_000 and characters == 120_000


def test_sentencepiece_tables(tmp_path: Path) -> None:
    """Of the Llama 2 kind: words marked with ▁, unknown characters as bytes, BOS put first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    ids = {token: index for index, token in enumerate(tokens)}
    made = HfFile(models.BPE(ids, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    marked = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(marked)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, {2}, {0, 1, 2})
    assert tokenizer.token_bytes()[3 + 0xE4] == b"\xe4"
    ids_of = tokenizer.encode("a 中😀")
    assert 1 not in ids_of and decode(tokenizer, ids_of) == " a 中😀"


def test_end_tokens_and_template_come_from_all_of_the_files(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    config = {"eos_token": "<|im_end|>", "bos_token": "<s>", "chat_template": named}
    files = {"tokenizer.json": shipped(600), "tokenizer_config.json": config}
    files |= {
        "generation_config.json": {"eos_token_id": [0, 7]},
        "config.json": {"eos_token_id": 9},
    }
    folder, messages = write_files(tmp_path, files), [{"role": "user", "content": "x"}]
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_ids, tokenizer.render_chat(messages)) == ({0, 2, 7}, "<s>x")
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_ids, tokenizer.render_chat(messages)) == ({2, 9}, "1")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(BrokenWeights, match="tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(BrokenWeights, match="x.gguf"):
        load_tokenizer(tmp_path / "x.gguf")
    with pytest.raises(BadChat, match="no chat template"):
        load_tokenizer(SHIPPED).render_chat([{"role": "user", "content": "x"}])
