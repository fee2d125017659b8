"""tokenizer.json to the tokenizer part of a GGUF file, and back.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) both ways, SentencePiece BPE with byte tokens (Llama
2, Mistral) to GGUF only; which of the two it is, its pre-tokenizer says (`byte_fallback` may be set
on either).
llama.cpp knows the rules that cut text into words by name only. A wrong rule gives other ids
silently: both directions are compared on PROBES.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gguf import TokenType as Kind

from models.errors import BrokenWeights, UnsupportedModel
from models.gguf_vocabulary import GgufTokenizer
from models.gguf_writer import Vocabulary
from models.tokenizer import HfTokenizer, Tokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Regular expression of a Split pre-tokenizer -> llama.cpp's name of it.
SPLITS: dict[str, str] = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
# Other names that llama.cpp has for the same rules.
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

PROBES: tuple[str, ...] = (
    "Hello, world! It's 12345.67 o'clock - isn't it?",
    "  leading and   inner    spaces and trailing   ",
    "line\nbreaks\r\n\n\n\tand\ttabs \n x",
    "Où est la pharmacie? ¿Dónde? Füße, Ελληνικά, привет мир",
    "中文:你好,世界。 日本語 한국어 العربية हिन्दी",
    "😀🚀❤️👍🏽 → ≤ ∑ ½ ﬁ \u00a0\u2003\u200b",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x**2}  # comment\n",
    "<|im_start|>user\nHi<|im_end|>\n<s></s><unk>",
    "don't I'LL we've THEY'RE y'all",
    "a",
    "\n",
    "3.14159 1,000,000 0x1F 2024-01-31T23:59:59Z",
)


def gguf_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The folder's tokenizer, padded to `size` tokens. Raises UnsupportedModel."""
    tokenizer = HfTokenizer(folder / "tokenizer.json")
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    description: dict[str, Any] = json.loads(text)
    model = description["model"]
    if model.get("type") != "BPE":
        raise UnsupportedModel(
            f"{folder.name} has a tokenizer of type {model.get('type')!r}; only BPE is converted"
        )
    if tokenizer.vocabulary > size:
        raise UnsupportedModel(
            f"{folder.name} has {tokenizer.vocabulary} tokens and a model vocabulary of {size}"
        )
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [int(Kind.UNUSED)] * size
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, int(Kind.NORMAL)
    for added in description.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = int(Kind.CONTROL if added.get("special") else Kind.USER_DEFINED)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    bos_id, eos_id = tokenizer.bos_id, tokenizer.named_id("eos_token")
    shared: dict[str, Any] = {
        "tokens": tokens,
        "types": types,
        "bos_id": tokenizer.named_id("bos_token") if bos_id is None else bos_id,
        "eos_id": min(tokenizer.eos_ids, default=None) if eos_id is None else eos_id,
        "pad_id": tokenizer.named_id("pad_token"),
        "unknown_id": model["vocab"].get(model.get("unk_token")),
        "add_bos": bos_id is not None,
        "chat_template": tokenizer.chat_template,
    }
    if any(one.get("type") == "ByteLevel" for one in _parts(description)):
        pre = _pre_tokenizer(folder, description)
        return Vocabulary(model="gpt2", pre=pre, merges=merges, **shared)
    missing = sorted(set(_BYTE_TOKENS) - model["vocab"].keys())
    if missing:  # llama.cpp would end the process
        raise UnsupportedModel(
            f"{folder.name}/tokenizer.json is neither byte-level nor SentencePiece with byte "
            f"tokens: it lacks {len(missing)} of 256, the first {missing[0]}"
        )
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[index] = int(Kind.BYTE)
        elif token == model.get("unk_token"):
            types[index] = int(Kind.UNKNOWN)
    # SentencePiece merges the highest score first: minus the rank of the merge.
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    rules = json.dumps([description.get("normalizer"), description.get("pre_tokenizer")])
    adds_space = re.search(r'"Prepend"|"prepend_scheme": "(first|always)"', rules) is not None
    return Vocabulary(
        model="llama", pre="default", scores=scores, add_space_prefix=adds_space, **shared
    )


def _parts(description: dict[str, Any]) -> list[dict[str, Any]]:
    """The pre-tokenizers of a tokenizer.json, in order."""
    outer = description.get("pre_tokenizer") or {}
    parts: list[dict[str, Any]] = outer.get("pretokenizers", [outer])
    return parts


def _pre_tokenizer(folder: Path, description: dict[str, Any]) -> str:
    """llama.cpp's name of a byte-level tokenizer's rule."""
    parts = _parts(description)
    kinds, last = [part.get("type") for part in parts], parts[-1]
    by_regex = last.get("use_regex", True)
    if kinds == ["ByteLevel"] and by_regex and not last.get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and by_regex:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not by_regex:
        pattern = parts[0].get("pattern", {}).get("Regex")
        if pattern in SPLITS:
            return SPLITS[pattern]
    raise UnsupportedModel(
        f"{folder.name} cuts text into words in a way that has no known name in llama.cpp: "
        f"{json.dumps(parts)[:200]}"
    )


def compare_tokenizers(theirs: Tokenizer, ours: Tokenizer, source: str) -> None:
    """Raises BrokenWeights with the first text that both cut differently. `source`: its name."""
    for text in PROBES:
        for parse_special in (False, True):
            want = theirs.encode(text, parse_special=parse_special)
            got = ours.encode(text, parse_special=parse_special)
            if want != got:
                raise BrokenWeights(
                    f"the tokenizer written for {source} cuts {text!r} into {got}, the "
                    f"source's into {want}"
                )
    if ours.bos_id != theirs.bos_id:
        raise BrokenWeights(
            f"the tokenizer written for {source} begins with token {ours.bos_id}, the "
            f"source's with {theirs.bos_id}"
        )


def hf_tokenizer_files(file: Path, metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """tokenizer.json and its companions of a GGUF file's vocabulary: name -> content.

    `metadata` with whole arrays. Raises UnsupportedModel where it is not byte-level BPE.
    """
    known = GgufTokenizer(file)
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "")
    pre = _ALIASES.get(pre, pre)
    pre_tokenizer = _pre_tokenizer_called(pre)
    if kind != "gpt2" or pre_tokenizer is None:
        raise UnsupportedModel(
            f"{file.name} cuts text into words by llama.cpp's rule {pre!r} of kind {kind!r}, which "
            "has no known tokenizer.json: it is served by llama_cpp only"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [int(Kind.NORMAL)] * len(tokens)
    merges = [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]]
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    added = [int(Kind.CONTROL), int(Kind.USER_DEFINED)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [
                {"id": index, "content": token, "special": types[index] == added[0], **flags}
                for index, token in enumerate(tokens)
                if types[index] in added
            ],
            "normalizer": None,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": None if known.bos_id is None else _begins_with(tokens, known.bos_id),
            "decoder": _byte_level(use_regex=True),
            "model": {
                "type": "BPE",
                "vocab": {
                    token: index
                    for index, token in enumerate(tokens)
                    if types[index] != int(Kind.UNUSED)
                },
                "merges": merges,
                "ignore_merges": pre == "llama-bpe",
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "chat_template": known.chat_template,
            **{f"{name}_token": tokens[index] for name, index in ids.items() if index is not None},
        },
        "generation_config.json": {"eos_token_id": sorted(known.eos_ids)},
    }


def _pre_tokenizer_called(name: str) -> dict[str, Any] | None:
    """The rule that llama.cpp has by this name, as a tokenizer.json has it."""
    if name == "gpt-2":
        return _byte_level(use_regex=True)
    first: dict[str, Any] = {"type": "Digits", "individual_digits": True}
    if name != "smollm":
        pattern = next((one for one, known in SPLITS.items() if known == name), None)
        if pattern is None:
            return None
        first = {"type": "Split", "pattern": {"Regex": pattern}}
        first |= {"behavior": "Isolated", "invert": False}
    parts = [first, _byte_level(use_regex=name == "smollm")]
    return {"type": "Sequence", "pretokenizers": parts}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    shared = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {**shared, "use_regex": use_regex}


def _begins_with(tokens: list[str], bos_id: int) -> dict[str, Any]:
    """A post-processor that puts the token first."""
    bos = tokens[bos_id]
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, start, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
