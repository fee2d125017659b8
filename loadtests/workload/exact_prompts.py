"""Prompt text of an exact token count, as the server counts (its /tokenize).

    maker = PromptMaker(count_tokens, seed=1)  # count_tokens(text) -> int, template included
    text, tokens = maker.make(ask)             # English words; counts ask.prompt_tokens

Words of one token each are found with a few calls; a prompt is that many words, checked with one
call and corrected at its tail. After `TRUST` prompts in a row without correction, later ones are
not checked: the server's own count on each record still shows a difference (warning PromptsOff).
Without `count_tokens` a word is taken for a token.

Each request has a word stream of its own, so no two share a prefix by accident; prefix groups and
sessions share streams by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import resources

from loadtests.errors import LoadError
from loadtests.workload.request_lengths import Ask

TRUST = 8
TRIES = 8
CALIBRATION_CALLS = 120
LEAST_WORDS = 16  # of one token each

# Common, short, of plain letters: one token each (with its space) in nearly every tokenizer.
_FILE = resources.files("loadtests.workload").joinpath("data", "words.txt")
WORDS: tuple[str, ...] = tuple(_FILE.read_text(encoding="utf-8").split())


class PromptMaker:
    """`seed` is the level's; prefix groups, which levels share, have one of their own.

    Without `count_tokens`, a word is taken for a token.
    """

    def __init__(self, count_tokens: Callable[[str], int] | None, seed: int) -> None:
        self._count = count_tokens
        self._seed = seed
        self._exact_in_a_row = 0
        self._words = WORDS
        self._fixed_tokens = 0  # BOS, chat template, and what the first word costs as the first
        if count_tokens is not None:
            self._calibrate(count_tokens)

    def make(self, ask: Ask) -> tuple[str, int]:
        """The prompt of an ask, the same for the same settings, and how many tokens it has.

        It has more than asked only where that is shorter than a prompt can be. Raises LoadError
        where the count cannot be met.
        """
        wanted = max(ask.prompt_tokens, self._fixed_tokens + 1)
        words = self._stream(ask, wanted - self._fixed_tokens)
        if self._count is None or self._exact_in_a_row >= TRUST:
            return " ".join(words), wanted
        for attempt in range(TRIES):
            text = " ".join(words)
            counted = self._count(text)
            if counted == wanted:
                self._exact_in_a_row = self._exact_in_a_row + 1 if attempt == 0 else 0
                return text, wanted
            if counted < wanted:
                words = [*words, *self._stream(ask, len(words) + wanted - counted)[len(words) :]]
            elif len(words) - (counted - wanted) >= 1:
                words = words[: len(words) - (counted - wanted)]
            elif words[0] != self._words[0]:  # at the start of a text it is several tokens
                words = [self._words[0], *self._stream(ask, wanted - self._fixed_tokens)[1:]]
            else:
                break
        raise LoadError(
            f"no prompt of {wanted} tokens could be made in {TRIES} tries: "
            f"the last had {counted}; is the token count stable?"
        )

    def _stream(self, ask: Ask, words: int) -> list[str]:
        """The first `words` words of an ask: its segments in order, the last one open-ended."""
        segments = ask.segments()
        out: list[str] = []
        for position, (name, tokens) in enumerate(segments):
            left = words - len(out)
            take = left if position == len(segments) - 1 else min(tokens, left)
            if take > 0:
                out += self._named(name, take)
        return out

    def _named(self, name: str, words: int) -> list[str]:
        """The first `words` words of a named stream: SHAKE-128 of seed and name, 2 bytes a word.

        A longer digest starts with the shorter one, so a session's prompts do as well. Ten times
        cheaper than a random generator for each prompt.
        """
        seed = 0 if name.startswith("prefix/") else self._seed
        drawn = memoryview(hashlib.shake_128(f"{seed}/{name}".encode()).digest(2 * words)).cast("H")
        known, count = self._words, len(self._words)
        return [known[number % count] for number in drawn]

    def _calibrate(self, count: Callable[[str], int]) -> None:
        """Find the words that add one token each: one call where all do, else by halves."""
        base = " ".join(WORDS[:8])
        base_count = count(base)
        found: list[str] = []
        todo: list[tuple[str, ...]] = [WORDS[8:]]
        calls_left = CALIBRATION_CALLS
        while todo and calls_left:
            part = todo.pop()
            calls_left -= 1
            if count(base + " " + " ".join(part)) - base_count == len(part):
                found += part
            elif len(part) > 1:
                todo += [part[: len(part) // 2], part[len(part) // 2 :]]
        if len(found) < LEAST_WORDS:
            raise LoadError(
                f"only {len(found)} of {len(WORDS)} common words are one token each: "
                "prompts cannot be made to a token count"
            )
        self._words = tuple(sorted(found))
        few = self._words[:LEAST_WORDS]
        self._fixed_tokens = max(0, count(" ".join(few)) - len(few))
