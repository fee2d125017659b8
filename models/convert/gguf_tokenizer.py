"""tokenizer.json to the tokenizer part of a GGUF file.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece BPE with byte tokens (Llama 2,
Mistral). llama.cpp knows the rules that cut text into words by name only. A wrong rule gives other
ids silently: models.convert.gguf compares on PROBES.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

from models.errors import UnsupportedModel
from models.synthetic.gguf_writer import Vocabulary
from models.tokenization.tokenizer import HfTokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Regular expression of a Split pre-tokenizer -> llama.cpp's name of it.
SPLITS: dict[str, str] = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}

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
    description: dict[str, Any] = json.loads(
        (folder / "tokenizer.json").read_text(encoding="utf-8")
    )
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
    types = [int(gguf.TokenType.UNUSED)] * size
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, int(gguf.TokenType.NORMAL)
    for added in description.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = int(
            gguf.TokenType.CONTROL if added.get("special") else gguf.TokenType.USER_DEFINED
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    sentencepiece = bool(model.get("byte_fallback"))
    eos = sorted(tokenizer.eos_ids)
    eos_id = tokenizer.named_id("eos_token")
    if eos_id is None and eos:
        eos_id = eos[0]
    bos_id = tokenizer.bos_id
    if bos_id is None:
        bos_id = tokenizer.named_id("bos_token")
    return Vocabulary(
        model="llama" if sentencepiece else "gpt2",
        pre="default" if sentencepiece else _pre_tokenizer(folder, description),
        tokens=tokens,
        types=_with_byte_types(tokens, types, model.get("unk_token")) if sentencepiece else types,
        merges=[] if sentencepiece else merges,
        scores=_scores(tokens, merges) if sentencepiece else [],
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=tokenizer.named_id("pad_token"),
        unknown_id=model["vocab"].get(model.get("unk_token")),
        add_bos=tokenizer.bos_id is not None,
        add_space_prefix=_adds_space(description) if sentencepiece else None,
        chat_template=tokenizer.chat_template,
    )


def _pre_tokenizer(folder: Path, description: dict[str, Any]) -> str:
    """llama.cpp's name of a byte-level tokenizer's rule."""
    outer = description.get("pre_tokenizer") or {}
    parts = outer.get("pretokenizers", []) if outer.get("type") == "Sequence" else [outer]
    kinds = [part.get("type") for part in parts]
    if (
        kinds == ["ByteLevel"]
        and parts[0].get("use_regex", True)
        and not parts[0].get("add_prefix_space")
    ):
        return "gpt-2"
    if (
        kinds == ["Digits", "ByteLevel"]
        and parts[0].get("individual_digits")
        and parts[1].get("use_regex", True)
    ):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        pattern = parts[0].get("pattern", {}).get("Regex")
        if pattern in SPLITS:
            return SPLITS[pattern]
    raise UnsupportedModel(
        f"{folder.name} cuts text into words in a way that has no known name in llama.cpp: "
        f"{json.dumps(outer)[:200]}"
    )


def _with_byte_types(tokens: list[str], types: list[int], unknown: str | None) -> list[int]:
    out = list(types)
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            out[index] = int(gguf.TokenType.BYTE)
        elif token == unknown:
            out[index] = int(gguf.TokenType.UNKNOWN)
    return out


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece merges the highest score first: minus the rank of the merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _adds_space(description: dict[str, Any]) -> bool:
    """Whether text is given a leading space, by normalizer or Metaspace."""
    text = json.dumps([description.get("normalizer"), description.get("pre_tokenizer")])
    return (
        '"Prepend"' in text
        or '"prepend_scheme": "first"' in text
        or '"prepend_scheme": "always"' in text
    )
