"""How the shipped tokenizer was trained: byte-level BPE over models/data.

    python -m models.shipped_tokenizer

The texts are this project's own: licence, prose, code, and a list of common words, commonest first.
Ids 0, 1, 2 are <|endoftext|>, <|im_start|>, <|im_end|>; 3 to 258 are bytes; 259 + i is what merge i
makes: cutting the table after any id leaves a working tokenizer. Text is cut by GPT-2's regular
expression, llama.cpp's pre-tokenizer "gpt-2". A test trains again and compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DATA = Path(__file__).parent / "data"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = 256
MERGES = 4096


def train() -> dict[str, Any]:
    """The tokenizer.json of the texts, as a dictionary."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL_TOKENS) + BYTES + MERGES,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (DATA / "corpus.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    words = (DATA / "words.txt").read_text(encoding="utf-8").split()
    # Zipf's law: the word of rank r is used in proportion to 1 / r.
    common = [f" {word}" for rank, word in enumerate(words) for _ in range(2 + 3000 // (rank + 10))]
    bpe.train_from_iterator([*corpus, *common], trainer)
    return _renumbered(json.loads(bpe.to_str()))


def _renumbered(table: dict[str, Any]) -> dict[str, Any]:
    """The same table with ids in that order, without merges that make a token twice."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    merges = []
    for left, right in table["model"]["merges"]:
        if left + right not in ids:
            ids[left + right] = len(ids)
            merges.append([left, right])
    table["model"]["vocab"], table["model"]["merges"] = ids, merges
    return table


if __name__ == "__main__":
    trained = train()
    (DATA / "tokenizer.json").write_text(
        json.dumps(trained, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    print(f"{len(trained['model']['merges'])} merges")
