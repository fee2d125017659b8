"""How the shipped tokenizer was trained: byte-level BPE over models/data, as the test does it.

The texts are this project's own: licence, prose, code, and a list of common words, commonest first.
Text is cut by GPT-2's regular expression, llama.cpp's pre-tokenizer "gpt-2".
"""

import hashlib
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from crossover.models.text.tokenizer import BYTES, DATA, SHIPPED, SPECIAL_TOKENS
from crossover.models.weights.weights_manifest import SHIPPED_MARK
from tests.graph_logits import CORPUS

MERGES = 4096


def test_training_again_gives_the_shipped_tokenizer() -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL_TOKENS) + BYTES + MERGES,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    corpus = CORPUS.read_text(encoding="utf-8").splitlines(keepends=True)
    words = (DATA / "words.txt").read_text(encoding="utf-8").split()
    # Zipf's law: the word of rank r is used in proportion to 1 / r.
    common = [f" {word}" for rank, word in enumerate(words) for _ in range(2 + 3000 // (rank + 10))]
    bpe.train_from_iterator([*corpus, *common], trainer)
    table = json.loads(bpe.to_str())
    # Ids in the promised order, without merges that make a token twice.
    ids = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *sorted(alphabet)))}
    merges = []
    for left, right in table["model"]["merges"]:
        if left + right not in ids:
            ids[left + right] = len(ids)
            merges.append([left, right])
    table["model"]["vocab"], table["model"]["merges"] = ids, merges
    assert table == json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert SHIPPED_MARK == hashlib.blake2b(SHIPPED.read_bytes(), digest_size=6).hexdigest()
