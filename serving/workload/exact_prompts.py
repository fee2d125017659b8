"""Prompt text of a token count, as the server counts.

    maker = PromptMaker(seed=1, fixed_tokens=facts.fixed_tokens, word_tokens=facts.word_tokens)
    text, tokens = maker.make(ask)             # English words; counts ask.prompt_tokens

The words are one token each (with their space) in nearly every tokenizer; what a word of them and
the rest of a prompt cost is told by the endpoint's own counts when it is probed, and its count on
each record shows where that does not hold (warning PromptsOff). All prompts begin with the same
word, since one that begins a text may be several tokens.

Each request has a word stream of its own, so no two share a prefix by accident; the shared prefix
is a stream of its own, the same for all seeds.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from crossover.serving.workload.request_lengths import RequestSpec

_FILE = resources.files("crossover.serving.workload").joinpath("data", "words.txt")
WORDS: tuple[str, ...] = tuple(_FILE.read_text(encoding="utf-8").split())


class PromptMaker:
    """Prompts of one level."""

    def __init__(self, seed: int, fixed_tokens: float = 0.0, word_tokens: float = 1.0) -> None:
        """`fixed_tokens`: of a prompt besides its words: BOS, chat template. May be below 0."""
        self._seed = seed
        self.fixed_tokens, self._word = fixed_tokens, word_tokens

    def make(self, ask: RequestSpec) -> tuple[str, int]:
        """Return the prompt of an ask, the same for the same settings, and how many tokens it has.

        It has more than asked only where that is shorter than a prompt can be.
        """
        count = max(1, round((ask.prompt_tokens - self.fixed_tokens) / self._word))
        shared = min(count, round(ask.prefix_tokens / self._word))
        words = _drawn("prefix", shared) + _drawn(f"{self._seed}/{ask.index}", count - shared)
        words[0] = WORDS[0]
        return " ".join(words), round(self.fixed_tokens + self._word * count)

    def words(self, name: str, tokens: int) -> str:
        """Words of a stream of its own, for a message of a conversation: so many tokens, without
        what the chat template adds to it.
        """
        words = _drawn(name, max(1, round(tokens / self._word)))
        return " ".join([WORDS[0], *words[1:]])


def _drawn(name: str, words: int) -> list[str]:
    """Return the first `words` words of a stream: SHAKE-128 of its name, 2 bytes a word.

    Ten times cheaper than a random generator for each prompt.
    """
    drawn = memoryview(hashlib.shake_128(name.encode()).digest(2 * words)).cast("H")
    return [WORDS[number % len(WORDS)] for number in drawn]
