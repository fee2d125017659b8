"""Throws random grammars at serving.grammar and walks those it lets through: python -m tests.serving.grammar_fuzz MODEL.gguf SEED COUNT.

Run in a process of its own, because what it looks for is a crash, a hang, or memory without end in llama.cpp. Prints how many grammars were
let through.
"""

from __future__ import annotations

import random
import sys

import numpy as np

from serving import grammar
from serving.backends.base import Sampling
from serving.backends.llama_cpp_library import library
from serving.errors import Unsupported

ITEMS = ['"x"', '"yz"', '""', "[a-z]", "[^a]", ".", "a", "b", "|", "|", "(a)?", '(b "q")*', '(root|"k")+']
PIECES = [*ITEMS, "root", "::=", "::=", "\n", "(", ")", "*", "+", "?", "{2}", "{0,3}", "{1,}", "[", '"', "#c\n", "<x>", "!<[5]>", "\\", "{"]


def main(model: str, seed: int, count: int) -> None:
    grammar.MASK_SECONDS = 0.05
    llama = library()
    settings = llama.llama_model_default_params()
    settings.vocab_only = True
    vocab = llama.llama_model_get_vocab(llama.llama_model_load_from_file(model.encode(), settings))
    size: int = llama.llama_vocab_n_tokens(vocab)
    grammars = grammar.Grammars(llama, vocab, size)
    chance = random.Random(seed)
    opened = 0
    for _ in range(count):
        try:
            state = grammars.open(Sampling(grammar=random_grammar(chance)))
        except Unsupported:
            continue
        assert state is not None
        opened += 1
        for _ in range(4):
            logits = np.zeros(size, np.float32)
            state.mask(logits)
            allowed = np.flatnonzero(np.isfinite(logits)).tolist()
            if not allowed:
                break
            token = chance.choice(allowed)
            assert state.allows(token)
            state.accept(token)
    print(opened)


def random_grammar(chance: random.Random) -> str:
    if chance.random() < 0.5:
        return " ".join(chance.choices(PIECES, k=chance.randint(1, 25)))
    return "\n".join(f"{name} ::= {' '.join(chance.choices(ITEMS, k=chance.randint(1, 5)))}" for name in ("root", "a", "b"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
