"""tokenizer.json to the tokenizer part of a GGUF file, and back.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece BPE with byte tokens (Llama 2,
Mistral); which of the two it is, its pre-tokenizer says (`byte_fallback` may be set on either).
llama.cpp knows the rules that cut text into words by name only. A wrong rule gives other ids
silently: both directions are compared on PROBES.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

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
    sentencepiece = not any(one.get("type") == "ByteLevel" for one in _parts(description))
    if sentencepiece:
        missing = sorted(set(_BYTE_TOKENS) - model["vocab"].keys())
        if missing:  # llama.cpp would end the process
            raise UnsupportedModel(
                f"{folder.name}/tokenizer.json is neither byte-level nor SentencePiece with byte "
                f"tokens: it lacks {len(missing)} of 256, the first {missing[0]}"
            )
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


def _parts(description: dict[str, Any]) -> list[dict[str, Any]]:
    """The pre-tokenizers of a tokenizer.json, in order."""
    outer = description.get("pre_tokenizer") or {}
    parts: list[dict[str, Any]] = outer.get("pretokenizers", [outer])
    return parts


def _pre_tokenizer(folder: Path, description: dict[str, Any]) -> str:
    """llama.cpp's name of a byte-level tokenizer's rule."""
    parts = _parts(description)
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

    `metadata` with whole arrays. Raises UnsupportedModel.
    """
    known = GgufTokenizer(file)
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {
        token: index
        for index, token in enumerate(tokens)
        if types[index] != int(gguf.TokenType.UNUSED)
    }
    model: dict[str, Any] = {"type": "BPE", "vocab": vocab}
    pre_tokenizer = normalizer = None
    space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if kind == "gpt2":
        pre = _ALIASES.get(pre, pre)
        pre_tokenizer = _pre_tokenizer_called(pre)
        if pre_tokenizer is None:
            raise UnsupportedModel(
                f"{file.name} cuts text into words by llama.cpp's rule {pre!r}, which has no "
                "known tokenizer.json"
            )
        merges = [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]]
        model |= {"merges": merges, "ignore_merges": pre == "llama-bpe"}
        decoder: dict[str, Any] = _byte_level(use_regex=True)
    elif kind == "llama":
        mark = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        prepend = [{"type": "Prepend", "prepend": "▁"}] if space else []
        normalizer = {"type": "Sequence", "normalizers": [*prepend, mark]}
        unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
        scores = metadata["tokenizer.ggml.scores"]
        model |= {"merges": _merges(vocab, scores), "unk_token": tokens[unknown]}
        model |= {"byte_fallback": True, "fuse_unk": True}
        unmark = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space else []
        steps = [unmark, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        decoder = {"type": "Sequence", "decoders": steps}
    else:
        raise UnsupportedModel(
            f"{file.name} has a tokenizer of llama.cpp's kind {kind!r}; gpt2 and llama are known"
        )
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    named = {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
    added = [int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [
                {"id": index, "content": token, "special": types[index] == added[0], **flags}
                for index, token in enumerate(tokens)
                if types[index] in added
            ],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": None if known.bos_id is None else _begins_with(tokens, known.bos_id),
            "decoder": decoder,
            "model": model,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "chat_template": known.chat_template,
            **named,
        },
        "generation_config.json": {"eos_token_id": sorted(known.eos_ids)},
    }


def _pre_tokenizer_called(name: str) -> dict[str, Any] | None:
    """The rule that llama.cpp has by this name, as a tokenizer.json has it."""
    if name == "gpt-2":
        return _byte_level(use_regex=True)
    first: dict[str, Any] = {"type": "Digits", "individual_digits": True}
    if name != "smollm":
        patterns = [pattern for pattern, known in SPLITS.items() if known == name]
        if not patterns:
            return None
        first = {"type": "Split", "pattern": {"Regex": patterns[0]}}
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


def _merges(vocab: dict[str, int], scores: list[float]) -> list[list[str]]:
    """SentencePiece's merges: every way to make a token of two others, best score first."""
    found = [
        (-scores[index], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token, index in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [[left, right] for *_, left, right in sorted(found)]


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
