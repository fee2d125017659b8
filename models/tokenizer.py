"""Tokenizers from tokenizer.json, GGUF or the shipped vocabulary: text to token ids, ids to bytes.

Read by the `tokenizers` library: AutoTokenizer refuses folders of another major version.

Synthetic models get the shipped byte-level BPE, cut or padded to their vocabulary. It was trained
on texts of this project (tests/models/test_shipped_tokenizer.py): ids 0, 1, 2 are SPECIAL_TOKENS, 3
to 258 are bytes, 259 + i is what merge i makes, so the table can be cut after any id.
"""

from __future__ import annotations

import codecs
import json
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as HfFile

from crossover.models.chat_template import CHATML, RendersChat
from crossover.models.child_process import run_aside
from crossover.models.errors import (
    BadChat,
    BrokenWeights,
    ModelError,
    UnknownModel,
    UnsupportedModel,
)
from crossover.models.gguf_reader import is_gguf_file
from crossover.models.gguf_vocabulary import GgufTokenizer

DATA = Path(__file__).parent / "data"
SHIPPED = DATA / "tokenizer.json"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SHIPPED_MARK = "8a2f6821d3c6"  # its blake2b: weights of another one are made again
BYTES = 256
REHEARSAL_SECONDS = 60  # of a process that does nothing else; the largest vocabularies take two
# Characters whose UTF-8 has every byte that text can have: where a vocabulary lacks one, and has no
# token for what is unknown, llama.cpp ends the process.
_EVERY_BYTE = "".join(
    map(chr, [*range(1, 2048), *range(2048, 0xD800, 61), *range(1 << 16, 1 << 20, 4093)])
)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, a folder or a GGUF file. Thread-safe.

    Raises UnknownModel where there is none, BrokenWeights where it cannot be read.
    """
    path = Path(path)
    if path.is_file() and (path.suffix == ".gguf" or is_gguf_file(path)):
        return GgufTokenizer(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UnknownModel(f"{str(path)!r} has no tokenizer: no tokenizer.json and no GGUF file")
    return HfTokenizer(file)


def try_tokenizer(path: Path) -> None:
    """Load and use a foreign tokenizer once, in a child: native code may abort or hang.

    Raises BrokenWeights, UnknownModel, UnsupportedModel.
    """
    try:
        run_aside(f"{__name__}:_rehearse", None, str(path))
    except (UnknownModel, UnsupportedModel):
        raise
    except ModelError as problem:
        raise BrokenWeights(f"The tokenizer of {path.name} cannot be used: {problem}") from problem


def _rehearse(path: str, progress: object = None) -> None:
    signal.alarm(REHEARSAL_SECONDS)
    tokenizer = load_tokenizer(path)
    tokenizer.token_bytes()
    tokenizer.encode(_EVERY_BYTE)
    tokenizer.encode("Once <|im_start|>", parse_special=True)
    with suppress(BadChat):
        tokenizer.render_chat([{"role": "user", "content": "Once"}])


class HfTokenizer(RendersChat):
    """A `tokenizer.json` with the configuration files that lie beside it."""

    def __init__(self, file: Path) -> None:
        try:
            raw = file.read_text(encoding="utf-8-sig")
            self._special_parsing, self._plain = HfFile.from_str(raw), HfFile.from_str(raw)
        except Exception as problem:  # the library raises bare Exception
            raise BrokenWeights(f"{str(file)!r} is not a valid tokenizer: {problem}") from problem
        # A setting of the object, not of the call, so there are two objects.
        self._plain.encode_special_tokens = True
        for item in (self._plain, self._special_parsing):
            item.no_truncation()
            item.no_padding()
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(raw).get("decoder"))
        self._added = self._special_parsing.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, item in self._added.items() if item.special)
        ids = self._special_parsing.get_vocab(with_added_tokens=True).values()
        self.vocabulary = 1 + max(ids, default=-1)
        config = _read_json(file.parent / "tokenizer_config.json")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        self.chat_tokens = {  # strings, or objects with `content`
            name: item["content"] if isinstance(item, dict) else item
            for name in names
            if (item := config.get(name))
        }
        self.eos_ids = self._eos_ids(file.parent)
        with_bos = self._special_parsing.encode("a", add_special_tokens=True).ids
        self.bos_id = with_bos[0] if with_bos and with_bos[0] in self.special_ids else None
        templates = _chat_templates(file.parent, config)
        self.chat_template = templates.pop("default", None)
        self.other_templates = templates

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the token ids without BOS; a control token's text is plain unless
        `parse_special`."""
        chosen = self._special_parsing if parse_special else self._plain
        # JSON can carry half a surrogate pair, which is no text.
        whole = text.encode(errors="replace").decode()
        # Of the two, `encode` holds the GIL: 0.8 s for a million letters.
        ids: list[int] = chosen.encode_batch_fast([whole], add_special_tokens=False)[0].ids
        return ids

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of each id; b"" for control tokens and unused ids."""
        table = [b""] * self.vocabulary
        to_bytes = _byte_level if self._is_byte_level else _sentencepiece
        for token, index in self._special_parsing.get_vocab(with_added_tokens=False).items():
            table[index] = to_bytes(token)
        for index, added in self._added.items():
            table[index] = b"" if added.special else added.content.encode()
        return table

    def token_text(self, token: int) -> str:
        """Return the token as the vocabulary writes it ("Ġthe", "<s>"); "" for unused ids."""
        return self._special_parsing.id_to_token(token) or ""

    def _eos_ids(self, folder: Path) -> frozenset[int]:
        """Of generation_config.json, else of config.json; and the token named eos_token."""
        files = [_read_json(folder / f"{name}.json") for name in ("generation_config", "config")]
        eos_values = [
            value["eos_token_id"] for value in files if value.get("eos_token_id") is not None
        ]
        ids = eos_values[0] if eos_values and isinstance(eos_values[0], list) else eos_values[:1]
        ids = [*ids, self._special_parsing.token_to_id(self.chat_tokens.get("eos_token", ""))]
        # Some files say -1, or null in a list, for "none".
        return frozenset(value for value in ids if type(value) is int and value >= 0)


Tokenizer = HfTokenizer | GgufTokenizer


@cache
def shipped(vocabulary: int) -> dict[str, Any]:
    """Return the shipped tokenizer.json cut or padded to `vocabulary` entries. Read-only: cached.

    Padding tokens (" w0123") decode to plain text, and no text encodes to them. At least 259.
    """
    table = _read_json(SHIPPED)
    model = table["model"]
    model["merges"] = model["merges"][: vocabulary - len(SPECIAL_TOKENS) - BYTES]
    ordered = sorted(model["vocab"], key=model["vocab"].__getitem__)[:vocabulary]
    ordered += [f"Ġw{number:04d}" for number in range(vocabulary - len(ordered))]
    model["vocab"] = {token: index for index, token in enumerate(ordered)}
    return table


def write_shipped(folder: Path, vocabulary: int, context: int) -> None:
    """The shipped tokenizer's files for a model of `context` tokens."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    for name, content in {
        "tokenizer.json": shipped(vocabulary),
        "tokenizer_config.json": config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0},
    }.items():
        text = json.dumps(content, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")


@cache
def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-ins: character of a byte-level vocabulary -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    characters = [*printable, *range(256, 256 + len(unprintable))]
    return dict(zip(map(chr, characters), [*printable, *unprintable], strict=True))


def _byte_level(token: str) -> bytes:
    table = _byte_characters()
    try:
        return bytes(table[character] for character in token)
    except KeyError:  # a token that was added without the byte alphabet
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> chat template, the usual one as "default": of chat_template.jinja and
    additional_chat_templates/NAME.jinja, else of chat_template.json or tokenizer_config.json (a
    text, a list with names, or an object)."""
    files = {
        entry.stem: entry for entry in sorted(folder.glob("additional_chat_templates/*.jinja"))
    }
    if (file := folder / "chat_template.jinja").is_file():
        files["default"] = file
    try:
        if files:
            return {name: file.read_text(encoding="utf-8-sig") for name, file in files.items()}
    except (OSError, UnicodeDecodeError) as problem:
        text = f"A chat template in {str(folder)!r} cannot be read: {problem}"
        raise BrokenWeights(text) from problem
    templates = _read_json(folder / "chat_template.json").get("chat_template")
    templates = config.get("chat_template") if templates is None else templates
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list):
        pairs = [entry for entry in templates if isinstance(entry, dict)]
        templates = {entry.get("name"): entry.get("template") for entry in pairs}
    named_templates = templates.items() if isinstance(templates, dict) else ()
    return {
        name: text
        for name, text in named_templates
        if isinstance(name, str) and isinstance(text, str)
    }


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file():
            return {}
        text = file.read_bytes().removeprefix(codecs.BOM_UTF8)  # as some Windows tools write it
        return msgspec.json.decode(text, type=dict[str, Any])
    except ValueError as problem:
        raise BrokenWeights(f"{str(file)!r} is not a JSON object: {problem}") from problem
