"""Makes prompt texts with a requested number of tokens, as the server counts them.

    maker = PromptMaker(seed=1, fixed_tokens=facts.fixed_tokens, word_tokens=facts.word_tokens)
    text, tokens = maker.make(request)         # English words; about request.prompt_tokens

In nearly every tokenizer, each word is one token, together with the space before it. The exact
number of tokens per word, and of the fixed part of a prompt (BOS, chat template), follow from the
endpoint's own counts when it is probed. Later, the count on each record shows whether they were
right (warning PromptsOff). All prompts begin with the same word, because a word at the beginning of
a text may be several tokens.

Every request has a random stream of words of its own, so that no two requests share a prefix by
accident. The shared prefix is one stream, the same for all seeds.
"""

from __future__ import annotations

import hashlib
import itertools
from importlib import resources

from crossover.serving.workload.request_lengths import RequestSpec

_FILE = resources.files("crossover.serving.workload").joinpath("data", "words.txt")
WORDS: tuple[str, ...] = tuple(_FILE.read_text(encoding="utf-8").split())


class PromptMaker:
    """Makes the prompts of one load level."""

    def __init__(self, seed: int, fixed_tokens: float = 0.0, word_tokens: float = 1.0) -> None:
        """`fixed_tokens` are the tokens of a prompt besides its words, such as BOS and the chat
        template; the estimate may be below 0. `word_tokens` are the tokens per word."""
        self._seed = seed
        self.fixed_tokens, self._word_tokens = fixed_tokens, word_tokens

    def make(self, request: RequestSpec) -> tuple[str, int]:
        """Return the prompt of a request and its number of tokens. The same seed and request give
        the same prompt.

        The number differs from the requested one by rounding to whole words, and is larger if not
        even one word fits.
        """
        count = max(1, round((request.prompt_tokens - self.fixed_tokens) / self._word_tokens))
        words = self._shared_words(request)[:count]
        words += _stream_words(f"{self._seed}/{request.index}", count - len(words))
        words[0] = WORDS[0]
        return " ".join(words), round(self.fixed_tokens + self._word_tokens * count)

    def _shared_words(self, request: RequestSpec) -> list[str]:
        """Return the words with which other prompts may begin too."""
        if not request.blocks:
            return _stream_words("prefix", round(request.prefix_tokens / self._word_tokens))
        count = max(1, round(request.block_tokens / self._word_tokens))
        streams = [_stream_words(f"block/{block}", count) for block in request.blocks]
        return list(itertools.chain.from_iterable(streams))

    def words(self, name: str, tokens: int) -> str:
        """Return the text of one message of a conversation, from the stream of this name. It has
        `tokens` tokens, not counting those that the chat template adds."""
        words = _stream_words(name, max(1, round(tokens / self._word_tokens)))
        return " ".join([WORDS[0], *words[1:]])


def _stream_words(name: str, count: int) -> list[str]:
    """Return the first `count` words of the stream with this name.

    Each word is chosen by 2 bytes of the SHAKE-128 hash of the name, which is ten times as fast as
    a random generator per prompt.
    """
    numbers = memoryview(hashlib.shake_128(name.encode()).digest(2 * count)).cast("H")
    return [WORDS[number % len(WORDS)] for number in numbers]
