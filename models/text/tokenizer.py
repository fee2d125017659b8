"""Tokenizers from tokenizer.json, GGUF or the shipped vocabulary: text to token ids, ids to bytes.

The `tokenizers` library reads them, since transformers' AutoTokenizer refuses folders of another
major version.

Models with random weights get the shipped byte-level BPE, cut or padded to their vocabulary. It was
trained on texts of this project (tests/models/text/test_shipped_tokenizer.py). Ids 0, 1 and 2 are
SPECIAL_TOKENS, 3 to 258 are bytes, and 259 + i is the result of merge i. So the table can be cut
after any id from 258 on.
"""

from __future__ import annotations

import codecs
import json
import re
import signal
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as HfFile

from crossover.models.child_process import run_in_child
from crossover.models.errors import (
    BrokenWeights,
    ModelError,
    UnknownModel,
    UnsupportedModel,
)
from crossover.models.gguf.reader import is_gguf_file
from crossover.models.text.chat_template import CHATML, RendersChat
from crossover.models.text.gguf_vocabulary import GgufTokenizer
from crossover.models.text.sampling_defaults import read_sampling_defaults

DATA = Path(__file__).parents[1] / "data"
SHIPPED = DATA / "tokenizer.json"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Files from which transformers makes a tokenizer.json: of sentencepiece, Mistral and GPT-2.
OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json")
BYTES = 256
TRIAL_SECONDS = 60  # time limit of a trial, which takes two seconds with the largest vocabularies
# Characters whose UTF-8 has every byte that text can have. If a vocabulary lacks one of them and
# has no token for unknown text, llama.cpp ends the process.
_EVERY_BYTE = "".join(
    map(chr, [*range(1, 2048), *range(2048, 0xD800, 61), *range(1 << 16, 1 << 20, 4093)])
)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, a folder or a GGUF file. Thread-safe.

    Raises UnknownModel if there is none, BrokenWeights if it cannot be read.
    """
    path = Path(path)
    if path.is_file() and (path.suffix == ".gguf" or is_gguf_file(path)):
        return GgufTokenizer(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    check_has_tokenizer(file)
    return HfTokenizer(file)


def check_has_tokenizer(file: Path) -> None:
    """Raise UnknownModel unless `file`, a tokenizer.json, is there. The message says how to make
    one."""
    if file.is_file():
        return
    others = [name for name in OTHER_TOKENIZERS if (file.parent / name).is_file()]
    has_others = f", only {others[0]}" if others else ""
    raise UnknownModel(
        f"{str(file.parent)!r} has no tokenizer: no {file.name}{has_others}. Make it with "
        "transformers, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), or use the "
        "model's GGUF file, which has its tokenizer in it"
    )


def try_tokenizer(path: Path) -> None:
    """Load and use an untrusted tokenizer once, in a child process, since native code may abort or
    hang.

    Raises BrokenWeights, UnknownModel, UnsupportedModel.
    """
    try:
        run_in_child(f"{__name__}:_load_and_use", None, str(path))
    except (UnknownModel, UnsupportedModel):
        raise
    except ModelError as problem:
        raise BrokenWeights(f"The tokenizer of {path.name} cannot be used: {problem}") from problem


def _load_and_use(path: str, progress: object = None) -> None:
    signal.alarm(TRIAL_SECONDS)
    tokenizer = load_tokenizer(path)
    tokenizer.token_bytes()
    tokenizer.encode(_EVERY_BYTE)
    tokenizer.encode("Once <|im_start|>", parse_special=True)


class HfTokenizer(RendersChat):
    """A `tokenizer.json` with the configuration files that lie beside it."""

    def __init__(self, file: Path) -> None:
        # Whether control tokens are parsed is a setting of the object, so there are two objects.
        try:
            raw = file.read_text(encoding="utf-8-sig")
            self._special_parsing, self._plain = HfFile.from_str(raw), HfFile.from_str(raw)
        except Exception as problem:  # the library raises bare Exception
            raise BrokenWeights(f"{str(file)!r} is not a valid tokenizer: {problem}") from problem
        self._plain.encode_special_tokens = True
        for tokenizer in (self._plain, self._special_parsing):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(raw).get("decoder"))
        self._added = self._special_parsing.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in self._added.items() if token.special)
        ids = self._special_parsing.get_vocab(with_added_tokens=True).values()
        self.vocabulary = 1 + max(ids, default=-1)
        config = _read_json(file.parent / "tokenizer_config.json")
        self.chat_tokens = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            if token := config.get(name):  # a string, or an object with `content`
                self.chat_tokens[name] = token["content"] if isinstance(token, dict) else token
        generation_config = _read_json(file.parent / "generation_config.json")
        self.sampling_defaults = read_sampling_defaults(generation_config)
        self.eos_ids = self._eos_ids(generation_config, file.parent)
        with_bos = self._special_parsing.encode("a", add_special_tokens=True).ids
        self.bos_id = with_bos[0] if with_bos and with_bos[0] in self.special_ids else None
        templates = _chat_templates(file.parent, config)
        self.chat_template = templates.pop("default", None)
        self.other_templates = templates

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the token ids without BOS. The text of a control token is plain text unless
        `parse_special`."""
        tokenizer = self._special_parsing if parse_special else self._plain
        # JSON may contain half of a surrogate pair, which cannot be encoded.
        valid_text = text.encode(errors="replace").decode()
        # Not `encode`, which holds the GIL for 0.8 s for a million letters.
        ids: list[int] = tokenizer.encode_batch_fast([valid_text], add_special_tokens=False)[0].ids
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

    def _eos_ids(self, generation_config: Mapping[str, Any], folder: Path) -> frozenset[int]:
        """Return the ids in generation_config.json, or else in config.json, and the id of the token
        named eos_token."""
        config = _read_json(folder / "config.json")
        eos_ids = generation_config.get("eos_token_id")
        if eos_ids is None:
            eos_ids = config.get("eos_token_id")
        ids = list(eos_ids) if isinstance(eos_ids, list) else [eos_ids]
        ids.append(self._special_parsing.token_to_id(self.chat_tokens.get("eos_token", "")))
        # Some files have -1, or null in a list, for "none".
        return frozenset(value for value in ids if type(value) is int and value >= 0)


Tokenizer = HfTokenizer | GgufTokenizer


@cache
def shipped(vocabulary: int) -> dict[str, Any]:
    """Return the shipped tokenizer.json, cut or padded to `vocabulary` entries, at least 259. It is
    cached, so callers must not change it.

    Padding tokens (" w0123") decode to plain text, and no text encodes to them.
    """
    table = _read_json(SHIPPED)
    model = table["model"]
    model["merges"] = model["merges"][: vocabulary - len(SPECIAL_TOKENS) - BYTES]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)[:vocabulary]
    tokens += [f"Ġw{number:04d}" for number in range(vocabulary - len(tokens))]
    model["vocab"] = {token: index for index, token in enumerate(tokens)}
    return table


def write_shipped(folder: Path, vocabulary: int, context: int) -> None:
    """Write the files of the shipped tokenizer, for a model with a context of `context` tokens."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    files = {
        "tokenizer.json": shipped(vocabulary),
        "tokenizer_config.json": config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0},
    }
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")


@cache
def _byte_characters() -> dict[str, int]:
    """Return character -> byte. Byte-level vocabularies write each byte as a printable character,
    as GPT-2 does."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    characters = [*printable, *range(256, 256 + len(unprintable))]
    return dict(zip(map(chr, characters), [*printable, *unprintable], strict=True))


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary."""
    table = _byte_characters()
    try:
        return bytes(table[character] for character in token)
    except KeyError:  # a token that was added without the byte alphabet
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    """Return the bytes of a token of a SentencePiece vocabulary, which writes a byte as <0x0A> and
    a space as ▁."""
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> chat template. The model's own template is called "default".

    Templates are in chat_template.jinja and additional_chat_templates/NAME.jinja. Without these
    files they are in chat_template.json or tokenizer_config.json, as a text, a list of objects with
    `name` and `template`, or an object.
    """
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
    except (ValueError, RecursionError) as problem:
        raise BrokenWeights(f"{str(file)!r} is not a JSON object: {problem}") from problem
