"""tokenizer.json (byte-level BPE: GPT-2, Llama 3, Qwen, SmolLM) to the tokenizer of a GGUF file.

llama.cpp knows the rules that cut text into words by name only. A wrong rule gives other ids
silently: what was written is compared with the source on PROBES.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import TokenType as Kind

from models.errors import BrokenWeights, UnsupportedModel
from models.gguf_writer import Vocabulary
from models.tokenizer import HfTokenizer, Tokenizer

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
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    description: dict[str, Any] = json.loads(text)
    model = description["model"]
    kinds = [one.get("type") for one in _parts(description)]
    if model.get("type") != "BPE" or "ByteLevel" not in kinds:
        raise UnsupportedModel(
            f"{folder.name} has a tokenizer of type {model.get('type')!r} that is not byte-level; "
            "only byte-level BPE is converted to GGUF: give the model's own GGUF file, or "
            "--backend onnx"
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
    bos_id, eos_id = tokenizer.bos_id, tokenizer.named_id("eos_token")
    return Vocabulary(
        pre=_pre_tokenizer(folder, description),
        tokens=tokens,
        types=types,
        merges=[one if isinstance(one, str) else " ".join(one) for one in model["merges"]],
        bos_id=tokenizer.named_id("bos_token") if bos_id is None else bos_id,
        eos_id=min(tokenizer.eos_ids, default=None) if eos_id is None else eos_id,
        pad_id=tokenizer.named_id("pad_token"),
        add_bos=bos_id is not None,
        chat_template=tokenizer.chat_template,
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
